"""GCP Compute Engine: preemption and host maintenance, from the metadata server.

Each poll sends one request that the server holds until `preempted` changes (at most `hold` seconds), and one for
`maintenance-event`. GKE's own metadata server, which Workload Identity places in front of a pod, has neither key.
"""

import re
from datetime import datetime, timedelta

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError, SourceError
from holdfast_sidecar.interruptions.metadata import OnError, OptionalEndpoint, actionable
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.runtime.http import Response, Transport

PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR_HEADER = "metadata-flavor"
FLAVOR = "Google"
_NO_ETAG = "0"
"""An ETag that no value has, so the server answers at once."""
_ETAG = re.compile(r"[0-9A-Za-z_.-]{1,128}")
_TERMINATIONS = frozenset({"TERMINATE_ON_HOST_MAINTENANCE", "SHUTDOWN_ON_HOST_MAINTENANCE"})
_MIGRATION = "MIGRATE_ON_HOST_MAINTENANCE"
_NOTHING = "NONE"


class GcpSource:
    """Requests the preemption first. If there is one, maintenance does not matter."""

    name = c.PROVIDER_GCP

    def __init__(
        self,
        transport: Transport,
        *,
        checkpoint_deadline: float,
        hold: int,
        gpus: bool = False,
        on_error: OnError = lambda _: None,
    ) -> None:
        self.longest = hold + 3 * c.METADATA_TIMEOUT_SECONDS
        self._transport = transport
        self._checkpoint_deadline = timedelta(seconds=checkpoint_deadline)
        self._hold = hold
        self._etag = _NO_ETAG
        self._notice_given = timedelta(seconds=c.GCP_GPU_MAINTENANCE_SECONDS if gpus else 0)
        self._event = _NOTHING
        self._stayed_at: datetime | None = None
        """The time of the last answer without a termination. A later termination was announced after it."""
        self._migrates_since: datetime | None = None
        self._host = OptionalEndpoint(self.name, MAINTENANCE_PATH, on_error)
        self.known = False

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        """Return the preemption, else the maintenance."""
        if self._preempted():
            lead = timedelta(seconds=c.GCP_PREEMPTION_SECONDS)
            return (self._notice("gcp-preempted", "instance/preempted", "preempt", now + lead, now),)
        with self._host.question():
            self._event = self._maintenance_event()
            self._stayed_at = self._stayed_at if self._event in _TERMINATIONS else now
        return self._maintenance(self._event, now)

    def _maintenance(self, event: str, now: datetime) -> tuple[Notice, ...]:
        reason = f"instance/maintenance-event {event}"
        if event in _TERMINATIONS:
            notice = self._notice("gcp-terminate-on-host-maintenance", reason, "terminate", self._stops(now), now)
            return actionable((notice,), now, self._checkpoint_deadline)
        if event != _MIGRATION:
            self._migrates_since = None
            return ()
        self._migrates_since = since = self._migrates_since or now
        name = f"gcp-migrate-{since:%Y-%m-%dT%H:%M:%SZ}"
        return (self._notice(name, reason, "migrate", since + self._checkpoint_deadline, now),)

    def _stops(self, now: datetime) -> datetime:
        """Return the deadline. If the first answer already has the announcement, it may be old."""
        soonest = now + timedelta(seconds=c.GCP_MAINTENANCE_SECONDS)
        return soonest if self._stayed_at is None else max(soonest, self._stayed_at + self._notice_given)

    def _notice(self, name: str, reason: str, action: str, deadline: datetime, now: datetime) -> Notice:
        return Notice(id=name, reason=reason, source=self.name, action=action, deadline=deadline, observed_at=now)

    def _preempted(self) -> bool:
        """Request the value if it is not known, and then wait for its next change."""
        return (self._etag == _NO_ETAG and self._ask_preempted()) or self._ask_preempted()

    def _ask_preempted(self) -> bool:
        wait = f"?wait_for_change=true&timeout_sec={self._hold}&last_etag={self._etag}"
        held = self._hold if self._etag != _NO_ETAG else 0
        try:
            response = self._get(PREEMPTED_PATH + wait, held)
        except SidecarError:
            self._etag = _NO_ETAG  # after an error, request the value itself and not its next change
            raise
        value = response.body.decode("latin-1").strip()
        if response.status != 200 or value not in ("TRUE", "FALSE"):
            self._etag = _NO_ETAG
            raise SourceError(f"{PREEMPTED_PATH} answered {response.status} {value[:40]!r}")
        etag = response.headers.get("etag", "")
        self._etag = etag if _ETAG.fullmatch(etag) else _NO_ETAG
        return value == "TRUE"

    def _maintenance_event(self) -> str:
        response = self._get(MAINTENANCE_PATH, 0)
        if response.status == 404:
            return _NOTHING
        event = response.body.decode("latin-1").strip()
        if response.status != 200 or event not in (_NOTHING, _MIGRATION, *_TERMINATIONS):
            raise SourceError(f"{MAINTENANCE_PATH} answered {response.status} {event[:40]!r}")
        return event

    def _get(self, path: str, held: int) -> Response:
        """Whether Google's metadata server sent the answer, and not a proxy."""
        timeout = held + c.METADATA_TIMEOUT_SECONDS
        headers = {"Metadata-Flavor": FLAVOR}
        response = self._transport.request("GET", path, headers=headers, body=None, timeout=timeout)
        if response.headers.get(FLAVOR_HEADER) != FLAVOR:
            raise SourceError(
                f"{path.partition('?')[0]} answered {response.status}, and not Google's metadata server"
            )
        self.known = self.known or response.status != 404
        return response
