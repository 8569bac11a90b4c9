"""The AWS source against a real metadata service on loopback, healthy and spoiled in every way we know."""

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast_sidecar.clock import SystemClock
from holdfast_sidecar.errors import DeadlineError, SidecarError
from holdfast_sidecar.notice import Ledger, Watcher
from holdfast_sidecar.sources.aws import AwsSource
from holdfast_sidecar.transport import Connection

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def token_clock(clock):
    """The source's own clock, for the token; the connection's deadlines run on the machine's."""
    return clock


@pytest.fixture
def source(metadata, token_clock) -> AwsSource:
    connection = Connection(metadata.url, SystemClock().monotonic, max_bytes=64 << 10)
    return AwsSource(connection, token_clock.monotonic, checkpoint_deadline=25.0)


def poll(source):
    """What a poll finds; nothing yet when a busy machine makes it late."""
    with contextlib.suppress(DeadlineError):
        return source.poll(NOON) or "nothing to tell"


def test_nothing_to_tell_is_no_notice(source, clock):
    assert source.poll(clock.now()) is None


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_is_a_notice_with_its_time(source, metadata, clock, action):
    metadata.interrupt(action)
    notice = source.poll(clock.now())
    assert notice.id == "aws-spot-2026-01-31T12:02:00Z"
    assert (notice.action, notice.reason, notice.drain) == (action, f"spot/instance-action {action}", True)
    assert notice.deadline == clock.now() + timedelta(minutes=2)


def test_a_rebalance_is_a_notice_that_wants_a_checkpoint_soon(source, metadata, clock):
    metadata.recommend()
    notice = source.poll(clock.now())
    assert notice.id == "aws-rebalance-2026-01-31T11:59:00Z"
    assert not notice.drain
    assert notice.deadline == clock.now() + timedelta(seconds=25)


def test_an_interruption_comes_before_a_rebalance(source, metadata, clock):
    metadata.recommend()
    metadata.interrupt()
    assert source.poll(clock.now()).action == "terminate"


def test_a_token_is_asked_for_once_and_again_before_it_expires(source, metadata, clock, token_clock):
    metadata.ttl = 60
    for _ in range(3):
        source.poll(clock.now())
    assert metadata.token_requests == 1
    token_clock.forward(53)
    source.poll(clock.now())
    assert metadata.token_requests == 1
    token_clock.forward(2)
    source.poll(clock.now())
    assert metadata.token_requests == 2


def test_a_token_that_is_refused_is_renewed_within_the_poll(source, metadata, clock):
    source.poll(clock.now())
    metadata.valid = set()
    metadata.interrupt()
    assert source.poll(clock.now()).action == "terminate"


FAULTS = [
    "400",
    "401",
    "403",
    "429",
    "500",
    "503",
    "302",
    "garbage",
    "html",
    "redirect",
    "endless",
    "cut",
    "hang",
    "drip",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["from the start", "with a token held"])
def test_a_spoiled_answer_is_an_error_and_a_later_good_one_is_believed(source, metadata, wait, fault, when):
    if when != "from the start":
        wait(lambda: poll(source), "a poll in time")
    metadata.interrupt()
    metadata.fault = fault
    with pytest.raises(SidecarError):
        source.poll(NOON)
    metadata.fault = ""
    assert wait(lambda: poll(source), "a poll in time").action == "terminate"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'"terminate"',
        b'{"action": "terminate"}',
        b'{"action": "terminate", "time": "soon"}',
        b'{"action": "terminate", "time": 5}',
        b'{"action": "dance", "time": "2026-01-31T12:02:00Z"}',
        b'{"action": ["terminate"], "time": "2026-01-31T12:02:00Z"}',
        b"[" * 50_000,
    ],
)
def test_an_answer_of_another_form_never_drains_anybody(source, metadata, clock, body):
    metadata.answers[metadata.SPOT] = body
    with pytest.raises(SidecarError):
        source.poll(clock.now())


def test_a_service_that_hangs_up_between_polls_costs_nothing(source, metadata, clock):
    source.poll(clock.now())
    metadata.stop()
    metadata.start()
    metadata.interrupt()
    assert source.poll(clock.now()).action == "terminate"


def test_a_notice_gets_through_a_service_that_fails_now_and_then(source, metadata, clock, run_dir: Path):
    """The watcher with the real source: each fault in turn, and the notice in between reaches the touch-file."""
    errors: list[str] = []
    watcher = Watcher(source, Ledger(run_dir), clock, lambda low, high: high, on_error=errors.append)
    for fault in ("500", "garbage", "429", ""):
        metadata.fault = fault
        metadata.interrupt()
        watcher.tick()
    assert len(errors) == 3
    assert (run_dir / "emergency_checkpoint").exists()
