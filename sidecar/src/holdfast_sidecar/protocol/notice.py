"""An interruption notice in the report, the touch-file and the sidecar's own file."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_sidecar.constants import VERSION
from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import Document, format_time, parse_time

INTERRUPTIONS = frozenset({"terminate", "stop", "hibernate", "preempt", "redeploy", "reboot"})
"""Actions after which the pod is gone, so it drains. Others request only a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An announced event of this pod's machine."""

    id: str
    reason: str
    source: str
    action: str
    deadline: datetime
    """The time of the event. For a notice without a time, the time at which the checkpoint is requested."""
    observed_at: datetime

    @property
    def drain(self) -> bool:
        """Whether the pod must leave and not only save."""
        return self.action in INTERRUPTIONS

    def as_report(self) -> Document:
        """One entry of `report.notices`."""
        return {
            "id": self.id,
            "reason": self.reason,
            "source": self.source,
            "action": self.action,
            "deadline": format_time(self.deadline),
            "observedAt": format_time(self.observed_at),
        }

    def as_request(self) -> Document:
        """The content of `emergency_checkpoint`."""
        return {
            "version": VERSION,
            "id": self.id,
            "reason": self.reason,
            "source": self.source,
            "deadline": format_time(self.deadline),
            "requestedAt": format_time(self.observed_at),
            "drain": self.drain,
        }

    @staticmethod
    def from_report(entry: Mapping[str, Any]) -> "Notice":
        """The reverse of `as_report`."""
        try:
            return Notice(
                id=str(entry["id"]),
                reason=str(entry["reason"]),
                source=str(entry["source"]),
                action=str(entry["action"]),
                deadline=parse_time(str(entry["deadline"])),
                observed_at=parse_time(str(entry["observedAt"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedError(f"a notice lacks {error}") from error
