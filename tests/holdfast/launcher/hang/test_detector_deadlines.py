"""Deadlines of steps and of the start."""

from __future__ import annotations

import random

import pytest
from hang_scene import A, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.detectors.observation import HangSettings, Observed, ObservedRank
from holdfast.launcher.hang.detectors.watchdog import Watchdog
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading


def reading(*, at: float, look: float, began: float, step: int) -> Reading:
    computes = look < at
    return Reading(
        pid=1,
        signal=45,
        beat=look - 0.1,
        activity=A.COMPUTE if computes else A.AVERAGE,
        since=began if computes else at,
        step=step,
        stepped=began,
        made=step,
    )


@pytest.mark.parametrize("activity", [A.STARTUP, A.DATA])
def test_script_that_never_steps_has_its_start_up_deadline(activity: Activity) -> None:
    """For example, the script has a training loop of its own, and reports neither a step nor a phase."""
    scene = Scene()
    scene.watchdog.settings = HangSettings(startup=60, data=30)
    scene.enter(activity)
    assert scene.wait(60) == ()
    assert [verdict.activity for verdict in scene.wait(1)] == [activity] * 3


def test_first_steps_may_compile() -> None:
    scene = Scene()
    scene.watchdog.settings = HangSettings(startup=120)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(120) == ()
    assert scene.wait(1)[0].rank == 1


def test_a_new_process_has_time_for_its_first_steps(scene: Scene) -> None:
    scene.attempt_id = AttemptId(1, 2)
    scene.begin(1, step=20)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(9.9) == ()
    assert scene.wait(1)[0].rank == 1


def test_new_process_has_five_times_the_slowest_first_step() -> None:
    scene = Scene()
    scene.wait(60)
    scene.step()
    scene.train()
    scene.attempt_id = AttemptId(1, 2)
    scene.begin(1, step=21)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(295) == ()
    assert scene.wait(10)[0].rank == 1


def test_shrunk_world_uses_the_deadline_of_the_larger_one(scene: Scene) -> None:
    """The smaller world has not completed steps yet."""
    scene.train(60, 1.0)
    scene.attempt_id, scene.world_size = AttemptId(1, 2), 2
    del scene.readings[1]
    scene.check()
    scene.enter(A.COMPUTE)
    scene.enter(A.AVERAGE, 0)
    assert scene.wait(6.7) == ()
    assert scene.wait(0.3)[0].rank == 2


def test_repeated_hang_gets_more_time_then_is_a_script_error(scene: Scene) -> None:
    """All hangs are at the same step."""
    scene.enter(A.AVERAGE, 0, 2)
    causes, last = [], 0.0
    for _ in range(5):
        scene.enter(A.COMPUTE, 1)
        (verdict,) = scene.wait(1000)
        assert verdict.seconds > last
        last = 3 * verdict.seconds
        causes.append(verdict.cause)
    assert causes == [Cause.INFRASTRUCTURE] * 3 + [Cause.APPLICATION] * 2
    assert "job.phase" in verdict.message
    scene.step()
    scene.enter(A.AVERAGE, 0, 2)
    (verdict,) = scene.wait(5)
    assert (verdict.cause, verdict.repeats) == (Cause.INFRASTRUCTURE, 0)


def test_hang_of_a_remote_rank_counts_for_its_successors(scene: Scene) -> None:
    """The hang counts for the ranks that follow at the same step."""
    scene.enter(A.AVERAGE, 0, 2)
    scene.check()
    scene.watchdog.remote_hang(scene.attempt_id)
    scene.watchdog.remote_hang(scene.attempt_id)
    (verdict,) = scene.wait(1000)
    assert (verdict.repeats, verdict.seconds > 3) == (1, True), "several at once are one"
    scene.step()
    scene.enter(A.AVERAGE, 0, 2)
    (verdict,) = scene.wait(5)
    assert (verdict.repeats, verdict.seconds < 1) == (0, True)


def test_time_in_which_the_launcher_did_not_run_does_not_count(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.check(20.0) == ()  # the launcher and the ranks resumed together
    assert scene.wait(0.6) == ()
    assert scene.wait(0.5)[0].rank == 1


def test_time_without_a_running_launcher_does_not_count(scene: Scene) -> None:
    scene.now += 5.0
    scene.enter(A.AVERAGE, 0, 2)
    scene.enter(A.COMPUTE, 1)
    assert scene.check(15.0) == ()


def test_a_deadline_of_the_users_replaces_the_measured_one(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": {"stepTimeoutSeconds": 60}})
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(60) == ()
    assert scene.wait(1)[0].rank == 1


def test_it_can_be_switched_off(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": {"mode": "Disabled"}})
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(100) == ()


def test_settings_have_defaults_and_bad_ones_are_named() -> None:
    assert HangSettings.from_settings({}) == HangSettings()
    read = HangSettings.from_settings({"hangDetection": {"mode": "Enabled", "startupTimeoutSeconds": 30}})
    assert (read.step, read.startup, read.enabled) == (None, 30.0, True)
    for bad in ({"stepTimeoutSeconds": "soon"}, {"mode": "Off"}):
        with pytest.raises(DocumentError, match="hangDetection"):
            HangSettings.from_settings({"hangDetection": bad})


@settings(deadline=None, max_examples=50)
@given(
    base=st.floats(0.01, 3.0),
    noise=st.floats(0.0, 0.3),
    share=st.floats(0.0, 1.0),
    ranks=st.tuples(st.integers(1, 4), st.integers(0, 4)),  # here, and on another launcher
    seed=st.integers(0, 2**32),
)
def test_stragglers_at_three_times_the_usual_step_never_hang(
    base: float, noise: float, share: float, ranks: tuple[int, int], seed: int
) -> None:
    """A step ends when its slowest rank ends. The launcher checks at arbitrary moments."""
    dice = random.Random(seed)
    local, everywhere = ranks[0], sum(ranks)
    watchdog, now, look = Watchdog(HangSettings(min_step=1.0)), 0.0, 0.0
    done = [0.0] * local
    for step in range(40):
        takes = [
            base * dice.uniform(1 - noise, 1 + noise) * (3 if dice.random() < share else 1) for _ in range(everywhere)
        ]
        done, end = [now + seconds for seconds in takes], now + max(takes)
        while look < end:
            seen = tuple(
                ObservedRank(slot=rank, rank=rank, reading=reading(at=done[rank], look=look, began=now, step=step))
                for rank in range(local)
            )
            observed = Observed(attempt_id=AttemptId(1, 1), world_size=everywhere, ranks_here=seen)
            assert watchdog.judge(observed, look) == ()
            look += dice.uniform(0.1, 0.2)
        now = end
