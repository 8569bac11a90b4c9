"""What holds for the sources of all clouds: the real source against its cloud's service, healthy and spoiled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import DeadlineError, SidecarError
from holdfast_sidecar.interruptions.aws import AwsSource
from holdfast_sidecar.interruptions.azure import AzureSource
from holdfast_sidecar.interruptions.gcp import GcpSource
from holdfast_sidecar.interruptions.poller import InterruptionPoller
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.protocol.document import parse_time
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.runtime.clock import SystemClock
from holdfast_sidecar.runtime.http import Connection, Response, Transport
from holdfast_testbed.fakes.metadata import AWS, AZURE, CLOUDS, FAULTS, GCP, NOTICE_SECONDS

SLOW = ("hang", "drip")
FIRST_PATH = {
    AWS: "/latest/meta-data/spot/instance-action",
    GCP: "/computeMetadata/v1/instance/preempted",
    AZURE: "/metadata/scheduledevents",
}

Make = Callable[[str], Source]


def source_of(cloud: str, transport: Transport, monotonic: Callable[[], float]) -> Source:
    if cloud == AWS:
        return AwsSource(transport, monotonic, checkpoint_deadline=25.0)
    if cloud == GCP:
        return GcpSource(transport, checkpoint_deadline=25.0, hold=0)
    return AzureSource(transport, checkpoint_deadline=25.0)


@pytest.fixture
def make(sky: Any, clock: Any) -> Make:
    """The deadlines of a connection run on the machine's clock, all else on the test's."""

    def made(cloud: str) -> Source:
        return source_of(cloud, Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10), clock.monotonic)

    return made


@pytest.fixture
def poll(clock: Any, sky: Any, wait: Any) -> Callable[[Source], tuple[Notice, ...]]:
    """Polls; a healthy service until an answer is in time, as the machine may be busy."""

    def once(source: Source) -> list[tuple[Notice, ...]]:
        with contextlib.suppress(*([] if sky.server.fault else [DeadlineError])):
            return [source.poll(clock.now())]
        return []

    return lambda source: wait(lambda: once(source), "a poll in time")[0]


@pytest.fixture
def spoil(sky: Any, monkeypatch: Any) -> Callable[[str, str], contextlib.AbstractContextManager[None]]:
    """A service that has something to announce and is spoiled for a while."""

    @contextlib.contextmanager
    def spoiled(cloud: str, fault: str) -> Iterator[None]:
        sky.announce(cloud)
        sky.server.fault = fault
        with monkeypatch.context() as patience:
            if fault in SLOW:
                patience.setattr(c, "METADATA_TIMEOUT_SECONDS", 0.2)
            yield
        sky.server.fault = ""

    return spoiled


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nothing_to_tell_is_no_notice(make, poll, cloud):
    assert poll(make(cloud)) == ()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_that_is_taken_away_is_one_notice_that_drains(make, poll, sky, clock, cloud):
    source = make(cloud)
    sky.announce(cloud)
    (notice,) = poll(source)
    assert (notice.source, notice.drain) == (cloud, True)
    assert notice.deadline == clock.now() + timedelta(seconds=NOTICE_SECONDS[cloud])
    assert notice.observed_at == clock.now()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_notice_keeps_its_id_after_a_restart(make, poll, sky, clock, cloud):
    source = make(cloud)
    sky.announce(cloud)
    (first,) = poll(source)
    clock.forward(2)
    (second,), (third,) = poll(source), poll(make(cloud))
    assert first.id == second.id == third.id


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_that_is_withdrawn_holds_no_more(make, poll, sky, cloud):
    source = make(cloud)
    sky.announce(cloud)
    assert poll(source)
    sky.withdraw(cloud)
    assert poll(source) == ()


@pytest.mark.parametrize("fault", ["400", "401", "403", "410", "429", "500", "503", *FAULTS])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_bad_answer_is_an_error_and_a_later_one_counts(make, poll, spoil, cloud, fault):
    source = make(cloud)
    poll(source)
    with spoil(cloud, fault), pytest.raises(SidecarError):
        poll(source)
    assert [notice.source for notice in poll(source)] == [cloud]


@pytest.mark.parametrize("fault", ["404", "429", "500", "html", "redirect", "hang"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_bad_service_from_the_start_is_an_error(make, poll, spoil, cloud, fault):
    source = make(cloud)
    with spoil(cloud, fault), pytest.raises(SidecarError):
        poll(source)
    assert [notice.source for notice in poll(source)] == [cloud]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_redirect_is_never_followed(make, sky, clock, cloud):
    sky.server.fault = "redirect"
    with pytest.raises(SidecarError):
        make(cloud).poll(clock.now())
    assert [request.path for request in list(sky.server.seen) if request.path.startswith("/elsewhere")] == []


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_hangs_up_between_polls_costs_nothing(make, poll, sky, cloud):
    source = make(cloud)
    poll(source)
    sky.server.stop()
    sky.server.start()
    sky.announce(cloud)
    assert [notice.source for notice in poll(source)] == [cloud]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_gets_through_a_service_that_fails_now_and_then(make, sky, clock, run_dir: Path, cloud):
    """The watcher with the real source: each fault in turn, and the notice in between reaches the touch-file."""
    errors: list[str] = []
    watcher = InterruptionPoller(
        make(cloud), NoticeLedger(run_dir), clock, lambda low, high: high, on_error=errors.append
    )
    for fault in ("500", "garbage", "429", "cut"):
        sky.server.fault = fault
        sky.announce(cloud)
        watcher.tick()
    assert errors == [cloud] * 4
    assert not (run_dir / "emergency_checkpoint").exists()
    sky.server.fault = ""
    watcher.tick()
    assert json.loads((run_dir / "emergency_checkpoint").read_text())["source"] == cloud


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_deadline_is_told_by_this_hosts_clock(make, poll, sky, clock, cloud):
    for minutes in (-20, 20):
        sky.withdraw(cloud)
        sky.skew = timedelta(minutes=minutes)
        sky.announce(cloud)
        (notice,) = poll(make(cloud))
        assert notice.deadline == clock.now() + timedelta(seconds=NOTICE_SECONDS[cloud])


class Says:
    """A service that gives each path's body whole, and else has nothing to tell."""

    def __init__(self, cloud: str, body: bytes, **headers: str) -> None:
        self._bodies = {FIRST_PATH[cloud]: body}
        self._headers = {"metadata-flavor": "Google", "etag": "abc", **headers}

    def request(self, method: str, path: str, **_: Any) -> Response:
        path = path.partition("?")[0]
        fixed = {
            "/latest/api/token": b"token==",
            "/metadata/instance/compute/name": b"gpt-node_1",
            "/computeMetadata/v1/instance/maintenance-event": b"NONE",
        }
        body = self._bodies.get(path, fixed.get(path))
        return Response(status=404 if body is None else 200, headers=self._headers, body=body or b"")


BEYOND = "21 Jan 99999999999999999999 09:00:43 GMT"
EVENT = {"EventId": "A1", "EventType": "Preempt", "EventStatus": "Scheduled", "Resources": ["gpt-node_1"]}


@pytest.mark.parametrize(
    ("cloud", "said"),
    [
        (AWS, {"action": "terminate", "time": "0001-01-01T00:00:00+14:00"}),
        (AZURE, {"Events": [{**EVENT, "NotBefore": BEYOND}]}),
        (AZURE, {"Events": [{**EVENT, "NotBefore": "Mon, 01 Jan 2026 00:00:00 +99999999999999"}]}),
    ],
)
def test_a_time_out_of_all_range_is_an_error(cloud, said):
    with pytest.raises(SidecarError):
        source_of(cloud, Says(cloud, json.dumps(said).encode()), lambda: 0.0).poll(SystemClock().now())


@pytest.mark.parametrize(
    ("time", "date"),
    [("2026-11-24T08:00:00Z", BEYOND), ("9999-12-31T23:59:59Z", "Mon, 01 Jan 2024 00:00:00 GMT")],
)
def test_deadline_falls_back_to_the_clouds_clock(clock, time, date):
    """This host's clock cannot be compared."""
    service = Says(AWS, json.dumps({"action": "terminate", "time": time}).encode(), date=date)
    (notice,) = source_of(AWS, service, lambda: 0.0).poll(clock.now())
    assert notice.deadline == parse_time(time)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["terminate"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["action", "time", "Events", "EventId", "EventType", "EventStatus", "Resources"]),
            inner,
            max_size=7,
        )
    ),
    max_leaves=12,
)
hostile = st.one_of(st.binary(max_size=200), json_values.map(lambda value: json.dumps(value).encode()))


@given(st.sampled_from(CLOUDS), hostile)
def test_no_answer_of_another_form_ever_drains_anybody(cloud: str, body: bytes):
    now = SystemClock().now()
    try:
        notices = source_of(cloud, Says(cloud, body), lambda: 0.0).poll(now)
    except SidecarError:
        return
    assert notices == () or body.strip() == b"TRUE"
