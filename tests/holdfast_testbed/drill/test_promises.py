"""How the demo and the end-to-end tests read a job and judge what a fault cost."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.launcher.process.child import own_program
from holdfast.launcher.process.zygote import BOOT
from holdfast_testbed.demo.table import Check, render
from holdfast_testbed.drill.faults import flip_one_bit, is_rank, kill_launcher_and_operator, newest_commit
from holdfast_testbed.drill.job_view import AttemptId, Incident, Progress, parse_job, parse_metrics, progress_of
from holdfast_testbed.drill.promises import Outcome, Promise, first_new_step, judge, losses_and_causes, lost_steps
from holdfast_testbed.node.processes import Process

BEFORE, AFTER = AttemptId(generation=1, attempt=1), AttemptId(generation=1, attempt=2)
PROMISE = Promise(fault="rank killed", within_seconds=15, max_lost_steps=50, cause="Infrastructure")
INCIDENT = Incident(
    number=1,
    attempt_id=BEFORE,
    cause="Infrastructure",
    action="InPlace",
    reason="RankKilled",
    message="rank 1 was ended by SIGKILL",
    detected=None,
    resumed=None,
    lost_steps=12,
)
OUTCOME = Outcome(
    injected_at=0, before=BEFORE, resumed_seconds=4, noticed_seconds=0.1, lost_steps=12, incidents=(INCIDENT,)
)


def progress(attempt_id: AttemptId, step: int) -> Progress:
    return Progress(at=0, pod="gpt-w0", attempt_id=attempt_id, step=step, workers=3)


def test_a_kept_promise_has_no_complaints() -> None:
    assert judge(PROMISE, OUTCOME).held


def test_only_the_demo_complains_of_a_late_recovery() -> None:
    late = replace(OUTCOME, resumed_seconds=16)
    assert judge(PROMISE, late).complaints == ("next step after 16.0 s, promised within 15 s",)
    assert losses_and_causes(PROMISE, late) == ()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (replace(OUTCOME, lost_steps=51), "51 steps lost"),
        (replace(OUTCOME, complaints=("no event names it",)), "no event names it"),
        (replace(OUTCOME, incidents=()), "counted as nothing"),
        (replace(OUTCOME, incidents=(INCIDENT, INCIDENT)), "promised: once as Infrastructure"),
        (replace(OUTCOME, incidents=(replace(INCIDENT, cause="Application"),)), "counted as ['Application']"),
    ],
)
def test_losses_and_wrong_causes_are_named(outcome: Outcome, words: str) -> None:
    assert any(words in complaint for complaint in losses_and_causes(PROMISE, outcome))


def test_lost_steps_are_those_made_again() -> None:
    seen = [progress(BEFORE, 130), progress(AFTER, 130), progress(AFTER, 101), progress(AFTER, 140)]
    assert lost_steps(seen, BEFORE, ()) == 29


def test_metrics_of_a_killed_rank_are_no_loss() -> None:
    """Its rank had voted on step 76 but not told of it; the newcomer took step 76 over and made 77."""
    told = [progress(BEFORE, 74), *(progress(AFTER, step) for step in (75, 75, 77))]
    hurt = [replace(one, pod="gpt-w1") for one in told]
    assert lost_steps([progress(BEFORE, 76), *hurt, progress(AFTER, 77)], BEFORE, ()) == 0
    rolled_back = replace(hurt[-1], step=51)
    assert lost_steps([progress(BEFORE, 76), *hurt[:-1], rolled_back], BEFORE, ()) == 25


def test_a_job_cannot_report_fewer_lost_steps_than_were_seen() -> None:
    seen = [progress(BEFORE, 130), progress(AFTER, 100)]
    assert lost_steps(seen, BEFORE, (replace(INCIDENT, lost_steps=0),)) == 30


@pytest.mark.parametrize(
    ("steps", "index"),
    [([48, 48, 1, 2], 3), ([48, 48, 0, 1], 3), ([29, 29, 30], 2), ([48, 48, 48], None), ([48, 0, 0], None)],
)
def test_a_new_worlds_first_step_is_a_rise_within_it(steps: list[int], index: int | None) -> None:
    seen = [replace(progress(AFTER, step), at=float(at)) for at, step in enumerate(steps)]
    assert first_new_step([progress(BEFORE, 47), *seen], BEFORE) == index


def test_reading_pods_at_different_times_is_no_progress() -> None:
    other = replace(progress(AFTER, 47), pod="gpt-w1")
    assert first_new_step([progress(AFTER, 48), other, progress(AFTER, 48), other], BEFORE) is None


def test_a_resource_without_status_has_not_begun() -> None:
    view = parse_job({"metadata": {"name": "gpt"}})
    assert (view.phase, view.incidents, view.is_true("Ready")) == ("", (), False)


def test_incidents_and_counts_are_read_from_the_resource() -> None:
    status = {
        "summary": "Training",
        "conditions": [{"type": "Ready", "status": "True", "reason": "Training", "message": "3 of 3"}],
        "incidentsByCause": [{"cause": "Infrastructure", "count": 2}],
        "incidents": [
            {
                "number": 2,
                "generation": 1,
                "attempt": 2,
                "cause": "Infrastructure",
                "resumedTime": "2026-01-31T12:00:00.000000Z",
                "lostSteps": 3,
            }
        ],
    }
    view = parse_job({"status": status})
    assert view.is_true("Ready")
    assert view.incidents_by_cause == {"Infrastructure": 2}
    assert view.incidents[0].attempt_id == AFTER
    assert view.incidents[0].lost_steps == 3


def test_progress_comes_from_the_sidecars_metrics() -> None:
    text = (
        "# HELP holdfast_training_completed_step Last completed step\n"
        "holdfast_training_completed_step 412.0\nholdfast_world_generation 2.0\nholdfast_world_attempt 1.0\n"
        'holdfast_world_workers 3.0\nholdfast_launcher_phase{phase="Running"} 1.0\n'
    )
    seen = progress_of("gpt-w0", parse_metrics(text), at=1.0)
    assert seen == Progress(at=1.0, pod="gpt-w0", attempt_id=AttemptId(generation=2, attempt=1), step=412, workers=3)


def test_a_pod_outside_any_world_makes_no_progress() -> None:
    assert progress_of("gpt-w0", {"holdfast_training_completed_step": 412.0}, at=1.0) is None


def test_the_newest_commit_is_by_step_then_by_world(tmp_path: Path) -> None:
    for name in ("step-90.g1.a1", "step-100.g1.a2", "step-100.g2.a1", "step-200.g3.a1"):
        (tmp_path / name).mkdir()
    for name in ("step-90.g1.a1", "step-100.g1.a2", "step-100.g2.a1"):
        (tmp_path / name / "MANIFEST.json").touch()
    assert newest_commit(tmp_path).name == "step-100.g2.a1"


class Played:
    """A stage that notes what it is asked for and what it does, in order."""

    def __init__(self) -> None:
        self.cluster, self.noted = self, []

    def workers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=f"gpt-w{number}") for number in range(3)]

    def launcher(self, pod: SimpleNamespace) -> SimpleNamespace:
        return self._found(f"launcher of {pod.name}")

    def operator(self) -> SimpleNamespace:
        return self._found("operator")

    def strike(self) -> None:
        self.noted.append("strike")

    def signal(self, process: SimpleNamespace, number: int) -> None:
        self.noted.append((process.name, number))

    def say(self, text: str) -> None:
        """Nobody listens."""

    def _found(self, name: str) -> SimpleNamespace:
        self.noted.append(name)
        return SimpleNamespace(name=name, pid=1)


def test_the_operator_dies_before_the_recovery_can_be_over() -> None:
    stage = Played()
    kill_launcher_and_operator(stage)  # type: ignore[arg-type]
    killed = [("launcher of gpt-w1", signal.SIGKILL), ("operator", signal.SIGKILL)]
    assert stage.noted == ["launcher of gpt-w1", "operator", "strike", *killed]


def test_damage_is_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(bytes(101))
    flip_one_bit(path)
    changed = [byte for byte in path.read_bytes() if byte]
    assert [byte.bit_count() for byte in changed] == [1]


def test_the_table_names_what_was_missed() -> None:
    verdict = judge(PROMISE, replace(OUTCOME, lost_steps=51))
    text = render([verdict], [Check(what="the job is Complete", measured="Complete", held=True)])
    assert "NO" in text
    assert "missed: rank killed: 51 steps lost, 50 promised at most" in text


@pytest.mark.parametrize(
    ("name", "cmdline", "expected"),
    [
        ("python3", ("python3", "train.py"), True),
        ("python3", ("python3", "-c", BOOT, "zygote", "7", "train.py"), True),  # it has stood by
        ("holdfast-warm", ("python3", "-c", BOOT, "zygote", "7", "train.py"), False),
        ("holdfast-zygote", ("python3", "-c", BOOT, "zygote", "7", "train.py"), False),
        ("python3", tuple(own_program("holdfast.launcher.network.tcp_store_server", "7")), False),
        ("python3", tuple(own_program("holdfast.launcher.tiers.upload_worker", "7")), False),
    ],
)
def test_rank_is_told_from_launchers_other_children(name: str, cmdline: tuple[str, ...], expected: bool) -> None:
    child = Process(pid=8, ppid=7, start=0, name=name, cmdline=cmdline, container="trainer")

    assert is_rank(child) is expected
