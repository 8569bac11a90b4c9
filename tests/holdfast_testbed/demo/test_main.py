"""How the demo ends: what it leaves behind, what it prints, and its exit status. The cluster is played."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.demo import __main__ as demo
from holdfast_testbed.demo.story import noticed
from holdfast_testbed.drill.job_view import AttemptId, Incident
from holdfast_testbed.drill.promises import Outcome, Promise, judge
from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.settings import settings

VERDICT = judge(
    Promise(fault="pod deleted", within_seconds=3, max_lost_steps=0, cause="Interruption"),
    Outcome(
        injected_at=0,
        before=AttemptId(generation=1, attempt=1),
        resumed_seconds=1,
        noticed_seconds=0.1,
        lost_steps=0,
        incidents=(),
    ),
)


class PlayedCluster:
    """Notes whether it was removed."""

    kubeconfig = Path("kubeconfig")
    removed = 0

    def down(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # the second Ctrl-C of somebody in a hurry
        PlayedCluster.removed += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What comes up, and what happens to it then, as a test wants it."""
    before = {number: signal.getsignal(number) for number in demo._ENDING}
    plan: dict[str, Any] = {"up": PlayedCluster, "then": lambda: None}
    PlayedCluster.removed = 0
    monkeypatch.delenv("KEEP", raising=False)
    monkeypatch.setattr(demo.Cluster, "up", lambda **_: plan["up"]())
    monkeypatch.setattr(demo, "program", lambda _: Path("bin/kubectl"))
    monkeypatch.setattr(demo, "install_chart", lambda _: plan["then"]())
    settings.cache_clear()
    yield plan
    settings.cache_clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fails() -> None:
    raise CommandFailedError("helm upgrade ended with 1: no such image")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_removes_its_cluster(
    played: dict[str, Any], ending: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    played["then"] = lambda: os.kill(os.getpid(), ending)
    assert demo.main() == 130
    assert PlayedCluster.removed == 1
    assert "interrupted" in capsys.readouterr().out


def test_ctrl_c_during_start_up_prints_no_traceback(played: dict[str, Any]) -> None:
    played["up"] = ctrl_c
    assert demo.main() == 130
    assert PlayedCluster.removed == 0, "`up` has removed what there was"


@pytest.mark.parametrize(("said", "kept"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_keep_leaves_the_cluster_and_says_how_to_remove_it(
    played: dict[str, Any], said: str, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEP", said)
    played["then"] = ctrl_c
    assert demo.main() == 130
    assert PlayedCluster.removed == (0 if kept else 1)
    assert ("make cluster-down CLUSTER=demo" in capsys.readouterr().out) == kept


def test_what_cannot_be_had_is_one_line_and_a_status(
    played: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    played["then"] = fails
    assert demo.main() == 1
    assert PlayedCluster.removed == 1
    error = capsys.readouterr().err
    assert "error: the demo stopped early: helm upgrade ended with 1: no such image" in error
    assert "Traceback" not in error


def test_the_demo_ends_when_training_does_not_continue(
    played: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*_: object) -> Iterator[Any]:
        yield VERDICT
        raise TimeoutError("after 180 s still waiting for: the next step after 'spot notice'")

    def play(_teller: object, verdicts: list[Any]) -> list[Any]:
        verdicts.extend(told())
        return []

    monkeypatch.setattr(demo, "_play", play)
    assert demo.main() == 1
    shown = capsys.readouterr()
    assert "pod deleted" in shown.out
    assert "spot notice" in shown.err


@pytest.mark.parametrize(
    ("attempt", "harmed", "says"),
    [
        (2, 99.5, "by the launchers after 0.5 s: Infrastructure/RankKilled: rank 1 was ended"),
        (0, 99.0, "by the operator after 1.0 s: Infrastructure/RankKilled: rank 1 was ended"),
        (2, 100.2, "by the launchers after 0.0 s: "),  # the line about the fault is told right after the harm
        (2, None, "by the launchers: Infrastructure/RankKilled"),
    ],
)
def test_the_story_says_who_detected_what_and_when(attempt: int, harmed: float | None, says: str) -> None:
    incident = Incident(
        number=1,
        attempt_id=AttemptId(generation=1, attempt=attempt),
        cause="Infrastructure",
        action="InPlace",
        reason="RankKilled",
        message="rank 1 was ended by SIGKILL\nand more",
        detected=datetime.fromtimestamp(100, UTC),
        resumed=None,
        lost_steps=None,
    )
    told = noticed(incident, harmed)
    assert told.startswith(says)
    assert "\n" not in told
