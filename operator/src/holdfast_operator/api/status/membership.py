"""The published generation as launchers receive it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.json import Json, part
from holdfast_operator.api.status.json_fields import FLAT, JsonFields, stored


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker's entry in a generation."""

    index: int
    pod: str
    pod_uid: str
    ip: str
    store: int
    control: int
    node: str

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "pod": self.pod,
            "podUID": self.pod_uid,
            "ip": self.ip,
            "ports": {"store": self.store, "control": self.control},
            "node": self.node,
        }

    @classmethod
    def from_json(cls, value: Json) -> Member:
        ports = part(value, "ports")
        return cls(
            index=int(value["index"]),
            pod=str(value.get("pod", "")),
            pod_uid=str(value["podUID"]),
            ip=str(value.get("ip", "")),
            store=int(ports.get("store", c.PORT_STORE)),
            control=int(ports.get("control", c.PORT_CONTROL)),
            node=str(value.get("node", "")),
        )


@dataclass(frozen=True, kw_only=True)
class Claim(JsonFields):
    """The right of an attempt to publish checkpoints, as its launcher wrote it into the checkpoint folder."""

    attempt_id: AttemptId = stored(FLAT)
    job_uid: str = stored("jobUID", missing="")
    publication: str = stored("publication", missing="")
    from_step: int = stored("fromStep", missing=0)
    from_attempt_id: AttemptId | None = stored("fromPair", default=None)

    @property
    def order(self) -> tuple[AttemptId, str, str, int, str]:
        return self.attempt_id, self.job_uid, self.publication, self.from_step, str(self.from_attempt_id or "")

    def to_json(self) -> dict[str, Any]:
        return {"version": c.PROTOCOL_VERSION, **super().to_json()}


@dataclass(frozen=True, kw_only=True)
class EarlierGeneration(JsonFields):
    """An earlier generation that may still have a world; with ``through``, a range of numbers never published."""

    SPARSE = True

    generation: int
    publication: str = stored("publication", missing="")
    members: tuple[str, ...] = stored("members", missing=())
    through: int | None = None

    @property
    def last(self) -> int:
        """The highest generation of this entry."""
        return self.generation if self.through is None else self.through


@dataclass(frozen=True, kw_only=True)
class Membership(JsonFields):
    """The published generation, and everything that launchers need to check it."""

    revision: int = 0
    generation: int = 0
    publication: str = ""
    active: AttemptId | None = None
    previous: tuple[EarlierGeneration, ...] = ()
    gone: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    members: tuple[Member, ...] = ()
    acknowledged: tuple[AttemptId, ...] = ()
    checkpoint: Json | None = field(default=None, hash=False)
    drain: tuple[str, ...] = ()

    def member_uids(self) -> tuple[str, ...]:
        """Return the pod UIDs in order of index."""
        return tuple(member.pod_uid for member in sorted(self.members, key=lambda member: member.index))

    def named(self) -> frozenset[str]:
        """Return the pod UIDs of this and of all earlier generations that may still be alive."""
        return frozenset([*self.member_uids(), *(uid for entry in self.previous for uid in entry.members)])

    def last_active(self) -> frozenset[str]:
        """Return the pod UIDs of the last generation that is known to have trained."""
        for entry in self.previous:
            if self.active and self.generation != self.active.generation == entry.generation:
                return frozenset(entry.members)
        return frozenset(self.member_uids())

    def with_gone(self, uids: Iterable[str]) -> Membership:
        """Return a copy in which these pods are proved gone too, if a generation lists them."""
        return replace(self, gone=tuple(sorted(self.named().intersection([*self.gone, *uids]))))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON, in which the directives are a separate object."""
        found = super().to_json()
        directives = {"checkpoint": found.pop("checkpoint"), "drain": found.pop("drain")}
        return {**found, "directives": directives}

    @classmethod
    def from_json(cls, value: Json) -> Membership:
        return super().from_json({**value, **part(value, "directives")})
