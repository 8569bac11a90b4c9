"""Which rank hangs, and which ranks only wait."""

from __future__ import annotations

import pytest
from hang_scene import A, Scene

from holdfast.core.protocol import Cause
from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.detectors.observation import HangSettings
from holdfast.telemetry.activity import Activity


def test_who_computes_too_long_hangs_and_the_line_says_who_waits(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    since = scene.now
    (verdict,) = scene.wait(5)
    assert (verdict.slot, verdict.rank, verdict.cause) == (101, 1, Cause.INFRASTRUCTURE)
    assert scene.now - since <= 1.0
    assert verdict.message == (
        "rank 1 has been busy for 0.9 s in compute after step 20 (deadline 0.85 s);"
        " waiting: ranks 0, 2 for its gradients"
    )


def test_who_stands_in_line_for_a_cpu_does_not_hang(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    since = scene.now
    while scene.now < since + 10:
        scene.cpu_waits[1] = 0.95 * (scene.now - since)
        assert scene.check() == ()
    (verdict,) = scene.wait(2)
    assert (verdict.rank, "has been busy" in verdict.message) == (1, True)


def test_silent_rank_waiting_for_a_cpu_does_not_hang(scene: Scene) -> None:
    scene.enter(A.AVERAGE)
    scene.stopped.add(0)
    since = scene.now
    while scene.now < since + 10:
        scene.cpu_waits[0] = 0.95 * (scene.now - since)
        assert scene.check() == ()
    assert scene.wait(2)[0].rank == 0


def test_cpu_wait_before_a_span_does_not_extend_it() -> None:
    known = Starvation()
    for at, wait in ((1.0, 5.0), (2.0, 5.9), (3.0, 6.0)):
        known.note({31: wait}, at)

    assert known.seconds(31, 2.0) == pytest.approx(0.1)
    assert known.seconds(31, 0.0) == pytest.approx(1.0)
    assert known.seconds(32, 0.0) == 0.0


def test_the_deadline_follows_the_median_step(scene: Scene) -> None:
    scene.train(60, 2.0)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(8.9) == ()
    (verdict,) = scene.wait(1.1)
    assert verdict.rank == 1
    assert verdict.seconds <= 10.0


def test_a_few_long_steps_do_not_move_the_deadline(scene: Scene) -> None:
    scene.wait(0.1)
    scene.enter(A.CHECKPOINT)
    scene.wait(30)
    scene.step()
    scene.train(5)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(1)[0].rank == 1


def test_who_waits_is_not_to_blame_while_others_are_elsewhere() -> None:
    scene = Scene(ranks=2, world_size=3)
    scene.train()
    scene.enter(A.AVERAGE)
    assert scene.wait(100) == ()


@pytest.mark.parametrize("activity", [A.AVERAGE, A.VOTE])
def test_who_waits_and_shows_no_sign_of_life_hangs(scene: Scene, activity: Activity) -> None:
    scene.enter(activity)
    scene.stopped.add(0)
    since = scene.now
    (verdict,) = scene.wait(5)
    assert verdict.rank == 0
    assert scene.now - since <= 1.0
    assert "rank 0 has shown no sign of life for" in verdict.message


def test_what_a_script_does_after_a_step_has_the_time_of_data(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings(data=30)
    scene.enter(A.AVERAGE, 0, 2)
    scene.enter(A.APPLY, 1)
    assert scene.wait(30) == ()
    assert scene.wait(1)[0].rank == 1


def test_a_rank_that_is_stopped_after_a_step_hangs(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    scene.enter(A.APPLY, 1)
    scene.stopped.add(1)
    (verdict,) = scene.wait(2)
    assert verdict.message.startswith("rank 1 has shown no sign of life for ")


def test_groups_may_form_in_silence_for_a_while(scene: Scene) -> None:
    scene.enter(A.SYNC)
    scene.stopped.add(0)
    assert scene.wait(4.9) == ()
    assert scene.wait(1)[0].rank == 0


@pytest.mark.parametrize("activity", [A.PARKED, A.DONE])
def test_who_is_between_worlds_or_done_has_no_deadline(scene: Scene, activity: Activity) -> None:
    scene.enter(activity)
    scene.stopped.update(scene.readings)
    assert scene.wait(100) == ()


@pytest.mark.parametrize(
    ("activity", "seconds"),
    [(A.STARTUP, 20), (A.RESTORE, 20), (A.DATA, 30), (A.CHECKPOINT, 40), (A.EVALUATION, 50)],
)
def test_what_is_no_step_has_its_own_deadline(scene: Scene, activity: Activity, seconds: float) -> None:
    names = {"startup": 20, "data": 30, "checkpoint": 40, "evaluation": 50}
    given = {f"{name}TimeoutSeconds": value for name, value in names.items()}
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": given})
    scene.enter(A.AVERAGE, 0, 2)
    scene.enter(activity, 1)
    assert scene.wait(seconds) == ()
    assert scene.wait(1)[0].rank == 1


def test_mismatched_collectives_end_the_attempt_and_name_a_rank(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 1)
    scene.enter(A.VOTE, 2)
    since = scene.now
    (verdict,) = scene.wait(5)
    assert (verdict.rank, verdict.kills) == (2, False)
    assert scene.now - since <= 1.0
    assert scene.wait(5) == (), "once is enough"
    assert verdict.message.endswith("; waiting: ranks 0, 1 for its gradients: each waits for the other")


def test_a_stopped_rank_is_told_from_one_that_waits_for_it(scene: Scene) -> None:
    scene.enter(A.AVERAGE)
    scene.stopped.add(0)
    assert [verdict.rank for verdict in scene.wait(5)] == [0]


def test_of_several_late_ranks_the_silent_one_is_to_blame(scene: Scene) -> None:
    """The others wait for that rank in a collective of the script."""
    scene.stopped.add(1)
    assert [verdict.rank for verdict in scene.wait(5)] == [1]
