"""The checks over time: told when they change, over once all passed, and not doubted by a restarted sidecar."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast_sidecar.preflight.runner import PreflightWatch
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime.http import Response
from holdfast_sidecar.settings import PreflightSettings

ASKED = PreflightSettings(checks=("Storage", "Clock"), seconds=60.0, gpus=0, skew_seconds=5.0)


class Watched:
    """A watch under a clock of the test's, with what launcher and operator say."""

    def __init__(self, run_dir: Path, clock: Any, golden: Callable[[str], Any]) -> None:
        self.run_dir, self.clock, self.news = run_dir, clock, 0
        self._golden = golden
        self.restart()

    def restart(self, asked: PreflightSettings = ASKED) -> None:
        self.heartbeat = LauncherStatusWatcher(self.run_dir, self.clock)
        self.watch = PreflightWatch(
            asked,
            self.run_dir,
            self.clock,
            gpus=None,
            visible=self.heartbeat.gpus,
            launcher=self.heartbeat.current,
            on_news=self._on_news,
        )

    def launcher(self, result: str) -> None:
        check = {"name": "Storage", "result": result, "message": result}
        (self.run_dir / "preflight.json").write_text(json.dumps({"version": 1, "checks": [check]}))
        (self.run_dir / "status.json").write_text(json.dumps(self._golden("status.json")))

    def operator(self, *, ahead: float = 0.0, took: float = 0.1) -> None:
        moment = self.clock.start.timestamp() + self.clock.seconds - 1000.0 + ahead
        date = format_datetime(type(self.clock.start).fromtimestamp(moment, self.clock.start.tzinfo), usegmt=True)
        self.on_report_answer(date, took)

    def on_report_answer(self, date: str | None, took: float = 0.1, *, ready: bool = False, **answer: Any) -> None:
        body = json.dumps({"version": 1, "revision": 0, **answer}).encode()
        headers = {} if date is None else {"date": date}
        self.watch.on_report_answer(Response(status=200, headers=headers, body=body), took, ready=ready)

    def results(self, seconds: float = 1.0) -> list[str]:
        self.clock.forward(seconds)
        self.heartbeat.poll()
        self.watch.tick()
        return [check.result for check in self.watch.view().checks]

    def _on_news(self) -> None:
        self.news += 1


@pytest.fixture
def watched(run_dir: Path, clock: Any, golden: Callable[[str], Any]) -> Watched:
    return Watched(run_dir, clock, golden)


def test_pod_passes_after_launcher_and_operator_reported(watched: Watched) -> None:
    assert watched.results() == ["Running", "Running"]
    watched.operator()
    assert watched.results() == ["Running", "Passed"]
    watched.launcher("Running")
    assert watched.results() == ["Running", "Passed"]
    watched.launcher("Passed")
    assert watched.results() == ["Passed", "Passed"]
    assert watched.watch.view().passed


def test_news_is_told_once(watched: Watched) -> None:
    for _ in range(5):
        watched.results()
    assert watched.news == 0
    watched.operator()
    for _ in range(5):
        watched.results()
    assert watched.news == 1


def test_hanging_volume_fails_and_may_recover(watched: Watched) -> None:
    """The time limit is the launcher's."""
    watched.operator()
    watched.results(600.0)  # an image that takes long to be pulled
    watched.launcher("Running")
    assert watched.results()[0] == "Running"
    assert watched.results(60.0)[0] == "Failed"
    watched.launcher("Passed")
    assert watched.results() == ["Passed", "Passed"]


def test_a_skewed_clock_fails_until_it_is_set(watched: Watched) -> None:
    watched.launcher("Passed")
    watched.operator(ahead=-30.0)
    assert watched.results() == ["Passed", "Failed"]
    watched.operator()
    assert watched.results() == ["Passed", "Passed"]


@pytest.mark.parametrize("date", [None, "", "soon", "21 Jan 99999999999999999999 09:00:43 GMT"])
def test_an_answer_without_a_time_says_nothing(watched: Watched, date: str | None) -> None:
    watched.on_report_answer(date)
    assert watched.results() == ["Running", "Running"]


def test_what_passed_is_not_doubted_by_the_next_sidecar(watched: Watched) -> None:
    watched.launcher("Passed")
    watched.operator()
    watched.results()
    watched.restart()
    watched.launcher("Failed")
    assert watched.results() == ["Passed", "Passed"]


@pytest.mark.parametrize("left", ["", "{", '{"version": 1}', '{"version": 1, "checks": [1]}', '{"version": 2}'])
def test_a_memory_that_is_not_ours_is_not_believed(watched: Watched, left: str) -> None:
    (watched.run_dir / "sidecar-preflight.json").write_text(left)
    watched.restart()
    assert watched.results() == ["Running", "Running"]


@pytest.fixture
def port() -> Iterator[int]:
    """Of another worker's launcher: kept, so that nobody else listens there, and refused until one does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def peer(port: int, uid: str = "uid-w1") -> dict[str, Any]:
    return {"pod": f"pod-{uid}", "podUID": uid, "ip": "127.0.0.1", "port": port}


def test_other_workers_are_reached_or_named(watched: Watched, port: int) -> None:
    watched.restart(replace(ASKED, checks=("Network",)))
    with socket.create_server(("127.0.0.1", port)):
        watched.on_report_answer(None, ready=False, peers=[peer(port)])
        assert watched.results() == ["Running"], "its own launcher does not listen yet"
    watched.on_report_answer(None, ready=True, peers=[peer(port)])
    assert watched.results() == ["Running"]
    assert watched.results(15.0) == ["Failed"]
    (check,) = watched.watch.view().checks
    assert check.message == f"does not reach pod-uid-w1 (127.0.0.1:{port}, connection refused)"
    assert check.unreached == ("uid-w1",)
    with socket.create_server(("127.0.0.1", port)):
        assert watched.results() == ["Passed"]


def test_who_is_named_no_more_is_missed_by_nobody(watched: Watched) -> None:
    watched.restart(replace(ASKED, checks=("Network",)))
    watched.on_report_answer(None, ready=True, peers=[peer(1)])
    watched.results()
    assert watched.results(15.0) == ["Failed"]
    watched.on_report_answer(None, ready=True, peers=[])
    assert watched.results() == ["Passed"]


def test_an_operator_that_names_no_peers_skips_the_check(watched: Watched) -> None:
    watched.restart(replace(ASKED, checks=("Network",)))
    watched.on_report_answer(None, ready=True)
    assert watched.results() == ["Skipped"]


@pytest.mark.parametrize("peers", [[1], [{}], [{"pod": "a", "podUID": "b", "ip": "c", "port": "d"}], "x"])
def test_peers_that_cannot_be_read_are_none(watched: Watched, peers: Any) -> None:
    watched.restart(replace(ASKED, checks=("Network",)))
    watched.on_report_answer(None, ready=True, peers=peers)
    assert watched.results() == ["Skipped"]


def test_real_process_reports_a_skewed_clock(sidecar: Any, operator: Any, wait: Any) -> None:
    sidecar.environment |= {"HOLDFAST_PREFLIGHT": "GPU,Storage,Clock", "HOLDFAST_PREFLIGHT_GPUS": "0"}
    operator.clock_ahead = 100.0
    sidecar.write_status()
    sidecar.start()

    def results() -> dict[str, str]:
        told = operator.latest().get("preflight") or {"checks": []}
        return {check["name"]: check["result"] for check in told["checks"]}

    wait(lambda: results() == {"GPU": "Skipped", "Storage": "Skipped", "Clock": "Failed"}, "the checks' results")
    assert sidecar.says("s behind the operator's, 5 s are allowed") >= 1
    assert sidecar.says("preflight: GPU: Skipped: the pod asks for no GPU") == 1
    operator.clock_ahead = 0.0
    wait(lambda: results().get("Clock") == "Passed", "the clock that was set")
