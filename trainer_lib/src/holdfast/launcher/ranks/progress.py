"""What the ranks report of their training, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import SURVIVOR
from holdfast.launcher.accounting.checkpoint_counters import CheckpointCounters


@dataclass(kw_only=True)
class Progress:
    """What the ranks told of their training, for the status."""

    committed_step: int | None = None
    committed_at: float | None = None
    loss: float | None = None
    throughput: float | None = None
    step_seconds: float | None = None
    gradient_norm: float | None = None
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    tallies: CheckpointCounters = field(default_factory=CheckpointCounters)
    claims: dict[AttemptId, Claim] = field(default_factory=dict)
    quarantined: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A `checkpoint` or `quiesce` for the ranks of an attempt, also for those that say hello later."""

    type: str
    pair: AttemptId
    id: str
    reason: str
    commit: bool = True
    near: bool = False

    def to_json(self) -> dict[str, Any]:
        commit = {"commit": self.commit, "near": self.near} if self.type == "quiesce" else {}
        return {"type": self.type, "id": self.id, "reason": self.reason, **commit}


def smoothed(known: float | None, value: float) -> float:
    """A mean in which older values count less and less."""
    return value if known is None else 0.8 * known + 0.2 * value


def origin(body: Mapping[str, Any]) -> str:
    """Where the state that goes on was, in a word for each tier; nothing for a fresh start."""
    return SURVIVOR if body.get("source") == "memory" else ", ".join(map(str, body.get("tiers", ())))


def set_aside(bad: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
    """A damaged commit, why, and what became of its step."""
    stores = ", ".join(map(str, body.get("stores", ())))
    lost = any(gone["path"] == bad["path"] for gone in body.get("lost", ()))
    since = f"training went on from step {body['step']}{stores and f' of {stores}'}"
    instead = f"no good copy of it was left, {since}" if lost else "another copy was good"
    return {"path": str(bad["path"]), "reason": f"{bad['reason']}; {instead}"}
