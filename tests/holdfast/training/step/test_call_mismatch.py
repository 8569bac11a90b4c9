"""Ranks in different calls of the job detect the mismatch. Ranks in the same call never report one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast.core.errors import UsageError
from holdfast.training.step.call_mismatch import LONG_SECONDS, Call, Calls, ReportedCall


@dataclass
class Store:
    """The store of one attempt."""

    values: dict[str, str] = field(default_factory=dict)
    asked: int = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert not expected
        self.asked += 1
        return self.values.setdefault(key, desired).encode()


@dataclass
class Dead(Store):
    """A store whose host is gone."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.asked += 1
        raise RuntimeError("Connection reset by peer")


@pytest.fixture(autouse=True)
def answers_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the store in the calling thread."""
    monkeypatch.setattr("holdfast.training.step.call_mismatch.start_thread", lambda ask, *words, name: ask(*words))


def world(store: Store, size: int = 2) -> list[Calls]:
    return [Calls(rank=rank, step=lambda: 10, connect=lambda: store) for rank in range(size)]


def wait_long(rank: Calls) -> None:
    """Wait until the rank has written its call and read those of the others."""
    for _ in range(3):
        rank.waited(LONG_SECONDS)


def test_nobody_asks_while_waits_are_short() -> None:
    store = Store()
    world(store)[0].waited(LONG_SECONDS / 2)
    assert not store.asked


def test_ranks_that_wait_in_the_same_call_go_on_waiting() -> None:
    store = Store()
    ranks = world(store, 3)
    for call in Call:
        for rank in ranks:
            with rank.during(call):
                wait_long(rank)
    assert store.asked == len(Call) * len(ranks)


@pytest.mark.parametrize(
    ("call", "said", "mend"),
    [
        (Call.SAVE, "rank 1 calls job.save() after step 10", "call job.save() on every rank at the same step"),
        (Call.END, "rank 1 ended after step 10", "call job.step(loss, samples=0) on a rank whose data"),
    ],
)
def test_the_second_to_wait_says_what_both_do_and_the_mend(call: Call, said: str, mend: str) -> None:
    store = Store()
    goes_on, other = world(store)
    with goes_on.during(Call.STEP), other.during(call):
        wait_long(other)
        with pytest.raises(UsageError, match="rank 0 continues to step 11") as raised:
            wait_long(goes_on)
    assert said in str(raised.value)
    assert mend in str(raised.value)


def test_an_earlier_call_is_never_taken_for_a_later_one() -> None:
    store = Store()
    ahead, behind = world(store)
    with ahead.during(Call.SAVE):
        wait_long(ahead)
    with behind.during(Call.SAVE):
        pass
    for rank in (ahead, behind):
        with rank.during(Call.STEP):
            wait_long(rank)
    assert [ReportedCall.from_json(value).call for value in store.values.values()] == [Call.SAVE, Call.STEP]


def test_wait_in_forward_or_evaluation_implies_no_following_call() -> None:
    """The rank waits for another rank of its shard group."""
    store = Store()
    ranks = world(store)
    for call in Call:
        for rank in ranks:
            rank.waited(LONG_SECONDS)
            with rank.during(call):
                wait_long(rank)
    assert store.asked == len(Call) * len(ranks)


def test_a_store_that_is_gone_is_not_the_scripts_fault() -> None:
    store = Dead()
    for rank in world(store):
        with rank.during(Call.STEP):
            wait_long(rank)
    assert store.asked == 2, "once in a call"
