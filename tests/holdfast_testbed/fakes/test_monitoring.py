"""The testbed's Prometheus and Alertmanager: real ones, on loopback, gone with their `with`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_testbed.build import debian_packages, programs
from holdfast_testbed.errors import CommandFailedError, MissingProgramError, NotReadyError
from holdfast_testbed.fakes.monitoring import alertmanager, prometheus
from holdfast_testbed.waiting import wait_for

RULES = {"groups": [{"name": "test", "interval": "1s", "rules": [{"alert": "Always", "expr": "vector(1)"}]}]}

needs_programs = pytest.mark.integration


@needs_programs
def test_an_alert_reaches_alertmanager_through_prometheus(tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    with alertmanager(tmp_path, {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}) as keeper:
        peers = [{"static_configs": [{"targets": [keeper.url.removeprefix("http://")]}]}]
        config = {"rule_files": [str(tmp_path / "rules.json")], "alerting": {"alertmanagers": peers}}
        with prometheus(tmp_path, config) as server:
            wait_for(lambda: len(keeper.alerts()) == 1, what="the alert arrives", seconds=60)
            assert [alert["labels"]["alertname"] for alert in server.alerts()] == ["Always"]
        assert keeper.alerts()[0]["labels"] == {"alertname": "Always"}


@needs_programs
def test_a_wrong_query_says_what_is_wrong(tmp_path: Path) -> None:
    with prometheus(tmp_path, {}) as server:
        assert [sample.value for sample in server.query("1 + 1")] == [2.0]
        with pytest.raises(CommandFailedError, match="parse error"):
            server.query("sum(")


@needs_programs
def test_an_invalid_configuration_fails_with_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="scrape_intervall"), prometheus(tmp_path, {"scrape_intervall": "1s"}):
        pass


def test_a_program_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.FOLDERS, "promtool", "nowhere")
    monkeypatch.setattr(programs, "FROM_PATH", frozenset())
    with pytest.raises(MissingProgramError, match=r"promtool is not installed: run 'make setup'.*--with monitoring"):
        programs.program("promtool")


def test_without_debian_a_cluster_is_set_up_without_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(debian_packages, "find", lambda _name: None)
    monkeypatch.setattr(debian_packages, "_on_path", lambda _name: False)
    debian_packages.unpack_for_tests(("monitoring",))
    assert (
        "need these packages, which are not installed: prometheus, prometheus-alertmanager" in capsys.readouterr().err
    )
    with pytest.raises(MissingProgramError, match=r"please install these packages .*: .*nftables, runc"):
        debian_packages.unpack_missing()
