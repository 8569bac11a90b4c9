"""The reported progress of the ranks, and the requests to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import SURVIVOR
from holdfast.launcher.accounting.checkpoint_counters import CheckpointCounters


@dataclass(kw_only=True)
class Progress:
    """The training progress that the ranks reported, for the status."""

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
    """A `checkpoint` or `quiesce` request for the ranks of an attempt, including ranks that send `hello` later."""

    type: str
    attempt_id: AttemptId
    id: str
    reason: str
    commit: bool = True
    near: bool = False

    def to_json(self) -> dict[str, Any]:
        commit = {"commit": self.commit, "near": self.near} if self.type == "quiesce" else {}
        return {"type": self.type, "id": self.id, "reason": self.reason, **commit}


def smoothed(known: float | None, value: float) -> float:
    """Return an exponentially smoothed mean."""
    return value if known is None else 0.8 * known + 0.2 * value


def origin(body: Mapping[str, Any]) -> str:
    """Return the source of the restored state, one word per tier; "" for a fresh start."""
    return SURVIVOR if body.get("source") == "memory" else ", ".join(map(str, body.get("tiers", ())))


def set_aside(bad: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
    """Return the path of a corrupt checkpoint, why it is corrupt, and what happened to its step."""
    stores = ", ".join(map(str, body.get("stores", ())))
    lost = any(gone["path"] == bad["path"] for gone in body.get("lost", ()))
    since = f"training resumed from step {body['step']}{stores and f' of {stores}'}"
    instead = f"no intact copy was left; {since}" if lost else "another copy was intact"
    return {"path": str(bad["path"]), "reason": f"{bad['reason']}; {instead}"}
