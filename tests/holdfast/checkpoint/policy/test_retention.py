"""Retention rules form a union. A rule can only keep more than the last N checkpoints, never fewer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy.fencing import Commit, order
from holdfast.checkpoint.policy.retention import Best, Decision, Entry, Rules, decide, to_delete
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import UsageError

NOW = datetime(2026, 3, 18, 15, 0, tzinfo=UTC)  # a Wednesday
JOB = "job-1"
ONE = AttemptId(1, 1)


def entry(
    step: int,
    *,
    hours_ago: float = 0.0,
    attempt_id: AttemptId = ONE,
    parent: str | None = None,
    on: tuple[str, ...] = (),
    **metrics: float,
) -> Entry:
    return Entry(
        commit=Commit(step=step, attempt_id=attempt_id, job_uid=JOB, publication="p1"),
        created=NOW - timedelta(hours=hours_ago),
        parent=parent,
        depends_on=frozenset(on),
        metrics=metrics,
    )


def decided(entries: list[Entry], rules: str, *, last: int = 1, claims: tuple[Claim, ...] = ()) -> list[Decision]:
    verified = {e.name for e in entries}
    own = max((e.commit.attempt_id for e in entries), default=ONE)
    return decide(
        entries, claims, job_uid=JOB, own=own, verified=verified, keep_last=last, rules=Rules.parse(rules), now=NOW
    )


def kept(entries: list[Entry], rules: str, **options: Any) -> dict[int, str]:
    return {d.commit.step: d.reason for d in decided(entries, rules, **options) if not d.deleted}


# Each rule


def test_a_rule_of_any_number_of_days_costs_no_memory() -> None:
    entries = [entry(step, hours_ago=24 * step) for step in range(1, 4)]
    assert len(kept(entries, "daily=999999999,weekly=999999999")) == 3


def test_a_delta_goes_before_what_it_stands_on() -> None:
    entries = [
        entry(10),
        entry(20, on=("step-10.g1.a1",)),
        entry(20, attempt_id=AttemptId(1, 2)),
        entry(30),
        entry(40),
    ]
    gone = to_delete(decided(entries, "", last=1))
    assert list(map(str, gone)) == ["step-30.g1.a1", "step-20.g1.a2", "step-20.g1.a1", "step-10.g1.a1"]


def test_without_rules_the_last_ones_stay() -> None:
    assert kept([entry(step) for step in (10, 20, 30, 40)], "", last=2) == {
        30: "among the last 2",
        40: "among the last 2",
    }


def test_every_one_of_the_last_hours_stays() -> None:
    entries = [entry(100 - age, hours_ago=age) for age in range(10)]
    assert sorted(kept(entries, "hours=6")) == [95, 96, 97, 98, 99, 100]


def test_last_checkpoint_of_each_calendar_day_stays_for_n_days() -> None:
    entries = [entry(1000 - age, hours_ago=age) for age in range(0, 24 * 10, 4)]
    assert kept(entries, "daily=3") == {1000: "among the last 1", 1000 - 16: "daily=3", 1000 - 40: "daily=3"}


def test_the_last_one_of_each_week_stays_from_monday_on() -> None:
    entries = [entry(10_000 - age, hours_ago=age) for age in range(0, 24 * 40, 24)]
    weeks = sorted(kept(entries, "weekly=3"))
    # Sundays 15:00 of the two previous weeks: 3 and 10 days ago.
    assert weeks == [10_000 - 24 * 10, 10_000 - 24 * 3, 10_000]


def test_milestones_stay_for_good() -> None:
    entries = [entry(step, hours_ago=10_000 - step) for step in range(0, 1000, 50)]
    assert sorted(kept(entries, "every=300")) == [0, 300, 600, 900, 950]


def test_the_best_by_a_metric_stay() -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 5.0}
    entries = [entry(step, loss=loss) for step, loss in losses.items()] + [entry(50), entry(60)]
    assert sorted(kept(entries, "best=loss:min:2")) == [20, 30, 60]
    assert sorted(kept(entries, "best=loss:max")) == [40, 60]


def test_what_a_commit_that_stays_stands_on_stays() -> None:
    entries = [
        entry(10),
        entry(20, parent="step-10.g1.a1"),
        entry(30, parent="step-20.g1.a1"),
        entry(40, parent="step-10.g1.a1"),
        entry(50, parent="step-30.g1.a1"),
    ]
    assert sorted(kept(entries, "")) == [10, 20, 30, 50]


def test_bytes_of_a_kept_checkpoint_stay_across_unreadable_links() -> None:
    """A delta chain keeps its base although a manifest between them is unreadable."""
    entries = [
        entry(10),
        entry(20),
        Entry(commit=Commit(step=30, attempt_id=ONE)),
        entry(40, parent="step-30.g1.a1", on=("step-10.g1.a1",)),
    ]
    assert {10, 40} <= kept(entries, "").keys()
    assert 20 not in kept(entries, "")


def test_a_commit_whose_manifest_cannot_be_read_is_not_aged() -> None:
    unknown = Entry(commit=Commit(step=5, attempt_id=ONE))
    claims = (Claim(attempt_id=ONE, job_uid=JOB, publication="p1", from_step=0),)
    assert [d.deleted for d in decided([unknown, entry(10)], "hours=1", claims=claims)] == [False, False]


def unread(step: int, attempt_id: AttemptId = ONE) -> Entry:
    return Entry(commit=Commit(step=step, attempt_id=attempt_id))


def test_checkpoint_with_an_unreadable_manifest_stays() -> None:
    """The attempt that wrote the checkpoint does not matter."""
    fence = Claim(attempt_id=AttemptId(2, 1), job_uid=JOB, publication="p2", from_step=10, from_attempt_id=ONE)
    entries = [unread(5), entry(10), unread(20), entry(30, attempt_id=AttemptId(2, 1)), unread(40, AttemptId(3, 1))]
    reasons = {d.commit.step: d.reason for d in decided(entries, "", claims=(fence,)) if not d.deleted}
    assert reasons == {
        5: "its manifest cannot be read",
        20: "its manifest cannot be read",
        30: "among the last 1",
        40: "its manifest cannot be read",
    }


def test_unreadable_manifest_does_not_count_as_complete() -> None:
    claims = (Claim(attempt_id=ONE, job_uid=JOB, publication="p1", from_step=0),)
    entries = [entry(10), entry(20), entry(30), unread(40)]
    assert sorted(kept(entries, "", last=2, claims=claims)) == [10, 20, 30, 40]  # 40 may depend on any of them
    assert sorted(kept([*entries, entry(50), entry(60)], "", last=2, claims=claims)) == [40, 50, 60]


def test_possible_bases_of_an_unreadable_milestone_stay() -> None:
    claims = (Claim(attempt_id=ONE, job_uid=JOB, publication="p1", from_step=0),)
    entries = [
        entry(10),
        unread(20),
        entry(30),
        entry(40, attempt_id=AttemptId(1, 2)),
        entry(50, attempt_id=AttemptId(1, 2)),
    ]
    assert kept(entries, "every=20", claims=claims) == {
        10: "step-20.g1.a1 may depend on it: its manifest cannot be read",
        20: "every=20",
        40: "every=20",
        50: "among the last 1",
    }


def test_fenced_commits_go_whatever_the_rules_say() -> None:
    claim = Claim(attempt_id=AttemptId(2, 1), job_uid=JOB, publication="p2", from_step=10, from_attempt_id=ONE)
    entries = [entry(10), entry(20), entry(30, attempt_id=AttemptId(2, 1))]
    decisions = decided(entries, "hours=6,every=1", claims=(claim,))
    assert [(d.commit.step, d.reason) for d in decisions if d.deleted] == [(20, "fenced: it is never read")]


# Invariants

moments = st.floats(min_value=-30, max_value=24 * 100)
attempt_ids = st.sampled_from([AttemptId(1, 1), AttemptId(1, 2), AttemptId(2, 1)])
bests = st.builds(Best, metric=st.just("loss"), highest=st.booleans(), count=st.integers(1, 3))
ruled = st.builds(
    Rules,
    hours=st.integers(0, 48),
    daily=st.integers(0, 10),
    weekly=st.integers(0, 14),
    every=st.integers(0, 40),
    best=st.lists(bests, max_size=2).map(tuple),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Entry], tuple[Claim, ...], set[CheckpointName], AttemptId]:
    every = st.builds(
        lambda step, attempt_id: CheckpointName(step=step, attempt_id=attempt_id), st.integers(0, 60), attempt_ids
    )
    names = draw(st.lists(every, unique=True, max_size=14))
    entries: list[Entry] = []
    for step, attempt_id in ((name.step, name.attempt_id) for name in sorted(names)):
        below = [e for e in entries if e.commit.step < step]
        parent = draw(st.none() | st.sampled_from(below)) if below else None
        if draw(st.integers(0, 5)) == 0:
            entries.append(unread(step, attempt_id))
            continue
        loss = {"loss": draw(st.floats(0, 9))} if draw(st.booleans()) else {}
        entries.append(
            entry(
                step,
                hours_ago=draw(moments),
                attempt_id=attempt_id,
                parent=None if parent is None else str(parent.name),
                **loss,
            )
        )
    claims = draw(
        st.lists(
            st.builds(
                Claim,
                attempt_id=attempt_ids,
                job_uid=st.just(JOB),
                publication=st.just("p"),
                from_step=st.integers(0, 60),
                from_attempt_id=st.none() | attempt_ids,
            ),
            max_size=3,
        )
    )
    verified = {name for name in names if draw(st.booleans())}
    return entries, tuple(claims), verified, draw(attempt_ids)


@given(histories(), ruled, st.integers(1, 4))
def test_rules_never_take_what_must_stay(
    history: tuple[list[Entry], tuple[Claim, ...], set[CheckpointName], AttemptId], rules: Rules, last: int
) -> None:
    entries, claims, verified, own = history

    def gone(rules: Rules, among: list[Entry]) -> set[CheckpointName]:
        made = decide(among, claims, job_uid=JOB, own=own, verified=verified, keep_last=last, rules=rules, now=NOW)
        return {d.commit.name for d in made if d.deleted}

    deleted = gone(rules, entries)
    stays = [e for e in entries if e.name not in deleted]
    line = order((e.commit for e in entries), claims, job_uid=JOB)
    good = [c for c in line if c.name in verified and c.job_uid is not None][:last]

    assert not deleted & {e.name for e in entries if e.unread}
    assert not deleted & {c.name for c in good}
    assert not deleted or len(good) == last
    assert all(name.attempt_id <= own for name in deleted)
    needed = {e.parent for e in stays if e.parent is not None}
    assert not needed & {str(e.name) for e in entries if e.name in deleted}
    assert deleted <= gone(Rules(), entries)  # rules only keep more
    readable = {c.name for c in line}
    assert not any(
        e.created is not None and rules.hours and NOW - e.created < timedelta(hours=rules.hours)
        for e in entries
        if e.name in deleted & readable
    )
    # Decisions are permanent: nothing more is deleted while nothing changes.
    assert gone(rules, stays) == set()


# Syntax of rules


def test_rules_are_read_and_said_in_the_same_words() -> None:
    text = "hours=6,daily=7,weekly=12,every=10000,best=val_loss:min:3,best=accuracy:max:1"
    assert str(Rules.parse(text)) == text
    assert Rules.parse("") == Rules()


@pytest.mark.parametrize("text", ["hours=0", "hours=6,hours=7", "monthly=2", "best=loss", "best=loss:least", "daily"])
def test_a_rule_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=text.rsplit(",", maxsplit=1)[-1]):
        Rules.parse(text)
