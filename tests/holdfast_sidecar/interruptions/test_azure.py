"""Azure: which events are this machine's, which are near, and when one is approved."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError
from holdfast_sidecar.interruptions.azure import EVENTS_PATH, NAME_PATH, AzureSource
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.runtime.clock import SystemClock
from holdfast_sidecar.runtime.http import Connection, Response
from holdfast_testbed.fakes.metadata import AZURE

ME, NEIGHBOUR = "gpt-node_1", "gpt-node_2"


class Commits:
    """Ids of the notices whose commit is made."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def __call__(self, notice_id: str) -> bool:
        return notice_id in self.made


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture
def source(sky, commits) -> AzureSource:
    connection = Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10)
    return AzureSource(connection, checkpoint_deadline=25.0, committed=commits)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Preempt", ("preempt", True)),
        ("Terminate", ("terminate", True)),
        ("Redeploy", ("redeploy", True)),
        ("Reboot", ("reboot", True)),
        ("Freeze", ("freeze", False)),
    ],
)
def test_each_event_is_a_notice_with_its_time(source, sky, clock, kind, expected):
    event = sky.announce(AZURE, kind, seconds=20)
    (notice,) = source.poll(clock.now())
    assert (notice.id, (notice.action, notice.drain)) == (f"azure-{event.id}", expected)
    assert (notice.reason, notice.deadline) == (f"scheduledevents {kind}", clock.now() + timedelta(seconds=20))


def test_another_machines_event_is_none_of_ours(source, sky, clock, commits):
    event = sky.announce(AZURE, resources=(NEIGHBOUR,))
    commits.made.add(f"azure-{event.id}")
    assert source.poll(clock.now()) == ()
    assert sky.azure.approved == []


def test_an_event_of_several_machines_is_ours_too(source, sky, clock):
    sky.announce(AZURE, resources=(NEIGHBOUR, ME.upper()))
    assert [notice.action for notice in source.poll(clock.now())] == ["preempt"]


def test_the_machines_name_is_asked_for_once(source, sky, clock):
    for _ in range(3):
        source.poll(clock.now())
    assert len(sky.asked(NAME_PATH)) == 1
    assert len(sky.asked(EVENTS_PATH)) == 3


def test_distant_event_waits_until_it_is_near(source, sky, clock):
    sky.announce(AZURE, "Redeploy", seconds=7 * 86400)
    assert source.poll(clock.now()) == ()
    clock.forward(7 * 86400 - 899)
    assert [notice.action for notice in source.poll(clock.now())] == ["redeploy"]


def test_a_pause_is_prepared_for_right_before_it(source, sky, clock):
    sky.announce(AZURE, "Freeze", seconds=900, duration=5)
    assert source.poll(clock.now()) == ()
    clock.forward(880)
    assert [notice.action for notice in source.poll(clock.now())] == ["freeze"]


def test_harmless_or_begun_freeze_is_no_notice(source, sky, clock):
    sky.announce(AZURE, "Freeze", seconds=10, duration=0)
    sky.announce(AZURE, "Freeze", seconds=-1, duration=5)
    assert source.poll(clock.now()) == ()


def test_a_repair_that_began_without_notice_is_still_one(source, sky, clock):
    sky.announce(AZURE, "Reboot", seconds=0)
    (notice,) = source.poll(clock.now())
    assert (notice.drain, notice.reason) == (True, "scheduledevents Reboot started")
    assert notice.deadline == clock.now() + timedelta(seconds=25)


def test_of_two_at_once_the_interruption_stands_alone(source, sky, clock):
    sky.announce(AZURE, "Freeze", seconds=10)
    sky.announce(AZURE, "Reboot", seconds=600)
    sky.announce(AZURE, "Preempt", seconds=30)
    assert [notice.action for notice in source.poll(clock.now())] == ["preempt"]


def test_two_pauses_are_two_notices(source, sky, clock):
    events = [sky.announce(AZURE, "Freeze", seconds=seconds) for seconds in (10, 20)]
    assert [notice.id for notice in source.poll(clock.now())] == [f"azure-{event.id}" for event in events]


def test_the_first_answer_may_take_its_time(sky, clock, monkeypatch):
    """Azure enables Scheduled Events by the first request, and answers that one late."""
    sky.azure.first_answer_seconds = 1.0
    connection = Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10)

    class KnowsTheName:
        """Only the events are asked for over the network, so that nothing else is in haste."""

        def request(self, method: str, path: str, **more: Any) -> Response:
            if path.startswith(NAME_PATH):
                return Response(status=200, headers={}, body=ME.encode())
            return connection.request(method, path, **more)

    monkeypatch.setattr(c, "METADATA_TIMEOUT_SECONDS", 0.3)
    source = AzureSource(KnowsTheName(), checkpoint_deadline=25.0)
    sky.announce(AZURE)
    assert [notice.action for notice in source.poll(clock.now())] == ["preempt"]


# Approval --------------------------------------------------------------------------------------------------------


def test_an_event_is_approved_once_its_commit_is_made(source, sky, clock, commits):
    event = sky.announce(AZURE, seconds=300)
    source.poll(clock.now())
    assert sky.azure.approved == []
    commits.made.add(f"azure-{event.id}")
    for _ in range(3):
        source.poll(clock.now())
    assert sky.azure.approved == [event.id]
    assert len(sky.asked(EVENTS_PATH, "POST")) == 1


def test_an_event_that_others_share_is_never_approved_for_them(source, sky, clock, commits):
    event = sky.announce(AZURE, seconds=300, resources=(ME, NEIGHBOUR))
    commits.made.add(f"azure-{event.id}")
    assert source.poll(clock.now())
    assert sky.azure.approved == []


def test_an_event_that_has_begun_needs_no_approval(source, sky, clock, commits):
    event = sky.announce(AZURE, seconds=0)
    commits.made.add(f"azure-{event.id}")
    assert source.poll(clock.now())
    assert sky.asked(EVENTS_PATH, "POST") == []


class Refusing:
    """Passes requests on, but no approval."""

    def __init__(self, transport: Connection) -> None:
        self._transport = transport
        self.refuses = True

    def request(self, method: str, path: str, **more: Any) -> Response:
        if method == "POST" and self.refuses:
            return Response(status=500, headers={}, body=b"")
        return self._transport.request(method, path, **more)


def test_refused_approval_is_repeated_and_logged_once(sky, clock, commits, caplog):
    """It hides no notice."""
    transport = Refusing(Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10))
    source = AzureSource(transport, checkpoint_deadline=25.0, committed=commits)
    event = sky.announce(AZURE, seconds=300)
    commits.made.add(f"azure-{event.id}")
    for _ in range(3):
        assert [notice.id for notice in source.poll(clock.now())] == [f"azure-{event.id}"]
    assert caplog.text.count("is not approved") == 1
    transport.refuses = False
    source.poll(clock.now())
    assert sky.azure.approved == [event.id]


def test_late_preemption_has_the_remaining_time(sky, clock, run_dir: Path):
    """Azure kills at `NotBefore`, whatever time the job's checkpoint deadline asks for."""
    ledger = NoticeLedger(run_dir)
    connection = Connection(sky.url, SystemClock().monotonic, max_bytes=64 << 10)
    source = AzureSource(connection, checkpoint_deadline=25.0, committed=ledger.committed)
    event = sky.announce(AZURE, "Preempt", seconds=28)
    clock.forward(12)
    (notice,) = source.poll(clock.now())
    assert (notice.drain, notice.deadline - clock.now()) == (True, timedelta(seconds=16))

    ledger.publish(notice)
    source.poll(clock.now())
    assert sky.azure.approved == [], "the commit that was asked for is not made yet"
    (run_dir / "emergency_checkpoint.ack").write_text(
        json.dumps({"version": 1, "id": notice.id, "result": "Committed"})
    )
    source.poll(clock.now())
    assert sky.azure.approved == [event.id]


# Documents -------------------------------------------------------------------------------------------------------


class Says:
    """A service with a document that the test writes."""

    def __init__(self, *entries: object, name: bytes = ME.encode()) -> None:
        self.bodies = {NAME_PATH: name, EVENTS_PATH: json.dumps({"Events": entries}).encode()}

    def request(self, method: str, path: str, **_: object) -> Response:
        return Response(status=200, headers={}, body=self.bodies[path.partition("?")[0]])


def entry(**changes: object) -> dict[str, object]:
    return {
        "EventId": "A1",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "Resources": [ME],
        "NotBefore": "Sat, 31 Jan 2026 12:00:30 GMT",
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"EventId": None},
        {"EventId": ""},
        {"EventId": "x" * 200},
        {"EventType": "Dance"},
        {"EventStatus": "Perhaps"},
        {"Resources": ME},
        {"Resources": [7]},
        {"NotBefore": "soon"},
    ],
)
def test_an_event_of_another_form_is_an_error_and_hides_no_other(clock, changes):
    with pytest.raises(SidecarError):
        AzureSource(Says(entry(**changes)), checkpoint_deadline=25.0).poll(clock.now())
    both = AzureSource(Says(entry(**changes), entry(EventId="B2")), checkpoint_deadline=25.0)
    assert [notice.id for notice in both.poll(clock.now())] == ["azure-B2"]


def test_each_pause_is_one_save_and_never_a_drain(clock, run_dir: Path):
    service, ledger = Says(), NoticeLedger(run_dir)
    source = AzureSource(service, checkpoint_deadline=25.0, committed=ledger.committed)

    def asked_for(polls: int = 1, **changes: object) -> list[tuple[str, bool]]:
        service.bodies[EVENTS_PATH] = json.dumps({"Events": [pause | changes, reboot_elsewhere]}).encode()
        found = []
        for _ in range(polls):
            found += [(notice.id, notice.drain) for notice in source.poll(clock.now()) if ledger.publish(notice)]
            clock.forward(300)
        return found

    pause = entry(EventType="Freeze", Resources=[ME.upper()], DurationInSeconds=-1)
    pause["NotBefore"] = "Sat, 31 Jan 2026 12:00:09 GMT"
    reboot_elsewhere = entry(EventId="C3", EventType="Reboot", Resources=[NEIGHBOUR])
    assert asked_for() == [("azure-A1", False)]
    assert asked_for(polls=24, EventStatus="Started", NotBefore="") == [], "two hours of a pause that has begun"
    assert asked_for(EventId="B2", NotBefore="Sat, 31 Jan 2026 14:05:09 GMT") == [("azure-B2", False)]


def test_another_machines_event_may_have_any_form(clock):
    assert AzureSource(Says({"Resources": [NEIGHBOUR]}), checkpoint_deadline=25.0).poll(clock.now()) == ()


@pytest.mark.parametrize("name", [b"", b"<html>log in</html>", b"\xff", b"x" * 200])
def test_without_the_machines_name_nothing_is_taken_for_ours(clock, name):
    with pytest.raises(SidecarError):
        AzureSource(Says(entry(Resources=[""]), name=name), checkpoint_deadline=25.0).poll(clock.now())


def test_azure_is_known_by_the_machines_name(clock):
    service = Says()
    service.bodies[EVENTS_PATH] = b"busy"
    source = AzureSource(service, checkpoint_deadline=25.0)
    assert not source.known
    with pytest.raises(SidecarError):
        source.poll(clock.now())
    assert source.known
