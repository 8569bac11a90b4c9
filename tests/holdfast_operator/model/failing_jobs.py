"""Jobs that train under a recovery policy, ways to fail their workers, and what they then report."""

from __future__ import annotations

from typing import Any

from sim import Make, Sim


def training(make_sim: Make, *, replicas: int = 3, nodes: int = 5, **recovery: Any) -> Sim:
    """A job with this recovery, all of whose workers train."""
    sim = make_sim(replicas=replicas, nodes=nodes, recovery=recovery)
    sim.obeys = True
    sim.run(60, until=lambda: sim.status.summary == "Training")
    return sim


def rule(action: str, name: str = "mine", **asked: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **asked}


def fail(
    sim: Sim, *, code: int | None = 1, cause: str = "Application", reason: str = "ExitCode", pod: str = ""
) -> None:
    """A process of a worker fails, and its launcher starts it again in place: the next world of the same members."""
    world = sim.world
    name = pod or sim.world_names()[0]
    attempt_id = (world["generation"], world["attempt"])
    sim.incidents[attempt_id] = {
        "generation": attempt_id[0],
        "attempt": attempt_id[1],
        "cause": cause,
        "action": "InPlace",
        "reason": reason,
        "message": f"rank 0 failed with {code}",
        "pod": name,
        "rank": 0,
        "exitCode": code,
        "node": sim.node_of(name),
        "detectedTime": sim.stamp(),
        "resumedTime": None,
        "lostSteps": None,
    }
    sim.world = None
    sim.tick()


def told(sim: Sim, reason: str) -> list[str]:
    return [message for word, message in sim.events if word == reason]


def decided(sim: Sim) -> list[str]:
    return [incident.decision for incident in sim.status.incidents]


def gpu_error(xid: int = 79, *, action: str = "", at: str = "") -> dict[str, Any]:
    return {
        "gpu": "GPU-1",
        "index": 0,
        "kind": "Xid",
        "xid": xid,
        "count": 1,
        "cause": "Infrastructure",
        "action": action,
        "message": f"GPU 0: XID {xid}",
        "firstTime": at,
        "lastTime": at,
    }
