"""One maximum over the ranks carries flags and sums, and every rank reads the same values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.environment import read_environment
from holdfast.core.errors import UsageError
from holdfast.telemetry.step_pace import StepPace
from holdfast.training.data import Audit
from holdfast.training.options.config import Interval, effective
from holdfast.training.protocol.step_ballot import Ballot, decode, encode, paces

BALLOTS = st.builds(
    Ballot,
    checkpoint=st.booleans(),
    quiesce=st.booleans(),
    non_finite=st.booleans(),
    pause=st.booleans(),
    bound=st.booleans(),
    node_local=st.booleans(),
    busy=st.booleans(),
    urgent=st.booleans(),
    touched=st.lists(st.booleans(), min_size=4, max_size=4),
    loss=st.floats(-1e6, 1e6),
    weight=st.floats(0.01, 1),
    seen=st.builds(Audit, st.integers(0, 2**64 - 1), st.integers(0, 1000)),
    pace=st.builds(
        StepPace,
        data=st.floats(0, 100),
        compute=st.floats(0, 100),
        waiting=st.floats(0, 100),
        weight=st.floats(0, 1),
    ),
)


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_flags_are_ored_and_sums_are_exact(ballots: list[Ballot]) -> None:
    size = len(ballots)
    votes = [encode(ballot, rank=rank, world_size=size) for rank, ballot in enumerate(ballots)]
    numbers = [max(column) for column in zip(*votes, strict=True)]
    agreed = decode(numbers, world_size=size)
    assert paces(numbers, world_size=size) == tuple(ballot.pace for ballot in ballots)
    assert agreed.checkpoint == any(ballot.checkpoint for ballot in ballots)
    assert agreed.quiesce == any(ballot.quiesce for ballot in ballots)
    assert agreed.non_finite == any(ballot.non_finite for ballot in ballots)
    assert agreed.non_finite_ranks == tuple(rank for rank, ballot in enumerate(ballots) if ballot.non_finite)
    assert agreed.pause == any(ballot.pause for ballot in ballots)
    assert agreed.bound == any(ballot.bound for ballot in ballots)
    assert agreed.node_local == any(ballot.node_local for ballot in ballots)
    assert agreed.busy == any(ballot.busy for ballot in ballots)
    assert agreed.urgent == any(ballot.urgent for ballot in ballots)
    assert agreed.touched == tuple(any(column) for column in zip(*(b.touched for b in ballots), strict=True))
    total = Audit()
    for ballot in ballots:
        total += ballot.seen
    assert agreed.seen == total
    if agreed.non_finite:
        assert math.isnan(agreed.loss)
    else:
        assert agreed.loss == pytest.approx(sum(b.loss for b in ballots) / sum(b.weight for b in ballots))


def test_a_loss_that_is_no_number_does_not_spoil_the_vote() -> None:
    bad = Ballot(
        checkpoint=False, quiesce=True, non_finite=True, touched=[], loss=math.nan, weight=1.0, seen=Audit(7, 1)
    )
    assert not any(math.isnan(number) for number in encode(bad, rank=1, world_size=2))


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("50", Interval(steps=50)),
        ("30s", Interval(seconds=30)),
        ("5m", Interval(seconds=300)),
        ("1h", Interval(seconds=3600)),
        ("Auto", Interval(auto=True)),
    ],
)
def test_intervals_are_steps_or_durations_or_the_jobs_choice(text: str, interval: Interval) -> None:
    assert Interval.parse(text) == interval


@pytest.mark.parametrize("text", ["0", "-3", "5 minutes", "1.5h", "often", "auto", "٣"])
def test_other_intervals_are_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="expected steps like '50', a duration like '30s'"):
        Interval.parse(text)


def test_arguments_override_environment_overrides_defaults() -> None:
    environ = {
        "HOLDFAST_CHECKPOINT_INTERVAL": "20",
        "HOLDFAST_CHECKPOINT_KEEP": "7",
        "HOLDFAST_CHECKPOINT_FULL_EVERY": "4",
        "HOLDFAST_CHECKPOINT_DELTA_THRESHOLD": "1e-5",
        "HOLDFAST_CHECKPOINT_RETENTION": "daily=7",
        "HOLDFAST_CHECKPOINT_BYTES_PER_SECOND": "1000",
        "HOLDFAST_CHECKPOINT_IN_FLIGHT": "4",
    }
    config = effective(read_environment(environ), keep_last=2)
    assert config.described() == {
        "checkpoint_dir": "none (default)",
        "checkpoint_interval": "20 steps (environment)",
        "keep_last": "2 (argument)",
        "full_every": "4 (environment)",
        "delta_threshold": "1e-05 (environment)",
        "retention": "daily=7 (environment)",
        "bytes_per_second": "1000 (environment)",
        "max_in_flight": "4 (environment)",
        "resume": "Always (default)",
    }


def test_environment_overrides_arguments_if_it_says_so() -> None:
    environ = {"HOLDFAST_CHECKPOINT_OVERRIDE": "1", "HOLDFAST_CHECKPOINT_KEEP": "7"}
    config = effective(
        read_environment(environ),
        checkpoint_dir=Path("/own"),
        keep_last=2,
        full_every=4,
        delta_threshold=1e-5,
        resume="Never",
    )
    assert config.checkpoint_dir is None
    assert (config.keep_last, config.full_every, config.delta_threshold, str(config.resume)) == (7, 1, 0.0, "Always")


@pytest.mark.parametrize("tier", ["CHECKPOINT", "LOCAL", "PEER", "OBJECT"])
def test_a_limit_in_flight_is_refused_by_name_and_bounds(tier: str) -> None:
    for value in ("0", "65"):
        with pytest.raises(UsageError, match=f"HOLDFAST_{tier}_IN_FLIGHT: invalid value '{value}': .* 1 to 64"):
            read_environment({f"HOLDFAST_{tier}_IN_FLIGHT": value})
    with pytest.raises(UsageError, match="max_in_flight is 0: expected 1 to 64"):
        effective(read_environment({}), max_in_flight=0)


def test_a_limit_of_no_bytes_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="HOLDFAST_CHECKPOINT_BYTES_PER_SECOND: invalid value '0'"):
        read_environment({"HOLDFAST_CHECKPOINT_BYTES_PER_SECOND": "0"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep at least one"),
        ({"full_every": 0}, "full_every is 0"),
        ({"full_every": 101}, "to 100"),
        ({"full_every": 4, "delta_threshold": -1e-3}, "invalid delta threshold -0.001"),
        ({"full_every": 4, "delta_threshold": 10}, "at most 1"),
        ({"delta_threshold": 1e-3}, "full_every 1"),
        ({"retention": "monthly=2"}, "retention rule 'monthly=2'"),
        ({"resume": "Sometimes"}, "expected 'Always' or 'Never'"),
    ],
)
def test_bad_settings_say_what_to_give(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        effective(read_environment({}), **arguments)  # type: ignore[arg-type]
