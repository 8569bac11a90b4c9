"""``spec.checkpoint``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.fields import choice, integer, items, mapping, number
from holdfast_operator.errors import UnreadableError

_DURATION = re.compile(r"^([1-9][0-9]{0,6})(s|m|h)$")
_UNIT = {"s": 1, "m": 60, "h": 3600}
_METRIC = re.compile(r"[A-Za-z_][\w./-]{0,63}", re.ASCII)
_QUANTITY = re.compile(r"^([1-9][0-9]{0,8})(k|M|G|Ki|Mi|Gi)?$")
_FACTOR = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class ObjectTier:
    """A store of objects to which commits are copied."""

    url: str
    secret_name: str | None = None
    interval_seconds: int = 0
    keep_last: int = 3
    retention: str = ""  # as CheckpointSpec has it
    bytes_per_second: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Copies in the memory of each worker's own node. ``interval`` is in steps."""

    size: str
    interval: int = 1


@dataclass(frozen=True, kw_only=True)
class PeerTier:
    """Copies of the memory tier in another node's memory. ``interval`` is in steps."""

    interval: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalTier:
    """Copies on each node's disk. ``interval`` is in steps."""

    size: str
    interval: int = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Where and how often training state is committed."""

    claim_name: str | None = None
    interval: str = "300s"
    full_every: int = 1
    delta_threshold: float = 0.0
    keep_last: int = 3
    retention: str = ""  # what is kept beside them, in the words that launchers read: hours=6,daily=7
    resume: str = c.RESUME_ALWAYS
    object_store: ObjectTier | None = None
    memory: MemoryTier | None = None
    peer: PeerTier | None = None
    local: LocalTier | None = None
    bytes_per_second: int | None = None  # of all ranks together to the volume


def parse_checkpoint(spec: Json) -> CheckpointSpec:
    """Return ``spec.checkpoint``. Raises ``UnreadableError``."""
    value = mapping(spec.get("checkpoint", {}), "spec.checkpoint")
    volume = mapping(value.get("volume", {}), "spec.checkpoint.volume")
    retention = mapping(value.get("retention", {}), "spec.checkpoint.retention")
    claim = volume.get("claimName")
    return CheckpointSpec(
        claim_name=str(claim) if claim else None,
        interval=_interval(value.get("interval", "5m")),
        full_every=integer(value, "fullEvery", "spec.checkpoint", 1, minimum=1),
        delta_threshold=number(value, "deltaThreshold", "spec.checkpoint", 0.0, maximum=1.0),
        keep_last=integer(retention, "keepLast", "spec.checkpoint.retention", 3, minimum=1),
        retention=_rules(retention, "spec.checkpoint.retention"),
        resume=choice(value, "resume", "spec.checkpoint", ("Always", "Never"), c.RESUME_ALWAYS),
        object_store=_object_store(value),
        memory=_memory_tier(value),
        peer=_peer_tier(value),
        local=_local_tier(value),
        bytes_per_second=_bandwidth(value, "spec.checkpoint"),
    )


def _bandwidth(value: Json, path: str) -> int | None:
    limit = value.get("maxBytesPerSecond")
    return None if limit is None else _bytes(str(limit), f"{path}.maxBytesPerSecond")


def _rules(retention: Json, path: str) -> str:
    counts = {rule: integer(retention, field, path, 0, minimum=0) for rule, field in c.RETENTION_RULES.items()}
    counted = [f"{rule}={count}" for rule, count in counts.items() if count]
    best = items(retention.get("keepBest", []), f"{path}.keepBest")
    return ",".join([*counted, *(_best(one, f"{path}.keepBest[{index}]") for index, one in enumerate(best))])


def _best(given: Any, path: str) -> str:
    """`best=val_loss:min:3`, as launchers read it."""
    value = mapping(given, path)
    metric = str(value.get("metric", ""))
    if _METRIC.fullmatch(metric) is None:
        raise UnreadableError(f"{path}.metric must be a name like val_loss or eval/loss, not {metric[:80]!r}")
    mode = choice(value, "mode", path, (c.BEST_MIN, c.BEST_MAX), c.BEST_MIN)
    return f"best={metric}:{mode.lower()}:{integer(value, 'count', path, 1, minimum=1)}"


def _memory_tier(checkpoint: Json) -> MemoryTier | None:
    path = "spec.checkpoint.memory"
    value = mapping(checkpoint.get("memory", {}), path)
    tier = MemoryTier(size=str(value.get("sizeLimit", "")), interval=integer(value, "interval", path, 1, minimum=1))
    return tier if tier.size else None


def _peer_tier(checkpoint: Json) -> PeerTier | None:
    if checkpoint.get("peer") is None:
        return None
    path = "spec.checkpoint.peer"
    value = mapping(checkpoint["peer"], path)
    return PeerTier(
        interval=integer(value, "interval", path, 1, minimum=1),
    )


def _local_tier(checkpoint: Json) -> LocalTier | None:
    path = "spec.checkpoint.local"
    value = mapping(checkpoint.get("local", {}), path)
    tier = LocalTier(
        size=str(value.get("sizeLimit", "")),
        interval=integer(value, "interval", path, 10, minimum=1),
    )
    return tier if tier.size else None


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
        interval_seconds=_seconds(value.get("interval", "0s"), f"{path}.interval"),
        keep_last=integer(retention, "keepLast", f"{path}.retention", 3, minimum=1),
        retention=_rules(retention, f"{path}.retention"),
        bytes_per_second=_bandwidth(value, path),
    )


def _seconds(value: Any, path: str) -> int:
    """``5m`` is 300; ``0s`` means no wait at all."""
    match = _DURATION.match(str(value))
    if match is None and str(value) not in ("0", "0s"):
        raise UnreadableError(f"{path} is not a duration: {str(value)!r}")
    return int(match[1]) * _UNIT[match[2]] if match else 0


def _bytes(text: str, path: str) -> int:
    """``100Mi`` is 104857600."""
    match = _QUANTITY.match(text)
    if match is None:
        raise UnreadableError(f"{path} is not a number of bytes: {text!r}")
    return int(match[1]) * _FACTOR[match[2]]


def _interval(value: Any) -> str:
    """``50`` (steps) and ``Auto`` stay, durations become seconds: ``5m`` is ``300s``."""
    text = str(value)
    if text == "Auto":
        return text
    if text.isdigit() and int(text) >= 1:
        return str(int(text))
    match = _DURATION.match(text)
    if match is None:
        raise UnreadableError(f"spec.checkpoint.interval is neither steps nor a duration nor Auto: {text!r}")
    return f"{int(match[1]) * _UNIT[match[2]]}s"
