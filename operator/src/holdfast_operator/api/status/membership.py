"""The published generation, as launchers are told of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, items, number, part
from holdfast_operator.api.status.serialization import each


@dataclass(frozen=True, kw_only=True)
class Member:
    """A place in a generation."""

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
class Claim:
    """An attempt's right to publish checkpoints, as its launcher wrote it into the checkpoint folder."""

    pair: AttemptId
    job_uid: str
    publication: str
    from_step: int
    from_pair: AttemptId | None = None

    @property
    def order(self) -> tuple[AttemptId, str, str, int, str]:
        return self.pair, self.job_uid, self.publication, self.from_step, str(self.from_pair or "")

    def to_json(self) -> dict[str, Any]:
        return {
            "version": c.PROTOCOL_VERSION,
            "jobUID": self.job_uid,
            "publication": self.publication,
            **self.pair.to_json(),
            "fromStep": self.from_step,
            "fromPair": self.from_pair.to_json() if self.from_pair else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> Claim:
        pair = parse_pair(value)
        if pair is None:
            raise ValueError("a claim without an attempt")
        return cls(
            pair=pair,
            job_uid=str(value.get("jobUID") or ""),
            publication=str(value.get("publication") or ""),
            from_step=number(value.get("fromStep")),
            from_pair=parse_pair(value.get("fromPair")),
        )


@dataclass(frozen=True, kw_only=True)
class EarlierGeneration:
    """An earlier generation that may still have a world; with ``through``, a run of numbers never published."""

    generation: int
    publication: str
    members: tuple[str, ...]
    through: int | None = None

    @property
    def last(self) -> int:
        """The highest generation that this entry stands for."""
        return self.generation if self.through is None else self.through

    def to_json(self) -> dict[str, Any]:
        entry = {"generation": self.generation, "publication": self.publication, "members": list(self.members)}
        return entry if self.through is None else {**entry, "through": self.through}

    @classmethod
    def from_json(cls, value: Json) -> EarlierGeneration:
        return cls(
            generation=int(value["generation"]),
            publication=str(value.get("publication", "")),
            members=tuple(map(str, items(value.get("members")))),
            through=None if value.get("through") is None else int(value["through"]),
        )


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The published generation and all that launchers need to judge it."""

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
        """Pod UIDs in order of index."""
        return tuple(member.pod_uid for member in sorted(self.members, key=lambda member: member.index))

    def named(self) -> frozenset[str]:
        """Pod UIDs of this and all earlier generations that may still live."""
        return frozenset([*self.member_uids(), *(uid for entry in self.previous for uid in entry.members)])

    def last_active(self) -> frozenset[str]:
        """Pod UIDs of the last generation that is known to have trained."""
        for entry in self.previous:
            if self.active and self.generation != self.active.generation == entry.generation:
                return frozenset(entry.members)
        return frozenset(self.member_uids())

    def with_gone(self, uids: Iterable[str]) -> Membership:
        """A copy in which these pods are proved gone too, as far as a generation lists them."""
        return replace(self, gone=tuple(sorted(self.named().intersection([*self.gone, *uids]))))

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "revision": self.revision,
            "generation": self.generation,
            "publication": self.publication,
            "active": self.active.to_json() if self.active else None,
            "previous": [previous.to_json() for previous in self.previous],
            "gone": list(self.gone),
            "claims": [claim.to_json() for claim in self.claims],
            "members": [member.to_json() for member in self.members],
            "acknowledged": [pair.to_json() for pair in self.acknowledged],
            "directives": {
                "checkpoint": dict(self.checkpoint) if self.checkpoint else None,
                "drain": list(self.drain),
            },
        }

    @classmethod
    def from_json(cls, value: Json) -> Membership:
        directives = part(value, "directives")
        return cls(
            revision=number(value.get("revision")),
            generation=number(value.get("generation")),
            publication=str(value.get("publication") or ""),
            active=parse_pair(value.get("active")),
            previous=each(value.get("previous"), EarlierGeneration.from_json),
            gone=tuple(map(str, items(value.get("gone")))),
            claims=each(value.get("claims"), Claim.from_json),
            members=each(value.get("members"), Member.from_json),
            acknowledged=tuple(filter(None, map(parse_pair, items(value.get("acknowledged"))))),
            checkpoint=part(directives, "checkpoint") or None,
            drain=tuple(map(str, items(directives.get("drain")))),
        )
