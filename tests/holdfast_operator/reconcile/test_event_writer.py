"""Events are written in order, without holding up a pass."""

from __future__ import annotations

import threading

import pytest

from holdfast_operator.reconcile.event_writer import EventWriter

SECONDS = 120.0


@pytest.fixture
def writer() -> EventWriter:
    return EventWriter()


def test_events_are_written_in_order(writer: EventWriter) -> None:
    told: list[int] = []
    for number in range(50):
        writer.add(lambda number=number: told.append(number))  # type: ignore[misc]
    writer.start()
    writer.stop(SECONDS)
    assert told == list(range(50))


def test_one_that_fails_costs_only_itself(writer: EventWriter, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    writer.add(lambda: {}["nothing"])
    writer.add(told.set)
    writer.start()
    assert told.wait(SECONDS)
    assert writer.alive()
    writer.stop(SECONDS)
    assert "events were not written" in caplog.text


def test_what_waits_is_bounded_while_the_api_server_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    writer, told = EventWriter(most=3), []
    for number in range(5):
        writer.add(lambda number=number: told.append(number))  # type: ignore[misc]
    writer.start()
    writer.stop(SECONDS)
    assert told == [0, 1, 2]
    assert caplog.text.count("dropping") == 2
