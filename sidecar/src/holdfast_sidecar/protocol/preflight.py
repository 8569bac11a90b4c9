"""The results of the preflight checks, and the peers that the operator names for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import Document, parse_document

RUNNING = "Running"
BLAME_JOB = "Job"
PASSED = "Passed"
FAILED = "Failed"
SKIPPED = "Skipped"


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one preflight check."""

    name: str
    result: str
    """`Running`, `Passed`, `Failed` or `Skipped`."""
    message: str
    unreached: tuple[str, ...] = ()
    """UIDs of the pods that the check `Network` does not reach."""
    blame: str = ""
    """`Job` if the job's own settings caused the failure on any node."""

    def as_report(self) -> Document:
        """One entry of `report.preflight.checks`."""
        entry: Document = {"name": self.name, "result": self.result, "message": self.message}
        if self.unreached:
            entry["unreached"] = list(self.unreached)
        if self.blame:
            entry["blame"] = self.blame
        return entry


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The results of all checks."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check is running or has failed."""
        return all(check.result in (PASSED, SKIPPED) for check in self.checks)

    def as_report(self) -> Document:
        """`report.preflight`."""
        return {"checks": [check.as_report() for check in self.checks]}

    @staticmethod
    def from_report(value: Mapping[str, Any]) -> "Preflight":
        """The reverse of `as_report`."""
        try:
            checks = [
                Check(
                    name=str(one["name"]),
                    result=str(one["result"]),
                    message=str(one["message"]),
                    unreached=tuple(map(str, one.get("unreached", ()))),
                    blame=str(one.get("blame", "")),
                )
                for one in value["checks"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise MalformedError(f"a preflight lacks {error}") from error
        return Preflight(checks=tuple(checks))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another worker of the job, and where its launcher listens."""

    pod: str
    uid: str
    ip: str
    port: int


def answered_peers(data: bytes) -> tuple[Peer, ...] | None:
    """Return the peers in the answer to a report; None if it has none."""
    peers = parse_document(data, "the report's answer").get("peers")
    if not isinstance(peers, list):
        return None
    try:
        found = [
            Peer(pod=str(one["pod"]), uid=str(one["podUID"]), ip=str(one["ip"]), port=int(one["port"]))
            for one in peers
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"a peer lacks {error}") from error
    return tuple(found)
