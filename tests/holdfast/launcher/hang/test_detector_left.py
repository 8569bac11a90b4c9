"""Ranks that have left their attempt."""

from __future__ import annotations

from hang_scene import A, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.launcher.hang.detectors.observation import HangSettings


def test_rank_that_left_and_computes_has_one_step_deadline(scene: Scene) -> None:
    """The deadline starts when the rank leaves its attempt."""
    scene.wait(0.5)
    scene.left[1] = since = scene.now
    scene.enter(A.SYNC, 0, 2)
    (verdict,) = scene.wait(5)
    assert (verdict.slot, verdict.rank, verdict.kills) == (101, 1, True)
    assert 0.85 < scene.now - since <= 1.0
    assert verdict.message == (
        "rank 1 left its attempt and has been busy for 0.9 s in compute after step 20 (deadline 0.85 s);"
        " the others wait for it to form the world"
    )


def test_who_left_hangs_also_while_no_world_waits_for_it(scene: Scene) -> None:
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.awaited = False
    scene.enter(A.PARKED, 0, 2)
    assert [verdict.rank for verdict in scene.wait(5)] == [1]


def test_who_left_in_an_evaluation_has_the_time_of_evaluations(scene: Scene) -> None:
    scene.enter(A.EVALUATION, 1)
    scene.left[1] = scene.now
    scene.enter(A.SYNC, 0, 2)
    assert scene.wait(1000) == ()


def test_who_left_while_state_was_moved_may_end_that(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings(startup=120)
    scene.enter(A.SYNC)
    scene.left[1] = scene.now
    assert scene.wait(120) == ()
    assert [verdict.rank for verdict in scene.wait(1)] == [1]


def test_rank_waiting_for_its_next_world_hangs_only_if_silent(scene: Scene) -> None:
    """Another rank must also wait for it."""
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.enter(A.PARKED)
    assert scene.wait(100) == ()
    scene.stopped.add(2)
    scene.awaited = False
    assert scene.wait(100) == ()
    scene.awaited = True
    (verdict,) = scene.wait(1)
    assert verdict.message.startswith("rank 2 has shown no sign of life for ")


def test_no_hurry_if_all_left_and_no_rank_here_keeps_the_state(scene: Scene) -> None:
    scene.wait(0.5)
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.awaited = False
    assert scene.wait(8.4) == ()  # for example, all compile again, and a remote rank ran out of memory
    assert len(scene.wait(0.3)) == 3


def test_rank_that_left_alone_may_hold_the_last_state(scene: Scene) -> None:
    """A new process alongside it has no state."""
    scene.watchdog.settings = HangSettings(startup=4, min_step=1)
    scene.left[1] = scene.now
    scene.begin(0, step=20)
    del scene.readings[2]
    scene.enter(A.SYNC, 0)
    assert scene.wait(4.0) == ()
    assert [verdict.rank for verdict in scene.wait(0.2)] == [1]


def test_a_rank_that_waits_for_its_next_world_keeps_the_state(scene: Scene) -> None:
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.enter(A.PARKED, 2)
    assert {verdict.rank for verdict in scene.wait(1.1)} == {0, 1}


def test_silent_rank_has_a_step_deadline_from_its_last_sign(scene: Scene) -> None:
    """The rank has left its attempt after a step."""
    scene.train(60, 1.0)
    scene.enter(A.SYNC, 0, 2)
    scene.enter(A.APPLY, 1)
    scene.left[1] = scene.now
    assert scene.wait(20) == ()
    scene.stopped.add(1)
    assert scene.wait(4.4) == ()
    (verdict,) = scene.wait(0.3)
    assert verdict.message.startswith("rank 1 has shown no sign of life for 4.")


def test_there_is_no_hurry_when_nobody_would_be_left(scene: Scene) -> None:
    assert scene.wait(8.4) == ()  # for example, all compile again
    assert len(scene.wait(0.3)) == 3


@settings(deadline=None, max_examples=50)
@given(
    base=st.floats(0.02, 2.0),
    slow=st.floats(0.1, 3.0),
    left_after=st.floats(0.0, 1.0),
    waits=st.floats(0.0, 30.0),
    awaited=st.booleans(),
)
def test_rank_that_finishes_after_leaving_and_waits_never_hangs(
    base: float, slow: float, left_after: float, waits: float, awaited: bool
) -> None:
    scene = Scene(awaited=awaited)
    scene.train(10, base)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(slow * base * left_after) == ()
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.enter(A.PARKED, 0, 2)
    assert scene.wait(slow * base * (1 - left_after)) == ()
    scene.enter(A.PARKED, 1)
    assert scene.wait(waits) == ()
