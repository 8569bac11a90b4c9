"""``spec.checkpoint``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.fields import choice, integer, items, mapping, number, optional_integer, size
from holdfast_operator.errors import UnreadableError

_METRIC = re.compile(r"[A-Za-z_][\w./-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ObjectTier:
    """An object store for checkpoints. With a volume it has copies, which the fields after the secret describe."""

    url: str
    secret_name: str | None = None
    interval_seconds: int = 0
    keep_last: int = 3
    retention: str = ""  # in the format of ``CheckpointSpec.retention``
    bytes_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Copies in the memory of each worker's own node. ``size`` is a quantity, ``interval`` is in steps."""

    size: str
    interval: int = 1


@dataclass(frozen=True, kw_only=True)
class PeerTier:
    """Copies of the memory tier in another node's memory. ``interval`` is in steps."""

    interval: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalTier:
    """Copies on each node's disk. ``size`` is a quantity, ``interval`` is in steps."""

    size: str
    interval: int = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Where and how often checkpoints are written."""

    claim_name: str | None = None
    interval: str = "Auto"  # in launchers' format: steps (50), seconds (300s) or Auto
    full_every: int = 1
    delta_threshold: float = 0.0
    keep_last: int = 3
    retention: str = ""  # older checkpoints to keep, in launchers' format: hours=6,daily=7
    resume: str = c.RESUME_ALWAYS
    object_store: ObjectTier | None = None
    memory: MemoryTier | None = None
    peer: PeerTier | None = None
    local: LocalTier | None = None
    bytes_per_second: int | None = None  # limit of all ranks together to the shared tier

    @property
    def has_shared_tier(self) -> bool:
        """Whether checkpoints outlive the pods: on a volume, or without one in an object store."""
        return self.claim_name is not None or self.object_store is not None

    @property
    def shared_store(self) -> ObjectTier | None:
        """The object store, if it is the shared tier itself and has no copies of a volume."""
        return None if self.claim_name is not None else self.object_store

    @property
    def copies(self) -> ObjectTier | None:
        """The object store, if it has copies of the checkpoints on a volume."""
        return None if self.claim_name is None else self.object_store


def parse_checkpoint(spec: Json) -> CheckpointSpec:
    """Return ``spec.checkpoint``. Raises ``UnreadableError``."""
    value = mapping(spec.get("checkpoint", {}), "spec.checkpoint")
    volume = mapping(value.get("volume", {}), "spec.checkpoint.volume")
    retention = mapping(value.get("retention", {}), "spec.checkpoint.retention")
    claim = volume.get("claimName")
    return CheckpointSpec(
        claim_name=str(claim) if claim else None,
        interval=_interval(value),
        full_every=integer(value, "fullEvery", "spec.checkpoint", 1, minimum=1),
        delta_threshold=number(value, "deltaThreshold", "spec.checkpoint", 0.0, maximum=1.0),
        keep_last=integer(retention, "keepLast", "spec.checkpoint.retention", 3, minimum=1),
        retention=_rules(retention, "spec.checkpoint.retention"),
        resume=choice(value, "resume", "spec.checkpoint", ("Always", "Never"), c.RESUME_ALWAYS),
        object_store=_object_store(value),
        memory=_memory_tier(value),
        peer=_peer_tier(value),
        local=_local_tier(value),
        bytes_per_second=size(value, "maxBytesPerSecond", "spec.checkpoint"),
    )


def _rules(retention: Json, path: str) -> str:
    counts = {rule: integer(retention, field, path, 0, minimum=0) for rule, field in c.RETENTION_RULES.items()}
    counted = [f"{rule}={count}" for rule, count in counts.items() if count]
    best = items(retention.get("keepBest", []), f"{path}.keepBest")
    return ",".join([*counted, *(_best(one, f"{path}.keepBest[{index}]") for index, one in enumerate(best))])


def _best(given: Any, path: str) -> str:
    """Return the value in launchers' format: `best=val_loss:min:3`."""
    value = mapping(given, path)
    metric = str(value.get("metric", ""))
    if _METRIC.fullmatch(metric) is None:
        raise UnreadableError(f"{path}.metric must be a name like val_loss or eval/loss, not {metric[:80]!r}")
    mode = choice(value, "mode", path, (c.BEST_MIN, c.BEST_MAX), c.BEST_MIN)
    return f"best={metric}:{mode.lower()}:{integer(value, 'count', path, 1, minimum=1)}"


def _memory_tier(checkpoint: Json) -> MemoryTier | None:
    path = "spec.checkpoint.memory"
    value = mapping(checkpoint.get("memory", {}), path)
    if size(value, "sizeLimit", path) is None:
        return None
    return MemoryTier(size=str(value["sizeLimit"]), interval=integer(value, "intervalSteps", path, 1, minimum=1))


def _peer_tier(checkpoint: Json) -> PeerTier | None:
    if checkpoint.get("peer") is None:
        return None
    path = "spec.checkpoint.peer"
    value = mapping(checkpoint["peer"], path)
    return PeerTier(interval=integer(value, "intervalSteps", path, 1, minimum=1))


def _local_tier(checkpoint: Json) -> LocalTier | None:
    path = "spec.checkpoint.local"
    value = mapping(checkpoint.get("local", {}), path)
    if size(value, "sizeLimit", path) is None:
        return None
    return LocalTier(size=str(value["sizeLimit"]), interval=integer(value, "intervalSteps", path, 10, minimum=1))


def _object_store(checkpoint: Json) -> ObjectTier | None:
    if checkpoint.get("object") is None:
        return None
    path = "spec.checkpoint.object"
    value = mapping(checkpoint["object"], path)
    secret = mapping(value.get("secretRef", {}), f"{path}.secretRef").get("name")
    retention = mapping(value.get("retention", {}), f"{path}.retention")
    return ObjectTier(
        url=str(value.get("url", "")).rstrip("/"),
        secret_name=str(secret) if secret else None,
        interval_seconds=integer(value, "intervalSeconds", path, 0, minimum=0),
        keep_last=integer(retention, "keepLast", f"{path}.retention", 3, minimum=1),
        retention=_rules(retention, f"{path}.retention"),
        bytes_per_second=size(value, "maxBytesPerSecond", path),
    )


def _interval(checkpoint: Json) -> str:
    path = "spec.checkpoint"
    steps = optional_integer(checkpoint, "intervalSteps", path, minimum=1)
    seconds = optional_integer(checkpoint, "intervalSeconds", path, minimum=1)
    if steps is not None and seconds is not None:
        raise UnreadableError(f"{path} has both intervalSteps and intervalSeconds: set only one of them")
    if steps is not None:
        return str(steps)
    return "Auto" if seconds is None else f"{seconds}s"
