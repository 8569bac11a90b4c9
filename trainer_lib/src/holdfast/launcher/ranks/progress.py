"""The reported progress of the ranks, and the requests to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import SURVIVOR
from holdfast.launcher.accounting.checkpoint_counters import CheckpointCounters
from holdfast.launcher.membership.messages import World

SLOW: Final = (
    "rank {rank} of {pod} on node {node} is slow: it uses {seconds:.3g} s per step for itself, the median rank "
    "{medianSeconds:.3g} s, mostly for {activity}"
)

NON_FINITE_COUNTERS: Final = ("skippedSteps", "learningRateChanges", "rollBacks", "skippedSamples", "spikes")


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
    divergences: int = 0
    """How often the state of a local rank differed from that of other replicas."""
    repaired_divergences: int = 0
    """How often such a rank received the state of the majority."""
    last_divergence: dict[str, Any] | None = None
    non_finite: Counter[str] = field(default_factory=Counter)
    """Responses to steps that were not finite, by the fields of the status (`NON_FINITE_COUNTERS`)."""
    bad_samples: int = 0
    """How often the ranks skipped a sample that they could not read."""
    out_of_memory: int = 0
    """How often a local rank was out of GPU memory, so that the step was repeated."""
    memory_record: Mapping[str, Any] | None = None
    """The record that the last local process that ended with a full GPU memory left for its successor."""
    claims: dict[AttemptId, Claim] = field(default_factory=dict)
    quarantined: list[dict[str, str]] = field(default_factory=list)
    slow_ranks: list[dict[str, Any]] = field(default_factory=list)

    def count_divergence(self, rank: int, body: Mapping[str, Any], at: float) -> None:
        """Count a `diverged` message of a local rank."""
        self.last_divergence = {
            "rank": rank,
            "step": int(body["step"]),
            "tensor": str(body["tensor"]),
            "repaired": bool(body["majority"]),
            "time": at,
        }
        self.divergences += 1
        self.repaired_divergences += bool(body["majority"])

    def count_guarded(self, kind: str, body: Mapping[str, Any]) -> None:
        """Count a message of the guards. If all ranks send the same, count those of one local rank."""
        if kind == "outOfMemory":
            self.out_of_memory += 1
        elif kind == "badSamples":
            self.bad_samples += int(body["number"])
        elif kind == "skipped":
            self.non_finite.update(skippedSteps=1, learningRateChanges=int(bool(body["lowered"])))
        elif kind == "spike":
            self.non_finite.update(spikes=1)
        else:
            self.non_finite.update(rollBacks=1, skippedSamples=int(body["samples"]))


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A `checkpoint` or `quiesce` request for the ranks of an attempt, including ranks that send `hello` later."""

    type: str
    attempt_id: AttemptId
    id: str
    reason: str
    commit: bool = True
    node_local: bool = False

    def to_json(self) -> dict[str, Any]:
        commit = {"commit": self.commit, "near": self.node_local} if self.type == "quiesce" else {}
        return {"type": self.type, "id": self.id, "reason": self.reason, **commit}


def smoothed(known: float | None, value: float) -> float:
    """Return an exponentially smoothed mean."""
    return value if known is None else 0.8 * known + 0.2 * value


def origin(body: Mapping[str, Any]) -> str:
    """Return the source of the restored state, one word per tier; "" for a fresh start."""
    return SURVIVOR if body.get("source") == "memory" else ", ".join(map(str, body.get("tiers", ())))


def slow_rank(one: Mapping[str, Any], world: World, processes: int) -> dict[str, Any]:
    """Return a slow rank with its worker and node."""
    member = world.members[int(one["rank"]) // processes]
    return {
        "rank": int(one["rank"]),
        "pod": member.pod,
        "node": member.node,
        "seconds": float(one["seconds"]),
        "medianSeconds": float(one["medianSeconds"]),
        "activity": str(one["activity"]),
    }


def set_aside(bad: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
    """Return the path of a corrupt checkpoint, why it is corrupt, and what happened to its step."""
    stores = ", ".join(map(str, body.get("stores", ())))
    lost = any(gone["path"] == bad["path"] for gone in body.get("lost", ()))
    since = f"training resumed from step {body['step']}{stores and f' of {stores}'}"
    instead = f"no intact copy was left; {since}" if lost else "another copy was intact"
    return {"path": str(bad["path"]), "reason": f"{bad['reason']}; {instead}"}
