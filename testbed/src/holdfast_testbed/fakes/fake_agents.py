"""Simulated launchers and sidecars, and the worlds that the launchers of a job form: no I/O, no clock.

Terms and rules are those of protocol.md, without training. A caller holds the common state of a job's launchers,
takes the operator's memberships and sends reports. Differences between callers are parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A pod with a simulated launcher and sidecar."""

    namespace: str
    name: str
    uid: str
    node: str


def newest(memberships: Iterable[Json | None]) -> Json | None:
    """Return the newest membership that a job's agents have received; None without one."""
    return max(filter(None, memberships), key=lambda document: int(document["revision"]), default=None)


# Worlds


def form(membership: Json, world: Json | None, *, broken: bool, up: Set[str]) -> tuple[Json | None, bool]:
    """Return the continuing world, and whether it has lost a member without which it cannot continue.

    A new generation starts with all its members. Launchers continue on their own without lost members.
    """
    if world is None or int(membership["generation"]) > world["generation"]:
        members = [str(member["podUID"]) for member in membership["members"]]
        return (_world(membership, 1, members), False) if set(members) <= up else (world, broken)
    survivors = [uid for uid in world["members"] if uid in up]
    if survivors == world["members"]:
        return world, broken
    if not _may_go_on(membership, survivors):
        return world, True
    return _world(membership, world["attempt"] + 1, survivors), False


def _may_go_on(membership: Json, survivors: Sequence[str]) -> bool:
    settings = membership["settings"]
    enough = 2 * len(survivors) > len(membership["members"]) and len(survivors) >= settings["minReplicas"]
    return bool(enough and settings["onFailure"] == "Shrink")


def _world(membership: Json, attempt: int, members: list[str]) -> Json:
    return {
        "generation": int(membership["generation"]),
        "attempt": attempt,
        "publication": membership["publication"],
        "members": members,
        "coordinator": members[0],
    }


def gone(ended: Json | None, world: Json | None) -> list[str]:
    """Return the members of the ended world that are not in the next one."""
    return [uid for uid in ended["members"] if uid not in world["members"]] if ended and world else []


# Incidents


def incident(
    ended: Json, lost: Sequence[str], *, at: str, drained: bool = False, pod: str | None = None, lost_steps: int = 0
) -> Json:
    """Return an incident: a world ended because these members were lost or drained."""
    return {
        **_pair(ended),
        "cause": "Interruption" if drained else "Infrastructure",
        "action": "Shrink",
        "reason": "WorkerLeft" if drained else "WorkerLost",
        "message": f"{len(lost)} workers gone",
        "pod": pod,
        "rank": None,
        "node": None,
        "detectedTime": at,
        "resumedTime": at,
        "lostSteps": lost_steps,
    }


def unacknowledged(incidents: Iterable[Json], membership: Json) -> list[Json]:
    """Return the incidents that the operator has not acknowledged yet."""
    noted = [_pair(entry) for entry in membership["acknowledged"]]
    return [one for one in incidents if _pair(one) not in noted]


def _pair(value: Json) -> Json:
    return {key: int(value[key]) for key in ("generation", "attempt")}


# Messages to the operator


def status(
    worker: Worker,
    world: Json | None,
    *,
    step: int,
    at: str,
    broken: bool = False,
    tiers: Sequence[str] = (),
    incidents: Sequence[Json] = (),
    lost: Mapping[str, str],
) -> Json:
    """Return a launcher's status. Each tier has the step. Lost members are reported with the time of their loss."""
    own = world if world is not None and worker.uid in world["members"] else None
    attempt_id = _pair(own) if own else None
    return {
        "version": 1,
        "podUID": worker.uid,
        "pod": worker.name,
        "node": worker.node,
        "ready": True,
        "ports": {"store": 29400, "control": 29401},
        "accepted": attempt_id,
        "started": attempt_id,
        "world": None if broken else own,
        "phase": "Running" if own and not broken else "Waiting",
        "message": "",
        "committedStep": step if own else None,
        "committedAt": at if own else None,
        "ranks": [],
        "checkpoints": {tier: {**attempt_id, "step": step, "time": at} for tier in tiers} if attempt_id else {},
        "highestClaim": None,
        "foreignClaims": [],
        "quarantined": [],
        "loss": 2.0,
        "throughput": 100.0,
        "incidents": list(incidents) if own else [],
        "notices": [],
        "lostMembers": [{"podUID": uid, "since": since, "how": "Silent"} for uid, since in lost.items() if own],
        "exit": None,
    }


def report(worker: Worker, launcher: Json | None, *, number: int, preflight: Json | None = None) -> Json:
    """Return a sidecar's report with this launcher status."""
    return {
        "version": 1,
        "sidecar": {"startId": worker.uid[:8], "number": number},
        "pod": asdict(worker),
        "launcher": launcher,
        "launcherSilentSeconds": 0.1 if launcher else None,
        "notices": [],
        "gpu": [],
        "preflight": preflight,
    }


def token_request(*, pod: str, uid: str, audience: str = "holdfast") -> Json:
    """Return the request for a token that a projected volume would contain, bound to the pod."""
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid}
    spec = {"audiences": [audience], "boundObjectRef": bound, "expirationSeconds": 3600}
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
