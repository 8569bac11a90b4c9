"""The launchers and sidecars of the workers, as far as an operator can see them.

They follow the rules of docs/reference/protocol.md.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

from bodies import Body
from faults import FaultyCluster

from holdfast_operator.api import names as c
from holdfast_operator.api.times import format_time

CONTRACT = Path(__file__).parents[2] / "contract"
REPORT = (CONTRACT / "report.json").read_text()
TOKEN_KNOWN = timedelta(seconds=45)  # a pod whose object is gone is authenticated as long


class Launchers(FaultyCluster):
    """The workers' launchers, which form one world at a time and report it."""

    def __init__(self, body: Body | None = None, *, nodes: int = 4) -> None:
        super().__init__(body, nodes=nodes)
        self.document: Body | None = None
        self.world: Body | None = None
        self.highest: dict[int, int] = {}
        self.incidents: dict[tuple[int, int], Body] = {}
        self.checkpoints: Body = {}
        self.failing: Body = {}
        self.divergences: dict[str, Body] = {}  # of a pod
        self.slow_ranks: list[Body] = []
        self.failing_of: dict[str, Body] = {}  # of a pod, in its place
        self.step = 0
        self.restored: Body | None = None  # what launchers say of the origin of their world's state
        self.complete_at: int | None = None
        self.obeys = False  # launchers that are told to drain leave with 75
        self.refused: set[str] = set()  # checks that fail by what the job says
        self.preflights: dict[str, dict[str, str]] = {}  # by node: what each check of a worker there comes to
        self.cut_links: frozenset[frozenset[str]] = frozenset()  # pairs of nodes
        self.deaf = False  # no report reaches the operator
        self.saving: set[str] = set()  # pods of which a rank is in a checkpoint
        self.books: dict[str, dict[str, float] | None] = {}  # what launchers book, by pod; None: nothing yet
        self.heard: dict[str, tuple[datetime, Body]] = {}

    def world_names(self) -> list[str]:
        known = {**self.graves, **self.pods}
        return sorted(known[uid]["metadata"]["name"] for uid in self.world["members"]) if self.world else []

    def run_launchers(self) -> None:
        """What launchers do together, as far as the operator can see it."""
        if not self.launched:
            return
        if self.world is not None and not all(map(self.alive, self.world["members"])):
            self._world_ends("Infrastructure", "MemberLost")
        if self.document is None:
            return
        if self.obeys:
            self._drain(self.document["directives"]["drain"])
        generation = self.document["generation"]
        members = [member["podUID"] for member in self.document["members"]]
        drained = set(self.document["directives"]["drain"])
        live = [uid for uid in members if self.alive(uid) and uid not in drained]
        here = self.world is not None and self.world["generation"] == generation
        whole = len(live) - len(live) % self.document["settings"]["replicaStep"]  # the rest of a step stands by
        if self.world is not None and here and whole <= len(set(live) & set(self.world["members"])):
            self.step += 1  # none came back that would make a larger one
            self._completion()
            return
        live = live[:whole]
        if self._may_start(members, live):
            attempt = self.highest.get(generation, 0) + 1
            self.highest[generation] = attempt
            self.world = {
                "generation": generation,
                "attempt": attempt,
                "publication": self.document["publication"],
                "members": live,
                "coordinator": live[0],
            }
            for incident in self.incidents.values():
                incident["resumedTime"] = incident["resumedTime"] or format_time(self.now)
                incident["lostSteps"] = incident["lostSteps"] or 0

    def _drain(self, uids: list[str]) -> None:
        """One agreed commit ends the world, which is no incident; who must go goes."""
        leaving = [uid for uid in uids if self.alive(uid)]
        for uid in leaving:
            self.end_pod(self.pods[uid], 75)
        if self.world is not None and set(leaving) & set(self.world["members"]):
            self.world = None

    def obey_drain(self) -> None:
        """Launchers that were told to leave have committed and are gone."""
        told = [uid for uid in self.document["directives"]["drain"] if self.alive(uid)] if self.document else []
        if self.world is not None and set(told) & set(self.world["members"]):
            self.world = None
        for uid in told:
            self.end_pod(self.pods[uid], 75)

    def _completion(self) -> None:
        if self.complete_at is not None and self.step >= self.complete_at and self.world is not None:
            for uid in self.world["members"]:
                self.end_pod(self.pods[uid], 0)
            self.world = None

    def _may_start(self, members: list[str], live: list[str]) -> bool:
        settings = self.document["settings"] if self.document else {}
        gone = set(self.document["gone"]) if self.document else set()
        if 2 * len(live) <= len(members) or len(live) < settings["minReplicas"]:
            return False
        if settings["onFailure"] != "Shrink" and len(live) < len(members):
            return False
        for previous in self.document["previous"] if self.document else ():
            left = set(previous["members"]) - set(live) - gone
            if 2 * len(left) > len(previous["members"]):
                return False
        return True

    # Incidents

    def _world_ends(self, cause: str, reason: str) -> None:
        if self.world is None:
            return
        world, self.world = self.world, None
        dead = next((uid for uid in world["members"] if not self.alive(uid)), world["members"][0])
        body = self.pods.get(dead) or self.graves.get(dead)
        if not any(map(self.alive, world["members"])):
            return
        told = self._incident(world, body["metadata"]["name"] if body else None, cause, reason)
        self.incidents[world["generation"], world["attempt"]] = told

    def incident_of(self, name: str, *, cause: str, reason: str) -> Body:
        """What a launcher would tell that ends the world that trains now."""
        assert self.world is not None
        return self._incident(self.world, name, cause, reason)

    def _incident(self, world: Body, pod: str | None, cause: str, reason: str) -> Body:
        return {
            "generation": world["generation"],
            "attempt": world["attempt"],
            "cause": cause,
            "action": "Shrink",
            "reason": reason,
            "message": "a peer was lost",
            "pod": pod,
            "rank": 0,
            "exitCode": None,
            "node": None,
            "detectedTime": format_time(self.now),
            "resumedTime": None,
            "lostSteps": None,
        }

    # Reports

    def report(self) -> None:
        acknowledged = self.document["acknowledged"] if self.document else []
        done = {(attempt_id["generation"], attempt_id["attempt"]) for attempt_id in acknowledged}
        known = {uid: self.graves[uid] for uid, since in self.orphans.items() if self.now - since < TOKEN_KNOWN}
        for uid, body in (self.pods | known).items() if not self.deaf else ():
            if self.alive(uid):
                self.heard[uid] = (self.now, self._report_of(uid, body, done))
            elif uid in self.frozen and self.node_up(body["spec"]["nodeName"]):  # its sidecar goes on
                silent = (self.now - self.frozen[uid]).total_seconds()
                self.heard[uid] = (self.now, {**self.heard[uid][1], "launcherSilentSeconds": silent})

    def _report_of(self, uid: str, body: Body, done: set[tuple[int, int]]) -> Body:
        report: Body = json.loads(REPORT)
        name, node = body["metadata"]["name"], body["spec"]["nodeName"]
        report["pod"] |= {"uid": uid, "name": name, "node": node, "namespace": "ml"}
        report["notices"], report["gpu"] = body.get("notices", []), body.get("gpu", [])
        if not self.launched:
            return {**report, "launcher": None}
        world = self.world if self.world and uid in self.world["members"] else None
        checks: list[Body] = [
            {"name": n, "result": r, "message": f"{n} is {r}", **({"blame": "Job"} if n in self.refused else {})}
            for n, r in self.preflights.get(node, {}).items()
        ]
        unreached = [] if world else self._unreached(uid, node)
        if checks and unreached:  # as told by who became ready last
            checks = [check for check in checks if check["name"] != "Network"]
            checks.append({"name": "Network", "result": "Failed", "message": "cut", "unreached": unreached})
        report["preflight"] = {"checks": checks} if checks else None
        attempt_id = {key: world[key] for key in ("generation", "attempt")} if world else None
        members = [member["podUID"] for member in self.document["members"]] if self.document else []
        lost = [other for other in members if not self.alive(other)]
        report["launcher"] |= {
            "podUID": uid,
            "pod": name,
            "node": node,
            "accepted": attempt_id,
            "started": attempt_id,
            "world": world,
            "restored": self.restored if world else None,
            "phase": "Running" if world else "Waiting",
            "message": "",
            "committedStep": self.step if world else None,
            "committedAt": format_time(self.now) if world else None,
            "checkpoints": self.checkpoints,
            "slowRanks": self.slow_ranks if world and uid == world["members"][0] else [],
            "checkpointsFailing": self.failing_of.get(name, self.failing),
            "highestClaim": None,
            "quarantined": [],
            "divergences": self.divergences.get(name, {"count": 0, "last": None}),
            "notices": [_by_touch_file(notice) for notice in report["notices"]],
            "incidents": [incident for key, incident in self.incidents.items() if key not in done],
            "lostMembers": [{"podUID": other, "since": format_time(self.now), "how": "Silent"} for other in lost],
            "exit": None,
        }
        for rank in report["launcher"]["ranks"]:
            rank["phase"] = "checkpoint" if name in self.saving else "step"
        books: Body | None = self.books.get(name, {})
        report["launcher"]["accounting"] = books and {"seconds": books, "unattributedSeconds": 0.2}
        return report

    def _unreached(self, uid: str, node: str) -> list[str]:
        """Workers that were there before this one, on nodes to which no packet passes."""
        own = int((self.pods.get(uid) or self.graves[uid])["metadata"]["labels"][c.LABEL_INCARNATION])
        return [
            other
            for other, body in self.pods.items()
            if self.alive(other)
            and int(body["metadata"]["labels"].get(c.LABEL_INCARNATION, own)) < own
            and frozenset((node, body["spec"]["nodeName"])) in self.cut_links
        ]


def _by_touch_file(notice: Body) -> Body:
    """A launcher's word for what its sidecar was told: all that the touch-file asks for."""
    return {**notice, "action": "drain" if notice["action"] in c.NOTICE_ACTIONS_LEAVING else "checkpoint"}
