"""The default deadlines: a healthy rank that evaluates or recompiles between two steps does not hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hang_scene import CALM, A, Scene

from holdfast.core.protocol import Cause
from holdfast.launcher.hang import cpu_starvation
from holdfast.launcher.hang.cpu_progress import CpuProgress
from holdfast.launcher.hang.detectors.observation import HangSettings, Observed, ObservedRank
from holdfast.launcher.hang.stall_reports import RemoteStalls, Stall
from holdfast.telemetry.activity import Activity


@pytest.fixture
def calm(scene: Scene) -> Scene:
    scene.watchdog.settings = CALM
    scene.enter(A.AVERAGE, 0, 2)
    return scene


def warnings_in(scene: Scene, seconds: float) -> list[str]:
    found: list[str] = []
    for _ in range(round(seconds * 10)):
        assert scene.check() == ()
        found += scene.watchdog.warnings
    return found


def test_rank_that_uses_its_cpu_has_the_deadline_of_evaluations(calm: Scene) -> None:
    """Steps took 0.1 s. The evaluation takes 30 minutes, and job.phase does not mark it."""
    calm.runs.add(1)
    (warning,) = warnings_in(calm, 1800)
    assert warning.startswith("rank 1 has been in compute for 60 s after step 20 and uses its CPU: ")
    assert "hung after 3600 s" in warning
    assert 'job.phase("evaluation")' in warning
    (verdict,) = calm.wait(1900)
    assert (verdict.rank, verdict.cause, verdict.deadline) == (1, Cause.INFRASTRUCTURE, 3600.0)


def test_two_percent_of_a_cpu_are_progress_and_polling_is_not(calm: Scene) -> None:
    for tenth in range(3000):
        calm.cpu_runs[1] = calm.cpu_runs.get(1, 0.0) + (0.02 if tenth % 10 == 0 else 0.0)
        assert calm.check() == ()
    for tenth in range(1300):
        calm.cpu_runs[1] += 0.001 if tenth % 10 == 0 else 0.0
        if verdicts := calm.check():
            break
    assert [verdict.rank for verdict in verdicts] == [1]


def test_the_first_rank_that_stops_is_reported_and_gets_twice_the_time(calm: Scene) -> None:
    since = calm.now
    (warning,) = warnings_in(calm, 119)
    assert warning.startswith("rank 1 has been in compute for 60 s after step 20 and has stopped using its CPU: ")
    assert "hung after 120 s" in warning
    (verdict,) = calm.wait(2)
    assert (verdict.rank, round(calm.now - since)) == (1, 120)


def test_the_second_rank_that_stops_has_the_floor(calm: Scene) -> None:
    (_,) = calm.wait(200)
    calm.readings[1] = replace(calm.readings[1], pid=77)  # its process has been replaced
    calm.step()
    calm.enter(A.AVERAGE, 0, 2)
    since = calm.now
    (verdict,) = calm.wait(100)
    assert (verdict.rank, round(calm.now - since)) == (1, 60)


def test_a_pause_that_ended_allows_twice_as_long(calm: Scene) -> None:
    """For example, a checkpoint of the script to a slow disk: each later one may take as long."""
    assert calm.wait(100) == ()
    calm.step()
    for _ in range(3):
        calm.enter(A.AVERAGE, 0, 2)
        assert warnings_in(calm, 190) == []
        calm.step()
    calm.enter(A.AVERAGE, 0, 2)
    (verdict,) = calm.wait(1000)
    assert 379 < verdict.seconds < 385


def test_deadline_of_a_rank_that_stops_counts_from_its_last_progress(calm: Scene) -> None:
    calm.runs.add(1)
    assert calm.wait(600) == ()
    calm.runs.clear()
    since = calm.now
    (verdict,) = calm.wait(200)
    assert (verdict.rank, round(calm.now - since)) == (1, 120)


def test_a_stopped_process_has_the_floor(calm: Scene) -> None:
    calm.stopped.add(1)
    (verdict,) = calm.wait(100)
    assert (verdict.rank, round(verdict.seconds)) == (1, 60)


@pytest.mark.parametrize("activity", [A.AVERAGE, A.VOTE, A.SYNC])
def test_a_waiting_rank_may_be_silent_for_the_floor(scene: Scene, activity: Activity) -> None:
    scene.watchdog.settings = CALM
    scene.enter(activity)
    scene.stopped.add(0)
    since = scene.now
    (verdict,) = scene.wait(100)
    assert (verdict.rank, round(scene.now - since)) == (0, 60)


def test_collectives_that_do_not_match_have_the_floor(calm: Scene) -> None:
    calm.enter(A.VOTE, 1)
    assert calm.wait(59) == ()
    assert [verdict.kills for verdict in calm.wait(2)] == [False]


def test_ranks_in_a_barrier_of_the_script_wait_for_the_busy_rank(calm: Scene) -> None:
    """Rank 1 evaluates. The others have called a collective of the script and do not use their CPUs."""
    calm.watchdog.settings = HangSettings(evaluation=300)
    calm.step()
    calm.runs.add(1)
    (warning,) = warnings_in(calm, 290)
    assert warning.startswith("rank 1 ")
    assert [verdict.rank for verdict in calm.wait(20)] == [1]


def test_ranks_of_other_launchers_wait_for_the_busy_rank(calm: Scene) -> None:
    calm.readings = {rank: reading for rank, reading in calm.readings.items() if rank == 0}
    calm.step()
    busy = Stall(
        attempt_id=calm.attempt_id,
        rank=1,
        activity=A.COMPUTE,
        step=21,
        silent=False,
        seconds=36,
        deadline=3600,
        progresses=True,
    )
    for _ in range(3000):
        calm.now += 0.1
        rank_here = ObservedRank(slot=100, rank=0, reading=calm.readings[0])
        seen = Observed(
            attempt_id=calm.attempt_id,
            world_size=3,
            ranks_here=(rank_here,),
            remote=RemoteStalls(stalls=(busy,)),
            cpu_runs={0: 0.0},
        )
        calm.readings[0] = replace(rank_here.reading, beat=calm.now)
        assert calm.watchdog.judge(seen, calm.now) == ()


def test_a_busy_rank_is_reported_to_other_launchers_before_the_floor(calm: Scene) -> None:
    calm.runs.add(1)
    calm.wait(40)
    seen = Observed(
        attempt_id=calm.attempt_id,
        world_size=3,
        ranks_here=tuple(
            ObservedRank(slot=100 + rank, rank=rank, reading=reading) for rank, reading in calm.readings.items()
        ),
    )
    told = {stall.rank: stall for stall in calm.watchdog.stalls(seen, calm.now)}
    assert (told[1].progresses, told[1].waits, told[1].deadline) == (True, False, 3600.0)
    assert not any(told[rank].progresses for rank in (0, 2) if rank in told)


def test_rank_that_evaluates_while_a_new_world_forms_is_left_alone(calm: Scene) -> None:
    calm.runs.add(1)
    calm.wait(5)
    calm.left[1] = calm.now
    calm.enter(A.SYNC, 0, 2)
    assert calm.wait(700) == ()


def test_evaluation_in_the_first_step_of_a_new_process_is_left_alone(calm: Scene) -> None:
    calm.begin(1, step=20)
    calm.runs.add(1)
    assert calm.wait(700) == ()


@pytest.mark.parametrize("given", [{"stepTimeoutSeconds": 30.0}, {"minStepTimeoutSeconds": 30.0}])
def test_deadlines_of_the_users_are_tight(scene: Scene, given: dict[str, object]) -> None:
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": given})
    scene.enter(A.AVERAGE, 0, 2)
    scene.runs.add(1)
    assert warnings_in(scene, 29) == []
    assert [verdict.rank for verdict in scene.wait(2)] == [1]


def test_time_in_which_the_launcher_did_not_run_is_no_lack_of_progress() -> None:
    progress = CpuProgress()
    progress.note({7: 1.0}, 10.0)
    progress.note({7: 1.0}, 500.0)
    assert progress.last(7) == 500.0
    assert progress.last(8) == 0.0


def test_cpu_times_of_a_process_without_schedstat(monkeypatch: pytest.MonkeyPatch) -> None:
    """gVisor and some kernels do not have the file. The time comes from the thread's own counters."""
    own = Path(f"/proc/{cpu_starvation.os.getpid()}")
    ran, waited = cpu_starvation.cpu_times(int(own.name))
    assert ran > 0.1
    assert waited >= 0.0
    read = Path.read_text

    def without(path: Path) -> str:
        if path.name == "schedstat":
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_text", without)
    assert cpu_starvation.cpu_times(int(own.name))[0] == pytest.approx(ran, abs=0.5)
    assert cpu_starvation.cpu_times(999_999_999) == (0.0, 0.0)
