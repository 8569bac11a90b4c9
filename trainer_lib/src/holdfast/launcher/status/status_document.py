"""Creates the launcher's status for `status.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.core.log_format import rfc3339
from holdfast.core.protocol import PROTOCOL_VERSION
from holdfast.launcher.accounting.checkpoint_counters import Failing
from holdfast.launcher.host.termination_log import Ending, redact
from holdfast.launcher.membership import state_machine
from holdfast.launcher.membership.messages import Incident, World
from holdfast.launcher.membership.state import Attempt, State
from holdfast.launcher.ranks.progress import NON_FINITE_COUNTERS, Progress
from holdfast.launcher.ranks.rank_process import Rank

_MAX_MESSAGE = 1000
_MAX_INCIDENTS = 32


@dataclass(frozen=True, kw_only=True)
class Identity:
    pod_uid: str
    pod: str
    node: str
    gpus: tuple[str, ...] = ()


def status(
    *,
    identity: Identity,
    state: State,
    ranks: Sequence[Rank],
    progress: Progress,
    control_port: int,
    store_port: int,
    notices: Sequence[Mapping[str, Any]],
    ending: Ending | None,
    accounting: Mapping[str, Any] | None = None,
    warm_processes: int = 0,
    uploads: Mapping[str, Any] | None = None,
    refused_peers: int = 0,
) -> dict[str, Any]:
    return {
        "version": PROTOCOL_VERSION,
        "podUID": identity.pod_uid,
        "pod": identity.pod,
        "node": identity.node,
        "gpus": list(identity.gpus),
        "ready": state.ready,
        "ports": {"store": store_port, "control": control_port},
        "accepted": _attempt_id(state.accepted),
        "started": _attempt_id(state.started),
        "world": _world(state.world),
        "restored": _restored(state.attempt),
        "phase": str(state.phase),
        "message": _shown(state.message),
        "ranks": [rank.to_status() for rank in ranks if rank.alive],
        **_progress(progress),
        "slowRanks": [] if state.world is None else list(progress.slow_ranks),
        "accounting": None if accounting is None else dict(accounting),
        "warmProcesses": warm_processes,
        "uploads": None if uploads is None else dict(uploads),
        "refusedPeers": refused_peers,
        "highestClaim": _highest_claim(state, progress),
        "foreignClaims": [claim.to_json() for claim in state.foreign],
        "conflict": state.conflict,
        "incidents": [_incident(incident) for incident in _reported_incidents(state)],
        "notices": [dict(notice) for notice in notices],
        "lostMembers": _lost(state),
        "exit": None if ending is None else ending.to_status(),
    }


def _shown(text: str) -> str:
    """Redact and shorten a text: the status is copied to the job's, which more users can read than the pods' logs."""
    return redact(text)[:_MAX_MESSAGE]


def _attempt_id(attempt_id: AttemptId | None) -> dict[str, Any] | None:
    return None if attempt_id is None else attempt_id.to_json()


def _time(moment: float | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def _world(world: World | None) -> dict[str, Any] | None:
    if world is None:
        return None
    return {
        **world.attempt_id.to_json(),
        "publication": world.publication,
        "members": [member.pod_uid for member in world.members],
        "coordinator": world.coordinator,
    }


def _restored(attempt: Attempt | None) -> dict[str, Any] | None:
    """Return the restore of the attempt that runs here, once it has made a step."""
    if attempt is None or attempt.restored is None:
        return None
    return {"step": attempt.restored, "from": attempt.origin or None}


def _progress(progress: Progress) -> dict[str, Any]:
    return {
        "committedStep": progress.committed_step,
        "committedAt": _time(progress.committed_at),
        "checkpoints": {
            tier: {**commit, "time": _time(commit["time"])} for tier, commit in progress.checkpoints.items()
        },
        **progress.tallies.to_json(),
        "checkpointsFailing": {tier: _failing(failing) for tier, failing in progress.tallies.failing.items()},
        "quarantined": list(progress.quarantined),
        "loss": progress.loss,
        "throughput": None if progress.throughput is None else round(progress.throughput, 3),
        "stepSeconds": None if progress.step_seconds is None else round(progress.step_seconds, 6),
        "gradientNorm": progress.gradient_norm,
        "divergences": {
            "count": progress.divergences,
            "repaired": progress.repaired_divergences,
            "last": _divergence(progress.last_divergence),
        },
        "badSamples": progress.bad_samples,
        "outOfMemory": progress.out_of_memory,
        "nonFinite": {name: progress.non_finite[name] for name in NON_FINITE_COUNTERS},
    }


def _divergence(last: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if last is None else {**last, "tensor": _shown(last["tensor"]), "time": _time(last["time"])}


def _failing(failing: Failing) -> dict[str, Any]:
    return {**vars(failing), "since": _time(failing.since), "message": _shown(failing.message)}


def _highest_claim(state: State, progress: Progress) -> dict[str, Any] | None:
    inherited = () if state.membership is None else state.membership.claims
    known = {claim.attempt_id: claim for claim in inherited} | progress.claims
    return known[max(known)].to_json() if known else None


def _reported_incidents(state: State) -> list[Incident]:
    """Return the oldest incidents, in the order of attempts. The others follow when those are acknowledged.

    Without an operator for long, their number grows, and a report of all would be too large for the operator.
    """
    return sorted(state.incidents, key=lambda incident: incident.attempt_id)[:_MAX_INCIDENTS]


def _incident(incident: Incident) -> dict[str, Any]:
    failure = incident.failure
    return {
        **incident.attempt_id.to_json(),
        "cause": str(failure.cause),
        "action": str(incident.action),
        "reason": failure.reason,
        "message": _shown(failure.message),
        "pod": failure.pod,
        "rank": failure.rank,
        "exitCode": failure.exit_code,
        "node": failure.node,
        "detectedTime": _time(incident.detected),
        "resumedTime": _time(incident.resumed),
        "lostSteps": incident.lost_steps,
        "restoredFrom": incident.restored_from,
        "partOf": _attempt_id(incident.part_of),
    }


def _lost(state: State) -> list[dict[str, Any]]:
    return [
        {"podUID": uid, "since": _time(since), "how": str(how)}
        for uid, since, how in state_machine.lost_members(state)
    ]
