"""The report to the operator, and the operator's answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_sidecar.constants import VERSION
from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import Document, dump_document, parse_document
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.protocol.preflight import Preflight

SIGNIFICANT = (
    "ready",
    "accepted",
    "started",
    "world",
    "phase",
    "checkpoints",
    "highestClaim",
    "foreignClaims",
    "conflict",
    "quarantined",
    "incidents",
    "notices",
    "lostMembers",
    "exit",
)
"""Fields of `status.json` whose change is reported at once."""


def significant(status: Document | None) -> bytes:
    """Return the part of a status whose change is reported at once."""
    if status is None:
        return b""
    return json.dumps([status.get(field) for field in SIGNIFICANT], sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The pod that this sidecar belongs to."""

    namespace: str
    name: str
    uid: str
    node: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report to the operator. It has the complete state, so the next report makes up for a lost one."""

    start_id: str
    number: int
    pod: Pod
    launcher: Document | None
    launcher_silent_seconds: float
    notices: Sequence[Notice]
    gpu: Sequence[GpuError] = ()
    preflight: Preflight | None = None

    def encode(self) -> bytes:
        """The body of `POST /v1/report`."""
        return dump_document(
            {
                "version": VERSION,
                "sidecar": {"startId": self.start_id, "number": self.number},
                "pod": {
                    "namespace": self.pod.namespace,
                    "name": self.pod.name,
                    "uid": self.pod.uid,
                    "node": self.pod.node,
                },
                "launcher": self.launcher,
                "launcherSilentSeconds": round(self.launcher_silent_seconds, 3),
                "notices": [notice.as_report() for notice in self.notices],
                "gpu": [error.as_report() for error in self.gpu],
                "preflight": None if self.preflight is None else self.preflight.as_report(),
            }
        )


def report_answer(data: bytes) -> int:
    """Return the membership's revision from the answer to a report; 0 without a membership."""
    revision = parse_document(data, "the report's answer").get("revision")
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
        raise MalformedError(f"the report's answer has revision {revision!r}")
    return revision
