"""The watchdog's rules, one by one, and that no straggler is ever taken for a hang."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.detectors.observation import HangSettings, HangVerdict, Observed, Sight, Stray
from holdfast.launcher.hang.detectors.watchdog import Watchdog
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

TICK = 0.1
A = Activity


@dataclass
class Scene:
    """Ranks of one launcher, a clock, and the watchdog that looks at them every tenth of a second."""

    ranks: int = 3
    world_size: int = 3
    now: float = 1000.0
    pair: AttemptId = field(default_factory=lambda: AttemptId(1, 1))
    watchdog: Watchdog = field(default_factory=Watchdog)
    readings: dict[int, Reading] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    left: dict[int, float] = field(default_factory=dict)  # ranks that left their attempt, and when
    awaited: bool = True
    cpu_waits: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(self.ranks):
            self.begin(rank)

    def begin(self, rank: int, step: int = 0) -> None:
        """A new process is at this rank."""
        self.readings[rank] = Reading(
            pid=rank,
            signal=45,
            beat=self.now,
            activity=A.COMPUTE,
            since=self.now,
            step=step,
            stepped=self.now,
            made=0,
        )

    def enter(self, activity: Activity, *ranks: int) -> None:
        for rank in ranks or self.readings:
            self.readings[rank] = replace(self.readings[rank], activity=activity, since=self.now)

    def look(self, seconds: float = TICK) -> tuple[HangVerdict, ...]:
        self.now += seconds
        for rank, reading in self.readings.items():
            if rank not in self.stopped:
                self.readings[rank] = replace(reading, beat=self.now)
        here = {rank: reading for rank, reading in self.readings.items() if rank not in self.left}
        sights = tuple(Sight(slot=100 + rank, rank=rank, reading=reading) for rank, reading in here.items())
        strays = tuple(
            Stray(slot=100 + rank, rank=rank, reading=self.readings[rank], left_at=at, awaited=self.awaited)
            for rank, at in self.left.items()
        )
        seen = Observed(
            pair=self.pair, world_size=self.world_size, sights=sights, strays=strays, cpu_waits=self.cpu_waits
        )
        return self.watchdog.judge(seen, self.now)

    def step(self) -> None:
        """All have made a step now."""
        for rank, was in self.readings.items():
            self.readings[rank] = replace(
                was, activity=A.COMPUTE, since=self.now, step=was.step + 1, stepped=self.now, made=was.made + 1
            )

    def train(self, steps: int = 20, seconds: float = 0.1) -> None:
        for _ in range(steps):
            self.wait(seconds)
            self.step()

    def wait(self, seconds: float) -> tuple[HangVerdict, ...]:
        """Look until somebody hangs or the time is over."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            if verdicts := self.look(min(TICK, end - self.now)):
                return verdicts
        return ()


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.train()
    return made


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
        assert scene.look() == ()
    (verdict,) = scene.wait(2)
    assert (verdict.rank, "has been busy" in verdict.message) == (1, True)


def test_a_silent_rank_that_stands_in_line_for_a_cpu_does_not_hang(scene: Scene) -> None:
    scene.enter(A.AVERAGE)
    scene.stopped.add(0)
    since = scene.now
    while scene.now < since + 10:
        scene.cpu_waits[0] = 0.95 * (scene.now - since)
        assert scene.look() == ()
    assert scene.wait(2)[0].rank == 0


def test_a_wait_for_a_cpu_that_lies_before_a_span_does_not_lengthen_it() -> None:
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


def test_collectives_that_do_not_match_end_the_attempt_and_name_the_odd_one(scene: Scene) -> None:
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
    """The others wait for it in a collective of the script's own."""
    scene.stopped.add(1)
    assert [verdict.rank for verdict in scene.wait(5)] == [1]


def test_who_left_its_attempt_and_computes_on_has_a_steps_deadline_from_then_on(scene: Scene) -> None:
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


def test_who_waits_for_its_next_world_hangs_only_in_silence_and_only_when_it_is_awaited(scene: Scene) -> None:
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.enter(A.PARKED)
    assert scene.wait(100) == ()
    scene.stopped.add(2)
    scene.awaited = False
    assert scene.wait(100) == ()
    scene.awaited = True
    (verdict,) = scene.wait(1)
    assert verdict.message.startswith("rank 2 has shown no sign of life for ")


def test_there_is_no_hurry_when_all_left_and_nobody_here_would_keep_the_state(scene: Scene) -> None:
    scene.wait(0.5)
    scene.left = dict.fromkeys(scene.readings, scene.now)
    scene.awaited = False
    assert scene.wait(8.4) == ()  # all compile again, say, and one elsewhere ran out of memory
    assert len(scene.wait(0.3)) == 3


def test_who_left_alone_may_hold_the_last_state_and_a_new_process_beside_it_has_none(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings(startup=4)
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


def test_who_left_after_a_step_and_is_silent_has_a_steps_deadline_from_its_last_sign_of_life(scene: Scene) -> None:
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
    assert scene.wait(8.4) == ()  # all compile again, say
    assert len(scene.wait(0.3)) == 3


@pytest.mark.parametrize("activity", [A.STARTUP, A.DATA])
def test_a_script_that_never_makes_a_step_has_the_time_of_its_start(activity: Activity) -> None:
    """It trains with the loop of its own, say, and says of that neither a step nor a phase."""
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
    scene.pair = AttemptId(1, 2)
    scene.begin(1, step=20)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(9.9) == ()
    assert scene.wait(1)[0].rank == 1


def test_five_times_what_the_slowest_first_step_took_is_enough_for_a_new_process() -> None:
    scene = Scene()
    scene.wait(60)
    scene.step()
    scene.train()
    scene.pair = AttemptId(1, 2)
    scene.begin(1, step=21)
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(295) == ()
    assert scene.wait(10)[0].rank == 1


def test_a_shrunk_world_is_judged_by_the_larger_one_until_it_has_made_steps(scene: Scene) -> None:
    scene.train(60, 1.0)
    scene.pair, scene.world_size = AttemptId(1, 2), 2
    del scene.readings[1]
    scene.look()
    scene.enter(A.COMPUTE)
    scene.enter(A.AVERAGE, 0)
    assert scene.wait(6.7) == ()
    assert scene.wait(0.3)[0].rank == 2


def test_a_hang_at_the_same_step_is_given_more_time_and_in_the_end_is_the_scripts_own(scene: Scene) -> None:
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


def test_a_hang_of_another_launchers_rank_counts_for_those_that_follow_at_that_step(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    scene.look()
    scene.watchdog.hung_elsewhere(scene.pair)
    scene.watchdog.hung_elsewhere(scene.pair)
    (verdict,) = scene.wait(1000)
    assert (verdict.repeats, verdict.seconds > 3) == (1, True), "several at once are one"
    scene.step()
    scene.enter(A.AVERAGE, 0, 2)
    (verdict,) = scene.wait(5)
    assert (verdict.repeats, verdict.seconds < 1) == (0, True)


def test_time_in_which_the_launcher_did_not_run_does_not_count(scene: Scene) -> None:
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.look(20.0) == ()  # it and the ranks came back together
    assert scene.wait(0.6) == ()
    assert scene.wait(0.5)[0].rank == 1


def test_what_began_while_the_launcher_did_not_run_is_not_older_than_the_look(scene: Scene) -> None:
    scene.now += 5.0
    scene.enter(A.AVERAGE, 0, 2)
    scene.enter(A.COMPUTE, 1)
    assert scene.look(15.0) == ()


def test_a_deadline_of_the_users_replaces_the_measured_one(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": {"stepTimeout": 60}})
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(60) == ()
    assert scene.wait(1)[0].rank == 1


def test_it_can_be_switched_off(scene: Scene) -> None:
    scene.watchdog.settings = HangSettings.from_settings({"hangDetection": {"stepTimeout": "Off"}})
    scene.enter(A.AVERAGE, 0, 2)
    assert scene.wait(100) == ()


def test_settings_have_defaults_and_bad_ones_are_named() -> None:
    assert HangSettings.from_settings({}) == HangSettings()
    read = HangSettings.from_settings({"hangDetection": {"stepTimeout": "Auto", "startupTimeoutSeconds": 30}})
    assert (read.step, read.startup, read.enabled) == (None, 30.0, True)
    with pytest.raises(DocumentError, match="hangDetection"):
        HangSettings.from_settings({"hangDetection": {"stepTimeout": "soon"}})


@settings(deadline=None, max_examples=50)
@given(
    base=st.floats(0.01, 3.0),
    noise=st.floats(0.0, 0.3),
    share=st.floats(0.0, 1.0),
    ranks=st.tuples(st.integers(1, 4), st.integers(0, 4)),  # here, elsewhere
    seed=st.integers(0, 2**32),
)
def test_stragglers_of_three_times_the_usual_step_are_never_taken_for_hung(
    base: float, noise: float, share: float, ranks: tuple[int, int], seed: int
) -> None:
    """A step ends when its slowest rank does; the launcher looks at whatever moments its tick comes."""
    dice = random.Random(seed)
    local, everywhere = ranks[0], sum(ranks)
    watchdog, now, look = Watchdog(), 0.0, 0.0
    done = [0.0] * local
    for step in range(40):
        takes = [
            base * dice.uniform(1 - noise, 1 + noise) * (3 if dice.random() < share else 1) for _ in range(everywhere)
        ]
        done, end = [now + seconds for seconds in takes], now + max(takes)
        while look < end:
            seen = tuple(
                Sight(slot=rank, rank=rank, reading=reading(at=done[rank], look=look, began=now, step=step))
                for rank in range(local)
            )
            observed = Observed(pair=AttemptId(1, 1), world_size=everywhere, sights=seen)
            assert watchdog.judge(observed, look) == ()
            look += dice.uniform(0.1, 0.2)
        now = end


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


@settings(deadline=None, max_examples=50)
@given(
    base=st.floats(0.02, 2.0),
    slow=st.floats(0.1, 3.0),
    left_after=st.floats(0.0, 1.0),
    waits=st.floats(0.0, 30.0),
    awaited=st.booleans(),
)
def test_who_ends_what_it_computes_after_it_left_and_then_waits_is_never_taken_for_hung(
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
