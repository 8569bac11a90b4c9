"""One kind of error of one GPU, as the report holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import Document, format_time, parse_time


@dataclass(frozen=True, kw_only=True)
class GpuError:
    """An error of one of this pod's GPUs: one per GPU, kind and XID, however often it occurs."""

    gpu: str
    """Its UUID."""
    index: int | None
    """Its number on the node, as the exporter counts."""
    kind: str
    xid: int | None
    count: int
    cause: str
    action: str
    message: str
    first: datetime
    last: datetime

    def as_report(self) -> Document:
        """One entry of `report.gpu`."""
        return {
            "gpu": self.gpu,
            "index": self.index,
            "kind": self.kind,
            "xid": self.xid,
            "count": self.count,
            "cause": self.cause,
            "action": self.action,
            "message": self.message,
            "firstTime": format_time(self.first),
            "lastTime": format_time(self.last),
        }

    @staticmethod
    def from_report(entry: Mapping[str, Any]) -> "GpuError":
        """The reverse of `as_report`."""
        try:
            return GpuError(
                gpu=str(entry["gpu"]),
                index=None if entry["index"] is None else int(entry["index"]),
                kind=str(entry["kind"]),
                xid=None if entry["xid"] is None else int(entry["xid"]),
                count=int(entry["count"]),
                cause=str(entry["cause"]),
                action=str(entry["action"]),
                message=str(entry["message"]),
                first=parse_time(str(entry["firstTime"])),
                last=parse_time(str(entry["lastTime"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedError(f"a GPU error lacks {error}") from error
