"""GCP: the long poll for the preemption, and host maintenance."""

import contextlib
import threading
from datetime import timedelta

import pytest

from holdfast_sidecar.errors import SidecarError
from holdfast_sidecar.interruptions.gcp import MAINTENANCE_PATH, PREEMPTED_PATH, GcpSource
from holdfast_sidecar.runtime.clock import SystemClock
from holdfast_sidecar.runtime.http import Connection, Response
from holdfast_testbed.fakes.metadata import GCP, Instance, MetadataServer


def source_at(url: str, hold: int = 0) -> GcpSource:
    connection = Connection(url, SystemClock().monotonic, max_bytes=64 << 10)
    return GcpSource(connection, checkpoint_deadline=25.0, hold=hold)


@pytest.fixture
def source(sky) -> GcpSource:
    return source_at(sky.url)


def test_a_preemption_is_a_notice_for_the_time_that_gcp_gives(source, sky, clock):
    sky.announce(GCP)
    (notice,) = source.poll(clock.now())
    assert (notice.id, notice.action, notice.reason) == ("gcp-preempted", "preempt", "instance/preempted")
    assert (notice.drain, notice.deadline) == (True, clock.now() + timedelta(seconds=30))


def test_one_request_waits_until_the_preemption_comes(sky, clock, wait):
    source, found = source_at(sky.url, hold=60), []
    waiting = threading.Thread(target=lambda: found.extend(source.poll(clock.now())), daemon=True)
    waiting.start()
    wait(lambda: len(sky.asked(PREEMPTED_PATH)) == 2, "the long poll")
    sky.announce(GCP)
    waiting.join(240)
    assert [notice.id for notice in found] == ["gcp-preempted"]
    assert len(sky.asked(PREEMPTED_PATH)) == 2


def test_first_request_reads_the_value_and_the_next_waits(sky, clock):
    source_at(sky.url, hold=1).poll(clock.now())
    first, second = (request.query for request in sky.asked(PREEMPTED_PATH))
    assert first["last_etag"] == "0"
    assert second["last_etag"] not in ("0", "")
    assert {first["wait_for_change"], second["wait_for_change"]} == {"true"}
    assert second["timeout_sec"] == "1"


def test_after_a_fault_it_asks_for_what_is(source, sky, clock):
    source.poll(clock.now())
    sky.server.fault = "503"
    with pytest.raises(SidecarError):
        source.poll(clock.now())
    sky.server.fault = ""
    source.poll(clock.now())
    assert sky.asked(PREEMPTED_PATH)[-2].query["last_etag"] == "0"


def test_a_machine_that_maintenance_stops_is_left(source, sky, clock):
    sky.announce(GCP, "TERMINATE_ON_HOST_MAINTENANCE")
    (notice,) = source.poll(clock.now())
    assert (notice.id, notice.action, notice.drain) == ("gcp-terminate-on-host-maintenance", "terminate", True)
    assert notice.deadline == clock.now() + timedelta(seconds=60)


def test_a_preemption_stands_alone(source, sky, clock):
    sky.announce(GCP, "TERMINATE_ON_HOST_MAINTENANCE")
    sky.announce(GCP)
    assert [notice.action for notice in source.poll(clock.now())] == ["preempt"]


def test_each_live_migration_asks_for_one_checkpoint(source, sky, clock):
    names = []
    for _ in range(2):
        sky.announce(GCP, "MIGRATE_ON_HOST_MAINTENANCE")
        for _ in range(2):
            (notice,) = source.poll(clock.now())
            assert (notice.action, notice.drain) == ("migrate", False)
            names.append(notice.id)
            clock.forward(5)
        sky.withdraw(GCP)
        assert source.poll(clock.now()) == ()
    assert names[0] == names[1] != names[2] == names[3]


def test_another_clouds_service_is_not_taken_for_googles(sky, clock):
    refused = pytest.raises(SidecarError, match="not Google's metadata server")
    with MetadataServer(Instance(lambda: sky.said["AWS"])) as amazon, refused:
        source_at(amazon.url).poll(clock.now())


class Says:
    """A server whose values or statuses the test sets; what it does not set is not there, as in GKE's own one."""

    def __init__(self, flavor: str = "Google", **values: str | int) -> None:
        self.flavor = flavor
        self.values: dict[str, str | int] = {"preempted": "FALSE", **values}

    def request(self, method: str, path: str, **_: object) -> Response:
        name = path.partition("?")[0].rpartition("/")[2].replace("-", "_")
        value = self.values.get(name, 404)
        status, body = (value, "") if isinstance(value, int) else (200, value)
        return Response(status=status, headers={"metadata-flavor": self.flavor, "etag": "abc"}, body=body.encode())


def source_of(service: Says, errors: list[str] | None = None, *, gpus: bool = False) -> GcpSource:
    counted = [] if errors is None else errors
    return GcpSource(service, checkpoint_deadline=25.0, hold=0, gpus=gpus, on_error=counted.append)


STOPS = "TERMINATE_ON_HOST_MAINTENANCE"


def test_gpu_machine_is_left_a_quarter_hour_before_its_end(clock):
    """The announcement comes an hour ahead."""
    service = Says(maintenance_event="NONE")
    source = source_of(service, gpus=True)
    source.poll(clock.now())
    end = clock.now() + timedelta(hours=1)
    service.values["maintenance_event"] = STOPS
    clock.forward(44 * 60)
    assert source.poll(clock.now()) == ()
    clock.forward(60)
    (notice,) = source.poll(clock.now())
    assert (notice.action, notice.deadline) == ("terminate", end)


def test_what_may_have_been_announced_for_long_is_not_waited_for(clock):
    """The sidecar was started after the announcement."""
    (notice,) = source_of(Says(maintenance_event=STOPS), gpus=True).poll(clock.now())
    assert notice.deadline == clock.now() + timedelta(seconds=60)


def test_hour_starts_with_the_last_answer_without_notice(clock):
    service = Says(maintenance_event="NONE")
    source = source_of(service, gpus=True)
    source.poll(clock.now())
    service.values["maintenance_event"] = 503
    clock.forward(50 * 60)
    assert source.poll(clock.now()) == ()
    service.values["maintenance_event"] = STOPS
    (notice,) = source.poll(clock.now())
    assert notice.deadline == clock.now() + timedelta(minutes=10)


def test_cancelled_maintenance_of_a_gpu_machine_has_no_effect(clock):
    service = Says(maintenance_event="NONE")
    source = source_of(service, gpus=True)
    for event, minutes in (("NONE", 0), (STOPS, 30), ("NONE", 0), (STOPS, 30), (STOPS, 0)):
        service.values["maintenance_event"] = event
        assert source.poll(clock.now()) == ()
        clock.forward(60 * minutes)


def test_machine_without_gpus_is_left_at_once(clock):
    """An earlier announcement that it stays does not matter."""
    service = Says(maintenance_event="NONE")
    source = source_of(service)
    source.poll(clock.now())
    service.values["maintenance_event"] = STOPS
    (notice,) = source.poll(clock.now())
    assert notice.deadline == clock.now() + timedelta(seconds=60)


def test_maintenance_that_is_not_told_here_hides_no_preemption(clock):
    assert source_of(Says()).poll(clock.now()) == ()


@pytest.mark.parametrize("value", ["MAYBE", ""])
def test_a_value_that_is_not_known_is_an_error(clock, value):
    with pytest.raises(SidecarError):
        source_of(Says(preempted=value)).poll(clock.now())


@pytest.mark.parametrize("value", ["PARTY", "", 429, 500])
def test_unknown_maintenance_hides_no_preemption(clock, caplog, value):
    """It is counted."""
    errors: list[str] = []
    service = Says(maintenance_event=value)
    source = source_of(service, errors)
    assert [source.poll(clock.now()) for _ in range(3)] == [()] * 3
    assert errors == [GCP] * 3
    assert caplog.text.count(MAINTENANCE_PATH) == 2, "one line, which names it twice"
    service.values["preempted"] = "TRUE"
    assert [notice.action for notice in source.poll(clock.now())] == ["preempt"]


def test_what_was_said_of_the_host_holds_while_it_says_nothing(clock):
    service = Says(maintenance_event="MIGRATE_ON_HOST_MAINTENANCE")
    source = source_of(service)
    (before,) = source.poll(clock.now())
    service.values["maintenance_event"] = 503
    assert [notice.id for notice in source.poll(clock.now())] == [before.id]


@pytest.mark.parametrize(
    ("service", "known"),
    [
        (Says(), True),
        (Says(preempted=429), True),
        (Says(preempted=503), True),
        (Says(preempted=404), False),
        (Says(flavor="", preempted=503), False),
    ],
)
def test_gcp_is_known_by_any_answer_of_its_server(clock, service, known):
    """GKE's own server is Google's too, and will never know the key."""
    source = source_of(service)
    with contextlib.suppress(SidecarError):
        source.poll(clock.now())
    assert source.known is known


def test_maintenance_is_asked_for_at_each_poll(source, sky, clock):
    """Compute Engine gives no notice to a machine that never asked."""
    source.poll(clock.now())
    assert len(sky.asked(MAINTENANCE_PATH)) == 1
