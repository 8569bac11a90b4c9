"""Counts one exhaustion of a container's memory as one incident, however many processes the kernel kills. Pure.

The kernel kills one process after the other until enough memory is free: a rank, the standby process that replaced
it, the launcher. Each kill may end an attempt, and the launchers that waited report only lost peers.

Invariant: no exhaustion lasts longer than `SPAN`. If a script fills its memory repeatedly, it counts repeatedly and
exceeds its budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.messages import Failure, Incident, Priority

# Below the default pause before a retry of a script that ran out of memory.
GAP = 5.0
SPAN = 10.0


@dataclass(frozen=True, kw_only=True)
class Exhaustion:
    """The newest exhaustion: the pod, the attempts that it ended, and its first and last time."""

    pod: str
    ends: tuple[AttemptId, ...]
    began: float
    last: float

    def takes(self, incident: Incident) -> bool:
        """Whether this end of an attempt belongs to the exhaustion."""
        soon = incident.detected < min(self.last + GAP, self.began + SPAN)  # times of the reporting launchers
        return soon and incident.attempt_id > self.ends[-1] and _may_result_from(incident.failure, self.pod)

    def counted_with(self, attempt_id: AttemptId) -> AttemptId | None:
        """Return the attempt with which this attempt's end is counted; None if it is the first, or unrelated."""
        return self.ends[0] if attempt_id in self.ends[1:] else None


def _may_result_from(failure: Failure, pod: str) -> bool:
    """Whether a failure may result from the exhaustion: an unrequested failure of that pod, or only a lost peer."""
    if failure.cause in (Cause.INTERRUPTION, Cause.APPLICATION):
        return False
    return failure.priority is Priority.PEER_LOST or failure.pod == pod


def noted(known: Exhaustion | None, incident: Incident) -> Exhaustion | None:
    """Return the newest exhaustion after this incident; the known one if it already includes the incident."""
    if known is not None and (incident.attempt_id in known.ends or incident.attempt_id < known.ends[0]):
        return known
    if known is not None and known.takes(incident):
        return replace(known, ends=(*known.ends, incident.attempt_id), last=max(known.last, incident.detected))
    if incident.failure.priority is not Priority.OOM:
        return known
    failure, at = incident.failure, incident.detected
    return Exhaustion(pod=failure.pod, ends=(incident.attempt_id,), began=at, last=at)


def better(known: Failure | None, told: Failure) -> Failure:
    """Return the newer of two failures of one attempt, unless it is a lost peer and the known one is a kill."""
    peer_lost_over_oom = told.priority is Priority.PEER_LOST and known is not None and known.priority is Priority.OOM
    return known if known is not None and peer_lost_over_oom else told
