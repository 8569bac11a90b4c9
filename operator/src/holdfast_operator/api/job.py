"""The resource as a frozen dataclass: the user's spec, and the status that the operator wrote before.

Parsing rejects what this version does not support and names the field (``UnreadableError``). The API server's schema
rejects most of it earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.spec import JobSpec, parse_spec
from holdfast_operator.api.times import parse_time
from holdfast_operator.errors import UnreadableError


@dataclass(frozen=True, kw_only=True)
class Job:
    """One resource as read: identity, spec and status."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: datetime
    deleting: bool = False
    spec: JobSpec | None = None
    unreadable: str = ""
    raw_status: Json = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(body: Json) -> str:
    """Return ``namespace/name`` of a job from the API's JSON."""
    return f"{body['metadata'].get('namespace', '')}/{body['metadata']['name']}"


def parse_job(body: Json) -> Job:
    """Parse a resource. It never raises: if the spec cannot be read, ``unreadable`` is the reason."""
    meta = body.get("metadata") or {}
    spec: JobSpec | None = None
    unreadable = str(body.get("unread") or "")  # set by ``slim_job``
    try:
        spec = None if body.get("unread") else parse_spec(body.get("spec"))
    except UnreadableError as error:
        unreadable = str(error)
    raw_status = body.get("status")
    return Job(
        namespace=str(meta.get("namespace", "")),
        name=str(meta.get("name", "")),
        uid=str(meta.get("uid", "")),
        generation=int(meta.get("generation") or 0),
        resource_version=str(meta.get("resourceVersion", "")),
        created=parse_time(meta.get("creationTimestamp")) or datetime.fromtimestamp(0, UTC),
        deleting=bool(meta.get("deletionTimestamp")),
        spec=spec,
        unreadable=unreadable,
        raw_status=raw_status if isinstance(raw_status, Mapping) else {},
    )
