"""The announced event of an instance, in the cloud's format."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from holdfast_testbed.errors import NoSuchEventError

AWS, GCP, AZURE = "AWS", "GCP", "Azure"
CLOUDS = (AWS, GCP, AZURE)

SPOT_ACTIONS = ("terminate", "stop", "hibernate")
REBALANCE = "rebalance"
MAINTENANCE_CODES = (
    "instance-stop",
    "instance-retirement",
    "instance-reboot",
    "system-reboot",
    "system-maintenance",
)
PREEMPTED = "preempted"
HOST_MAINTENANCE = ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE")
KINDS = {
    AWS: (*SPOT_ACTIONS, REBALANCE, *MAINTENANCE_CODES),
    GCP: (PREEMPTED, *HOST_MAINTENANCE),
    AZURE: ("Preempt", "Terminate", "Redeploy", "Reboot", "Freeze"),
}
PREEMPTION = {AWS: "terminate", GCP: PREEMPTED, AZURE: "Preempt"}
"""The kind of event with which each cloud ends a spot instance."""
NOTICE_SECONDS = {AWS: 120.0, GCP: 30.0, AZURE: 30.0}
"""The time between the announcement and the event."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One announcement. Times are RFC 3339."""

    id: str
    kind: str
    at: str
    announced: str
    resources: tuple[str, ...] = ()
    """The machines that the event concerns, if the cloud names them; empty: this one."""
    duration: int = -1
    """Seconds, if the cloud reports them; -1: unknown."""

    @property
    def when(self) -> datetime:
        return datetime.fromisoformat(self.at)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """An instance and all its announcements."""

    instance_id: str
    cloud: str = AWS
    events: tuple[Event, ...] = ()
    fault: str = ""
    """The fault of each answer: a status code or one of `FAULTS`."""
    clock_ahead_seconds: float = 0.0
    """The lead of the cloud's clock over the machine's."""
    tokens: int = 0
    """The generation of valid session tokens (AWS). Tokens of another generation are not valid."""

    def clock(self, now: datetime) -> datetime:
        """Return the cloud's time."""
        return now + timedelta(seconds=self.clock_ahead_seconds)

    def of(self, *kinds: str) -> Event | None:
        """Return the newest event of one of these kinds."""
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def announce(
        self,
        kind: str,
        *,
        now: datetime,
        seconds: float,
        resources: tuple[str, ...] = (),
        duration: int = -1,
        identity: str = "",
    ) -> Announcement:
        """Return a copy with one more event, `seconds` from now. It replaces an older one with the same identity."""
        if kind not in KINDS[self.cloud]:
            raise NoSuchEventError(
                f"{self.cloud} has no event {kind!r}: expected one of {', '.join(KINDS[self.cloud])}"
            )
        event = Event(
            id=identity or str(uuid.uuid4()).upper(),
            kind=kind,
            at=_stamp(now + timedelta(seconds=seconds)),
            announced=_stamp(now),
            resources=resources,
            duration=duration,
        )
        return replace(self, events=(*(other for other in self.events if other.id != identity), event))

    def withdraw(self) -> Announcement:
        """Return a copy without announcements."""
        return replace(self, events=())

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Announcement:
        """Read the file."""
        said = json.loads(path.read_text())
        events = tuple(Event(**{**event, "resources": tuple(event["resources"])}) for event in said.pop("events"))
        return cls(**said, events=events)


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
