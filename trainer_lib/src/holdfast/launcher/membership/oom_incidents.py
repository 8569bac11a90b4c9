"""One exhaustion of a container's memory is one incident, however many of its processes the kernel ends. Pure.

The kernel ends one process after the other until enough memory is free: a rank, the warm process that took its place,
the launcher. Each of them may end an attempt, and whoever waited for them tells of lost peers only.

Invariant: no exhaustion lasts longer than `SPAN`, so a script that fills its memory time and again is counted time
and again, and its budget ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.messages import Failure, Incident, Priority

# Below the default pause before a script that ran out of memory is tried again.
GAP = 5.0
SPAN = 10.0


@dataclass(frozen=True, kw_only=True)
class Exhaustion:
    """The newest one: whose memory, the attempts that it ended, and when it began and showed last."""

    pod: str
    ends: tuple[AttemptId, ...]
    began: float
    last: float

    def takes(self, incident: Incident) -> bool:
        """Whether this end of an attempt is one more of it."""
        soon = incident.detected < min(self.last + GAP, self.began + SPAN)  # by the clocks of whoever saw it
        return soon and incident.pair > self.ends[-1] and _may_come_of_it(incident.failure, self.pod)

    def whole(self, pair: AttemptId) -> AttemptId | None:
        """Under which pair the end of this attempt is counted, if it is not the first."""
        return self.ends[0] if pair in self.ends[1:] else None


def _may_come_of_it(failure: Failure, pod: str) -> bool:
    """What befell that pod and was nobody's wish, or what nobody knows a better reason for."""
    if failure.cause in (Cause.INTERRUPTION, Cause.APPLICATION):
        return False
    return failure.priority is Priority.PEER_LOST or failure.pod == pod


def noted(known: Exhaustion | None, incident: Incident) -> Exhaustion | None:
    """The newest exhaustion after this incident; the same again for one that it knows."""
    if known is not None and (incident.pair in known.ends or incident.pair < known.ends[0]):
        return known
    if known is not None and known.takes(incident):
        return replace(known, ends=(*known.ends, incident.pair), last=max(known.last, incident.detected))
    if incident.failure.priority is not Priority.OOM:
        return known
    failure, at = incident.failure, incident.detected
    return Exhaustion(pod=failure.pod, ends=(incident.pair,), began=at, last=at)


def better(known: Failure | None, told: Failure) -> Failure:
    """Of two words about one attempt the newer, unless it only misses a peer where the other knows of a kill."""
    blind = told.priority is Priority.PEER_LOST and known is not None and known.priority is Priority.OOM
    return known if known is not None and blind else told
