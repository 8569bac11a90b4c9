"""AWS: IMDSv2's tokens, what each path tells, and maintenance that is days away."""

import json
from datetime import timedelta

import pytest

from holdfast_sidecar.errors import SidecarError
from holdfast_sidecar.interruptions.aws import MAINTENANCE_PATH, REBALANCE_PATH, SPOT_PATH, TOKEN_PATH, AwsSource
from holdfast_sidecar.runtime.clock import SystemClock
from holdfast_sidecar.runtime.http import Connection, Response
from holdfast_testbed.fakes.metadata import AWS


@pytest.fixture
def source(sky, clock) -> AwsSource:
    connection = Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10)
    return AwsSource(connection, clock.monotonic, checkpoint_deadline=25.0)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_is_a_notice_with_its_time(source, sky, clock, action):
    sky.announce(AWS, action)
    (notice,) = source.poll(clock.now())
    assert notice.id == "aws-spot-2026-01-31T12:02:00Z"
    assert (notice.action, notice.reason, notice.drain) == (action, f"spot/instance-action {action}", True)


def test_a_rebalance_is_a_notice_that_wants_a_checkpoint_soon(source, sky, clock):
    sky.announce(AWS, "rebalance")
    (notice,) = source.poll(clock.now())
    assert (notice.id, notice.action, notice.drain) == ("aws-rebalance-2026-01-31T12:00:00Z", "rebalance", False)
    assert notice.deadline == clock.now() + timedelta(seconds=25)


def test_an_interruption_stands_alone(source, sky, clock):
    sky.announce(AWS, "rebalance")
    sky.announce(AWS, "system-reboot", seconds=60)
    sky.announce(AWS)
    assert [notice.action for notice in source.poll(clock.now())] == ["terminate"]


# Tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_once_and_again_before_it_expires(source, sky, clock):
    for _ in range(3):
        source.poll(clock.now())
    assert len(sky.asked(TOKEN_PATH, "PUT")) == 1
    clock.forward(0.9 * 21600 - 1)
    source.poll(clock.now())
    assert len(sky.asked(TOKEN_PATH, "PUT")) == 1
    clock.forward(2)
    source.poll(clock.now())
    assert len(sky.asked(TOKEN_PATH, "PUT")) == 2


def test_a_token_that_is_refused_is_renewed_within_the_poll(source, sky, clock):
    source.poll(clock.now())
    sky.aws.expire_tokens()
    sky.announce(AWS)
    assert [notice.action for notice in source.poll(clock.now())] == ["terminate"]


def test_refused_tokens_are_an_error(source, sky, clock):
    """Tokens are not renewed endlessly."""
    source.poll(clock.now())
    before = len(sky.server.seen)
    sky.aws.clock = lambda: float("inf")
    with pytest.raises(SidecarError, match="answered 401"):
        source.poll(clock.now())
    assert len(sky.server.seen) - before == 3, "the refusal, a new token, the refusal again"


# Maintenance -----------------------------------------------------------------------------------------------------

DAYS = 7 * 86400.0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("instance-stop", ("stop", True)),
        ("instance-retirement", ("terminate", True)),
        ("instance-reboot", ("reboot", True)),
        ("system-reboot", ("reboot", True)),
        ("system-maintenance", ("maintenance", False)),
    ],
)
def test_maintenance_is_left_alone_until_it_is_near(source, sky, clock, code, expected):
    event = sky.announce(AWS, code, seconds=DAYS)
    assert source.poll(clock.now()) == ()
    clock.forward(DAYS - 20)
    (notice,) = source.poll(clock.now())
    assert notice.id == f"aws-maintenance-instance-event-{event.id.lower()}"
    assert ((notice.action, notice.drain), notice.reason) == (expected, f"events/maintenance/scheduled {code}")
    assert notice.deadline == clock.now() + timedelta(seconds=20)


def test_maintenance_leaves_time_for_a_replacement(source, sky, clock):
    sky.announce(AWS, "system-reboot", seconds=DAYS)
    clock.forward(DAYS - 901)
    assert source.poll(clock.now()) == ()
    clock.forward(2)
    assert [notice.action for notice in source.poll(clock.now())] == ["reboot"]


def test_maintenance_that_is_called_off_in_time_never_was(source, sky, clock):
    sky.announce(AWS, "instance-retirement", seconds=DAYS)
    source.poll(clock.now())
    sky.withdraw(AWS)
    clock.forward(DAYS - 20)
    assert source.poll(clock.now()) == ()


def test_maintenance_is_near_by_the_clouds_clock(source, sky, clock):
    """A host whose clock is an hour behind would come an hour late."""
    sky.skew = timedelta(hours=1)
    sky.announce(AWS, "system-reboot", seconds=600)
    (notice,) = source.poll(clock.now())
    assert notice.deadline == clock.now() + timedelta(seconds=600)


def test_maintenance_is_asked_for_seldom(source, sky, clock):
    for _ in range(30):
        source.poll(clock.now())
        clock.forward(2)
    assert len(sky.asked(MAINTENANCE_PATH)) == 2
    assert len(sky.asked(SPOT_PATH)) == 30


def test_two_short_disturbances_are_two_notices(source, sky, clock):
    later, sooner = (sky.announce(AWS, "system-maintenance", seconds=seconds) for seconds in (20, 10))
    found = [notice.id for notice in source.poll(clock.now())]
    assert found == [f"aws-maintenance-instance-event-{event.id.lower()}" for event in (sooner, later)]


class Lists:
    """A service with a list of maintenance, or a status instead of it, that the test sets."""

    def __init__(self, listed: bytes | int) -> None:
        self.said: dict[str, bytes | int] = {TOKEN_PATH: b"token", MAINTENANCE_PATH: listed}

    def request(self, method: str, path: str, **_: object) -> Response:
        said = self.said.get(path, 404)
        status, body = (said, b"") if isinstance(said, int) else (200, said)
        return Response(status=status, headers={}, body=body)


def source_of(service: Lists, clock, errors: list[str]) -> AwsSource:
    return AwsSource(service, clock.monotonic, checkpoint_deadline=25.0, on_error=errors.append)


GOOD = b'{"EventId": "e-1", "Code": "system-reboot", "State": "active", "NotBefore": "31 Jan 2026 12:05:00 GMT"}'


@pytest.mark.parametrize(("ends", "left"), [(6 * 3600, 25), (10, 10)])
def test_window_that_has_begun_allows_a_checkpoint(clock, ends, left):
    """NotBefore is the earliest time at which the machine stops, NotAfter the latest."""
    begun, over = clock.now() - timedelta(hours=1), clock.now() + timedelta(seconds=ends)
    event = {"EventId": "e", "Code": "system-reboot", "State": "active"}
    window = {"NotBefore": f"{begun:%d %b %Y %H:%M:%S} GMT", "NotAfter": f"{over:%d %b %Y %H:%M:%S} GMT"}
    (notice,) = source_of(Lists(json.dumps([event | window]).encode()), clock, []).poll(clock.now())
    assert notice.deadline == clock.now() + timedelta(seconds=left)


@pytest.mark.parametrize("path", [SPOT_PATH, REBALANCE_PATH])
def test_one_interruption_is_one_notice_though_its_time_moves(clock, path):
    """A service may give another time at each request; the next interruption begins after a 404."""
    service = Lists(b"[]")
    source = source_of(service, clock, [])

    def polled() -> str:
        clock.forward(2)
        said = {"action": "terminate", "time": f"{clock.now():%Y-%m-%dT%H:%M:%SZ}", "noticeTime": None}
        service.said[path] = json.dumps(said | {"noticeTime": said["time"]}).encode()
        (notice,) = source.poll(clock.now())
        return notice.id

    ids = {polled() for _ in range(3)}
    assert len(ids) == 1
    service.said[path] = 404
    assert source.poll(clock.now()) == ()
    assert polled() not in ids


RECOMMENDED = b'{"noticeTime": "2026-01-31T12:00:00Z"}'


@pytest.mark.parametrize(
    "listed",
    [
        429,
        500,
        b"{}",
        b"[[]]",
        b'[{"EventId": "e-1", "Code": "system-reboot", "NotBefore": "31 Jan 2026 12:05:00 GMT"}]',
        b'[{"EventId": "e-1", "Code": "system-reboot", "State": "active", "NotBefore": "soon"}]',
        b'[{"EventId": 7, "Code": "system-reboot", "State": "active", "NotBefore": "31 Jan 2026 12:05:00 GMT"}]',
    ],
)
def test_unknown_maintenance_is_counted(clock, caplog, listed):
    """It hides no other notice."""
    errors: list[str] = []
    service = Lists(listed)
    source = source_of(service, clock, errors)
    assert [source.poll(clock.now()) for _ in range(3)] == [()] * 3
    assert errors == [AWS] * 3
    assert len(caplog.records) == 1
    service.said[REBALANCE_PATH] = RECOMMENDED
    assert [notice.action for notice in source.poll(clock.now())] == ["rebalance"]


@pytest.mark.parametrize("recommended", [429, 500, b"{}"])
def test_unknown_recommendation_is_counted(clock, recommended):
    """It hides no maintenance."""
    errors: list[str] = []
    service = Lists(b"[" + GOOD + b"]")
    service.said[REBALANCE_PATH] = recommended
    assert [notice.action for notice in source_of(service, clock, errors).poll(clock.now())] == ["reboot"]
    assert errors == [AWS]


def test_announced_maintenance_holds_without_an_answer(clock):
    service = Lists(b"[" + GOOD + b"]")
    source = source_of(service, clock, [])
    assert source.poll(clock.now())
    service.said[MAINTENANCE_PATH] = 500
    clock.forward(60)
    assert [notice.action for notice in source.poll(clock.now())] == ["reboot"]


def test_amazon_is_known_by_its_token(clock):
    service = Lists(b"[]")
    service.said[SPOT_PATH] = 500
    source = source_of(service, clock, [])
    assert not source.known
    with pytest.raises(SidecarError):
        source.poll(clock.now())
    assert source.known


def test_an_entry_that_cannot_be_read_hides_no_other(clock):
    source = AwsSource(Lists(b"[{}, " + GOOD + b"]"), clock.monotonic, checkpoint_deadline=25.0)
    assert [notice.id for notice in source.poll(clock.now())] == ["aws-maintenance-e-1"]


@pytest.mark.parametrize("state", ["completed", "canceled"])
def test_maintenance_that_is_over_is_none(clock, state):
    body = b"[" + GOOD.replace(b"active", state.encode()) + b"]"
    assert AwsSource(Lists(body), clock.monotonic, checkpoint_deadline=25.0).poll(clock.now()) == ()
