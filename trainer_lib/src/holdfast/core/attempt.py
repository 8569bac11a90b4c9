"""The attempt ID that names a world, and the claim with which an attempt may save. Pure; for launcher and
checkpoints.

All worlds of a job are ordered by their attempt ID (generation, attempt). Wire forms: `docs/reference/protocol.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import DocumentError, VersionError
from holdfast.core.protocol import PROTOCOL_VERSION

Json = Mapping[str, Any]


def check_version(document: Json, what: str) -> None:
    """Raise `VersionError` if this release does not know the document's version. `what` names the document."""
    version = document.get("version")
    if version != PROTOCOL_VERSION:
        raise VersionError(f"{what} has version {version!r}; this release reads version {PROTOCOL_VERSION}")


@dataclass(frozen=True, order=True)
class AttemptId:
    """The attempt ID (generation, attempt). The order of attempt IDs is the order of worlds."""

    generation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"

    def to_json(self) -> dict[str, Any]:
        return {"generation": self.generation, "attempt": self.attempt}

    @classmethod
    def from_json(cls, value: Json) -> AttemptId:
        try:
            return cls(int(value["generation"]), int(value["attempt"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DocumentError(f"not an attempt ID: {value!r}") from error

    @classmethod
    def from_optional(cls, value: Json | None) -> AttemptId | None:
        """Parse an attempt ID that may be null."""
        return None if value is None else cls.from_json(value)


def highest(*attempt_ids: AttemptId | None) -> AttemptId | None:
    """Return the highest of some attempt IDs, each of which may be None."""
    return max((attempt_id for attempt_id in attempt_ids if attempt_id is not None), default=None)


@dataclass(frozen=True, kw_only=True, order=True)
class Claim:
    """An attempt's right to save checkpoints: the line of everything older than `attempt_id` ends at `from_step` of
    `from_attempt_id`.
    """

    attempt_id: AttemptId
    job_uid: str
    publication: str
    from_step: int
    from_attempt_id: AttemptId | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the wire form (`claim.json`)."""
        return {
            "version": PROTOCOL_VERSION,
            "jobUID": self.job_uid,
            "publication": self.publication,
            **self.attempt_id.to_json(),
            "fromStep": self.from_step,
            "fromPair": None if self.from_attempt_id is None else self.from_attempt_id.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json) -> Claim:
        check_version(value, "a claim")
        try:
            return cls(
                attempt_id=AttemptId.from_json(value),
                job_uid=str(value["jobUID"]),
                publication=str(value["publication"]),
                from_step=int(value["fromStep"]),
                from_attempt_id=AttemptId.from_optional(value.get("fromPair")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DocumentError(f"not a claim: {value!r}") from error
