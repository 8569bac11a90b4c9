"""Events are told beside the passes: what one job has to tell holds up neither a pass nor another job for long."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from holdfast_operator.reconcile.event_writer import EventWriter

SECONDS = 10.0


@pytest.fixture
def teller() -> EventWriter:
    return EventWriter(threads=2)


def gate() -> tuple[threading.Event, Callable[[], None]]:
    """Something to tell that lasts until it is let go."""
    opened = threading.Event()
    return opened, lambda: opened.wait(SECONDS) and None


def test_a_job_with_much_to_tell_leaves_a_thread_to_the_others(teller: EventWriter) -> None:
    opened, slow = gate()
    told = threading.Event()
    for _ in range(20):
        teller.add("ml/loud", slow)
    teller.start()
    teller.add("ml/gpt", told.set)
    assert told.wait(SECONDS)
    assert not opened.is_set()
    opened.set()
    teller.stop(SECONDS)


def test_of_one_job_all_is_told_in_order(teller: EventWriter) -> None:
    told: list[int] = []
    for number in range(50):
        teller.add("ml/gpt", lambda number=number: told.append(number))  # type: ignore[misc]
    teller.start()
    teller.stop(SECONDS)
    assert told == list(range(50))


def test_one_that_fails_costs_only_itself(teller: EventWriter, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    teller.add("ml/gpt", lambda: {}["nothing"])
    teller.add("ml/gpt", told.set)
    teller.start()
    assert told.wait(SECONDS)
    assert teller.alive()
    teller.stop(SECONDS)
    assert "events were not written" in caplog.text


def test_what_waits_is_bounded_while_the_api_server_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    teller, told = EventWriter(threads=1, most=3), []
    for number in range(5):
        teller.add("ml/gpt", lambda number=number: told.append(number))  # type: ignore[misc]
    teller.start()
    teller.stop(SECONDS)
    assert told == [0, 1, 2]
    assert caplog.text.count("left out") == 2
