"""The keyed queue, on a clock of the test's own."""

from __future__ import annotations

import threading

import pytest

from holdfast_operator.runtime.workqueue import KeyedQueue


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> KeyedQueue:
    return KeyedQueue(clock=clock, jitter=lambda: 1.0, base_seconds=1.0, max_seconds=8.0)


def drained(queue: KeyedQueue) -> list[str]:
    found = []
    while queue.depth():
        key = queue.get()
        assert key is not None
        found.append(key)
        queue.done(key)
    return found


def test_a_key_waits_once_however_often_it_is_added(queue: KeyedQueue) -> None:
    for _ in range(5):
        queue.add("a")
    queue.add("b")
    assert drained(queue) == ["a", "b"]


def test_a_key_is_never_worked_on_twice_at_a_time(queue: KeyedQueue) -> None:
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    assert queue.depth() == 0
    queue.done("a")
    assert queue.depth() == 1


def test_the_sooner_of_two_dates_counts(queue: KeyedQueue, clock: Clock) -> None:
    queue.add("a", after=60)
    queue.add("a", after=5)
    queue.add("a", after=30)
    clock.now += 5
    assert drained(queue) == ["a"]
    clock.now += 100
    assert drained(queue) == []


def test_a_failed_key_comes_back_after_a_doubling_pause(queue: KeyedQueue, clock: Clock) -> None:
    pauses = []
    queue.add("a")
    for _ in range(6):
        assert queue.get() == "a"
        queue.done("a", failed=True)
        started = clock.now
        while not queue.depth():
            clock.now += 0.5
        pauses.append(clock.now - started)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_success_forgets_the_failures(queue: KeyedQueue, clock: Clock) -> None:
    queue.add("a")
    for failed in (True, True, False, True):
        clock.now += 10
        queue.add("a")
        assert queue.get() == "a"
        queue.done("a", failed=failed)
    clock.now += 1.0
    assert queue.depth() == 1


def test_requeue_after_is_kept_even_if_added_meanwhile(queue: KeyedQueue, clock: Clock) -> None:
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a", after=50)
    queue.done("a", requeue_after=5)
    clock.now += 5
    assert queue.depth() == 1


def test_a_key_that_comes_back_at_once_takes_nobodys_turn(queue: KeyedQueue, clock: Clock) -> None:
    queue.add("hot")
    for number in range(5):
        queue.add(f"quiet-{number}")
    found = []
    for _ in range(8):
        key = queue.get()
        assert key is not None
        found.append(key)
        clock.now += 0.01
        queue.done(key, requeue_after=0.0 if key == "hot" else None)
    assert found == ["hot", *(f"quiet-{number}" for number in range(5)), "hot", "hot"]


def test_the_wait_beyond_what_was_asked_is_measured(clock: Clock) -> None:
    waits: list[float] = []
    queue = KeyedQueue(clock=clock, waited=waits.append)
    queue.add("a", after=10)
    clock.now += 12
    queue.get()
    assert waits == [2.0]


def test_close_wakes_those_that_wait() -> None:
    queue = KeyedQueue()
    found: list[str | None] = []
    waiter = threading.Thread(target=lambda: found.append(queue.get()))
    waiter.start()
    queue.close()
    waiter.join(60)
    assert found == [None]
