"""A small cluster without processes or clocks: it applies plans, places pods, and lets launchers form worlds.

Everything goes through the same JSON as on a real cluster, so that parsing is tested with it. The launchers here
follow the rules of docs/reference/protocol.md as far as an operator can see them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast_operator.api import names as c
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.status import Phase, Status
from holdfast_operator.api.times import format_seconds, format_time, parse_time
from holdfast_operator.cluster.node_usage import usage_of
from holdfast_operator.decision.decide import decide
from holdfast_operator.decision.plan import (
    ApplyChildren,
    CreatePod,
    DeleteJob,
    DeletePod,
    LabelPod,
    LiftGate,
    Plan,
    Publish,
    RestorePod,
)
from holdfast_operator.decision.snapshot import CreationError, Observed
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.reconcile.act import status_patch, without_nulls
from holdfast_operator.reconcile.observe import doubtful, unlisted
from holdfast_operator.reconcile.torchrun_reports import spoken_for
from holdfast_operator.scheduling.gang_queue import GangQueue, GangQueueInput, standing_of
from holdfast_operator.scheduling.waiting_gang import GangPriority, WaitingGang, rival_of
from holdfast_operator.views import NodeUsage, PodView, Renewals, parse_node, parse_pod, parse_report, read_renewal

Body = dict[str, Any]

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
PLATFORM = Installation(sidecar_image="holdfast/sidecar:dev", agents_url="https://operator:8443", ca_bundle="PEM")
CONTRACT = Path(__file__).parents[1] / "contract"
LEASE_SECONDS = 20
RENEWAL = timedelta(seconds=10)
HEARTBEAT = timedelta(minutes=5)
WATCH_BACKOFF = timedelta(seconds=30)  # after a partition a kubelet's watch of pods takes as long to come back
RUNTIME_NOTICED = timedelta(minutes=3)  # a kubelet notices a hung container runtime as late
TOKEN_KNOWN = timedelta(seconds=45)  # a pod whose object is gone is authenticated as long


def job_body(name: str = "gpt", *, replicas: int = 3, minimum: int = 2, **spec: Any) -> Body:
    """A job as the API server returns it."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "FaultTolerantJob",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"job-{name}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": format_seconds(START),
        },
        "spec": {
            "workers": {
                "replicas": replicas,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "train:1",
                                "command": ["holdfast", "run", "--", "python", "train.py"],
                                "resources": {"requests": {"cpu": "900m"}},
                            }
                        ]
                    }
                },
            },
            "elasticity": {"minReplicas": minimum, "onFailure": "Shrink"},
            "checkpoint": {"volume": {"claimName": "checkpoints"}, "interval": 50},
            **spec,
        },
    }


def node_body(name: str, *, cpu: str = "2", ready: bool = True) -> Body:
    """A node as the API server returns it."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "Unknown",
                    "lastHeartbeatTime": format_seconds(START),
                }
            ],
            "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"},
            "nodeInfo": {"bootID": f"boot-{name}-1"},
        },
    }


class Sim:
    """One job on some nodes."""

    def __init__(self, body: Body | None = None, *, nodes: int = 4) -> None:
        self.now = START
        self.body = body or job_body()
        self.nodes = {f"node-{n}": node_body(f"node-{n}") for n in range(1, nodes + 1)}
        self.leases = dict.fromkeys(self.nodes, START)
        self.pods: dict[str, Body] = {}
        self.graves: dict[str, Body] = {}
        self.orphans: dict[str, datetime] = {}  # pods deleted by force whose processes run, and since when
        self.placed: set[str] = set()  # pods that were workers at some time
        self.healed: dict[str, datetime] = {}  # nodes whose partition has healed, and when
        self.hung: dict[str, datetime] = {}  # nodes whose container runtime hangs, and since when
        self.refusing: dict[str, tuple[str, str]] = {}  # nodes whose kubelet admits no pod: its reason and message
        self.renewals: dict[str, Renewals | None] = {}  # as the operator read them
        self.heard: dict[str, tuple[datetime, Body]] = {}
        self.started_at = START - timedelta(hours=1)
        self.applied, self.published, self.rendezvous_ip = "", -1, ""
        self.refusal: CreationError | None = None
        self.peers: list[Sim] = []  # other jobs on the same nodes
        self.document: Body | None = None
        self.documents: dict[int, Body] = {}
        self.world: Body | None = None
        self.highest: dict[int, int] = {}
        self.incidents: dict[tuple[int, int], Body] = {}
        self.checkpoints: Body = {}
        self.failing: Body = {}
        self.failing_of: dict[str, Body] = {}  # of a pod, in its place
        self.step = 0
        self.restored: Body | None = None  # what launchers say of the origin of their world's state
        self.unplaceable = False
        self.priority, self.preempts = 0, True  # of its pods, as admission sets it
        self.lingers = timedelta(0)  # so long its pods take to end
        self.uids = 0
        self.nonces = 0
        self.events: list[tuple[str, str]] = []
        self.counted: list[str] = []
        self.created_names: list[str] = []
        self.complete_at: int | None = None
        self.obeys = False  # launchers that are told to drain leave with 75
        self.refused: set[str] = set()  # checks that fail by what the job says
        self.preflights: dict[str, dict[str, str]] = {}  # by node: what each check of a worker there comes to
        self.cut_links: frozenset[frozenset[str]] = frozenset()  # pairs of nodes
        self.children: Body = {}
        self.frozen: dict[str, datetime] = {}  # pods whose launcher hangs, and since when
        self.cut_off: set[str] = set()  # pods whose network is broken, on nodes that are heard of
        self.deaf = False  # no report reaches the operator
        self.saving: set[str] = set()  # pods of which a rank is in a checkpoint
        self.books: dict[str, dict[str, float] | None] = {}  # what launchers book, by pod; None: nothing yet

    # What tests ask

    @property
    def status(self) -> Status:
        return Status.from_json(self.body.get("status") or {})

    def stamp(self) -> str:
        """Now, as in the contract."""
        return format_time(self.now)

    def names(self) -> list[str]:
        """Pods that exist."""
        return sorted(body["metadata"]["name"] for body in self.pods.values())

    def running(self) -> list[str]:
        """Pods whose launcher runs and is heard."""
        return sorted(self.pods[uid]["metadata"]["name"] for uid in self.pods if self._alive(uid))

    @property
    def launched(self) -> bool:
        """Whether Holdfast's launchers run in the workers."""
        return bool(self.body["spec"].get("rendezvous", {}).get("backend", "Holdfast") == "Holdfast")

    def uid(self, name: str) -> str:
        return next(uid for uid, body in self.pods.items() if body["metadata"]["name"] == name)

    def node_of(self, name: str) -> str:
        return str(self.pods[self.uid(name)]["spec"]["nodeName"])

    def world_names(self) -> list[str]:
        known = {**self.graves, **self.pods}
        return sorted(known[uid]["metadata"]["name"] for uid in self.world["members"]) if self.world else []

    # The operator

    def observe(self) -> Observed:
        job = parse_job(self.body)
        status = Status.from_json(job.raw_status)
        views = self._views(status)
        told = filter(None, (parse_report(body, at) for at, body in self.heard.values()))
        reports = spoken_for(job, status, views, told)
        doubted = doubtful(status, {name: self._node(name) for name in self.nodes}, reports, self.now)
        self.nonces += 1
        return Observed(
            job=job,
            status=status,
            platform=PLATFORM,
            job_key="ab" * 32,
            nonce=f"n{self.nonces}",
            started_at=self.started_at,
            pods=tuple(views),
            nodes=tuple(self._read(name) if name in doubted else self._node(name) for name in self.nodes),
            reports=reports,
            line=GangQueue(self._known(), self.now),
            usage=self._usage(),
            refusal=self.refusal,
            applied=self.applied,
            published=self.published,
            rendezvous_ip=self.rendezvous_ip,
        )

    def _views(self, status: Status) -> list[PodView]:
        """A list by labels and owner, the last states of what it lacks, and what a direct read finds of those."""
        known = {uid: parse_pod(body) for uid, body in self.pods.items()}
        listed = {uid for uid, view in known.items() if not view.relabelled}
        graves = {uid: parse_pod(body, absent=True) for uid, body in self.graves.items()}
        graves |= {uid: replace(known[uid], absent=True) for uid in known.keys() - listed}
        found = {worker.pod_uid for worker in unlisted(status, listed, graves)} & known.keys()
        present = {uid: view for uid, view in known.items() if uid in listed | found}
        return [*present.values(), *(view for uid, view in graves.items() if uid not in present)]

    def _read(self, name: str) -> Any:
        """A node whose life is in doubt, with what the operator knows of its Lease's renewals."""
        view = self._node(name)
        row = read_renewal(self.renewals.get(name), view.lease_renewed, ready=view.ready, now=self.now)
        self.renewals[name] = row
        return replace(view, renewals=row)

    def _node(self, name: str) -> Any:
        renewed = format_time(self.leases[name])
        return parse_node(self.nodes[name], {"spec": {"renewTime": renewed, "leaseDurationSeconds": LEASE_SECONDS}})

    def _known(self) -> GangQueueInput:
        return GangQueueInput(
            nodes=tuple(self._node(name) for name in self.nodes),
            usage=self._usage(),
            rivals=tuple(filter(None, (job.rival() for job in (self, *self.peers)))),
        )

    def rival(self) -> WaitingGang | None:
        """This job as others see it in the line."""
        found = rival_of(self.body)
        views = (parse_pod(body) for body in self.pods.values())
        standing = standing_of(view for view in views if not (view.bound or view.terminal or view.leaving))
        return found and replace(found, standing=standing or GangPriority())

    def _usage(self) -> tuple[NodeUsage, ...]:
        return tuple(filter(None, map(usage_of, self._all_pods())))

    def plan(self) -> Plan:
        return decide(self.observe(), self.now)

    def apply(self, plan: Plan, actions: int | None = None) -> bool:
        """Write the status, then so many of the actions (all if None). Returns whether anything was done."""
        patch = status_patch(self.body.get("status") or {}, plan.status.to_json())
        if patch:
            self.body["status"] = _merged(self.body.get("status"), copy.deepcopy(patch))
            self.body["metadata"]["resourceVersion"] = str(int(self.body["metadata"]["resourceVersion"]) + 1)
            self.counted += plan.counted
        self.events += [(event.reason, event.message) for event in plan.events]
        todo = plan.actions if actions is None else plan.actions[:actions]
        done = [self._do(action) for action in todo]
        return bool(patch) or any(done)

    def settle(self, cut: Callable[[], int | None] = lambda: None) -> None:
        """Passes until nothing is left to do now. ``cut``: after how many actions a pass dies (None: never)."""
        for _ in range(30):
            plan = self.plan()
            limit = cut()
            if not self.apply(plan, limit) and (limit is None or limit >= len(plan.actions)):
                return
            if limit is not None and limit < len(plan.actions):
                self.restart_operator(grace=True)
        raise AssertionError(f"passes do not come to rest: {self.plan()}")

    def _do(self, action: Any) -> bool:
        match action:
            case ApplyChildren():
                self.applied = action.digest
                self.children = {item["metadata"]["name"]: item for item in action.manifests}
                service = f"{self.body['metadata']['name']}-rendezvous"
                self.rendezvous_ip = "10.96.0.7" if service in self.children else ""
            case Publish():
                self._publish(action)
            case CreatePod():
                return self._create(action)
            case LiftGate():
                labels = dict(action.node_labels)
                return self._change(action.uid, lambda body: _lifted(body["spec"], labels))
            case LabelPod():
                labels = {c.LABEL_INDEX: action.index}
                return self._change(action.uid, lambda body: bool(body["metadata"]["labels"].update(labels) or True))
            case RestorePod():
                return self._change(action.uid, lambda body: _restored(body, dict(action.marks)))
            case DeletePod():
                return self.delete(action.uid)
            case DeleteJob():
                self.body["metadata"]["deletionTimestamp"] = format_seconds(self.now)
        return True

    def _publish(self, action: Publish) -> None:
        document = json.loads(json.dumps(action.document))
        before = self.documents.get(document["generation"])
        if before is not None:
            assert before["publication"] == document["publication"], "a generation was published twice"
            assert before["members"] == document["members"], "a generation changed its members"
        self.documents[document["generation"]] = document
        self.document, self.published = document, action.revision

    def _create(self, action: CreatePod) -> bool:
        if action.name in self.names():
            return False
        assert action.name not in self.created_names, f"the name {action.name} is used twice"
        self.created_names.append(action.name)
        self.uids += 1
        body = without_nulls(copy.deepcopy(dict(action.manifest)))  # the API server keeps none
        body["metadata"] |= {"uid": f"uid-{action.name}", "creationTimestamp": format_seconds(self.now)}
        body["status"] = {"phase": "Pending"}
        policy = "PreemptLowerPriority" if self.preempts else c.NEVER_PREEMPTS
        body["spec"] |= {"priority": self.priority, "preemptionPolicy": policy}
        self.pods[body["metadata"]["uid"]] = body
        return True

    def _change(self, uid: str, change: Callable[[Body], bool]) -> bool:
        return uid in self.pods and change(self.pods[uid])

    def restart_operator(self, *, grace: bool = False) -> None:
        """Everything in memory is lost; agents report again within seconds."""
        self.applied, self.published, self.refusal, self.rendezvous_ip = "", -1, None, ""
        self.heard, self.renewals = {}, {}
        self.started_at = self.now if grace else self.started_at

    # The cluster and the launchers

    def tick(self, seconds: float = 1.0, cut: Callable[[], int | None] = lambda: None) -> None:
        """Some time passes."""
        self.now += timedelta(seconds=seconds)
        for name in self.nodes:
            if self._node_up(name):
                self._renew(name)
        self._kubelets()
        self._schedule()
        self._launchers()
        self._report()
        self.settle(cut)
        self._check_gone()

    def _renew(self, name: str) -> None:
        """A kubelet renews its Lease every 10 s, and reports its state every 5 min or when it has changed."""
        if self.now - self.leases[name] >= RENEWAL or self.healed.get(name) == self.now:
            self.leases[name] = self.now
        condition = self.nodes[name]["status"]["conditions"][0]
        hung = name in self.hung and self.now - self.hung[name] >= RUNTIME_NOTICED
        state = "False" if hung else "True"
        if condition["status"] != state or self.now - parse_time(condition["lastHeartbeatTime"]) >= HEARTBEAT:
            condition |= {"status": state, "lastHeartbeatTime": format_seconds(self.now)}

    def _check_gone(self) -> None:
        """What no operator may do: two worlds train where it takes a pod that runs for gone."""
        status = self.status
        doubted = {worker.pod_uid for worker in status.workers if worker.phase is not Phase.ENDED}
        self.placed |= {worker.pod_uid for worker in status.workers if worker.known}
        for uid in (self.placed - doubted) | set(status.membership.gone):
            assert not self.process_runs(uid), f"{uid} is proved gone, and its process runs"

    def process_runs(self, uid: str) -> bool:
        """Whether a process of this pod runs on some machine, whoever can reach it."""
        body = self.pods.get(uid) or (self.graves[uid] if uid in self.orphans else None)
        if body is None or body["status"]["phase"] != "Running" or parse_pod(body).terminal:
            return False
        node = self.nodes.get(body["spec"].get("nodeName"))
        vouched = node is not None and any(
            taint["key"] == c.TAINT_OUT_OF_SERVICE for taint in node["spec"].get("taints") or ()
        )
        return node is not None and not vouched

    def run(self, seconds: float, *, until: Callable[[], bool] | None = None, step: float = 1.0) -> None:
        """Time passes, all of it or until the condition holds; it must, if one is given."""
        for _ in range(int(seconds / step)):
            if until is not None and until():
                return
            self.tick(step)
        assert until is None or until(), f"not within {seconds} s: {self.status.status}: {self.plan().message}"

    def _node_up(self, name: str) -> bool:
        return bool(self.nodes[name]["status"]["conditions"][0]["status"] == "True") and not self.nodes[name].get(
            "cut"
        )

    def _connected(self, node: str) -> bool:
        """Whether its kubelet knows which pods it is to run, and its runtime does as it is told."""
        watches = node not in self.healed or self.now >= self.healed[node] + WATCH_BACKOFF
        return node in self.nodes and self._node_up(node) and watches and node not in self.hung

    def _kubelets(self) -> None:
        for uid, since in list(self.orphans.items()):
            node = self.graves[uid]["spec"]["nodeName"]
            known = max(since, self.healed.get(node, since) + WATCH_BACKOFF) if node in self.healed else since
            if node not in self.nodes or (self._connected(node) and self.now >= known + self.lingers):
                del self.orphans[uid]
        for uid, body in list(self.pods.items()):
            node = body["spec"].get("nodeName")
            up = node is None or self._connected(node)
            if body["metadata"].get("deletionTimestamp") and up:
                if self.now < parse_time(body["metadata"]["deletionTimestamp"]) + self.lingers:
                    continue
                if body["status"]["phase"] == "Running":
                    self._end(body, 75)
                self.graves[uid] = self.pods.pop(uid)
            elif up and node and body["status"]["phase"] == "Pending":
                if node in self.refusing:
                    reason, message = self.refusing[node]
                    body["status"] = {"phase": "Failed", "reason": reason, "message": message}
                    continue
                body["status"] = {"phase": "Running", "podIP": f"10.0.0.{len(self.created_names)}"}
                if not self.launched:
                    running = {"name": "trainer", "state": {"running": {"startedAt": format_seconds(self.now)}}}
                    body["status"]["containerStatuses"] = [running]

    def _all_pods(self) -> list[Body]:
        return [body for sim in (self, *self.peers) for body in sim.pods.values()]

    def _schedule(self) -> None:
        taken: dict[str, int] = {}
        for body in self._all_pods():
            if body["spec"].get("nodeName") and body["status"]["phase"] not in ("Failed", "Succeeded"):
                taken[body["spec"]["nodeName"]] = taken.get(body["spec"]["nodeName"], 0) + 1
        for body in sorted(self.pods.values(), key=lambda body: str(body["metadata"]["name"])):
            if body["spec"].get("nodeName") or body["spec"].get("schedulingGates") or self.unplaceable:
                continue
            usable = [name for name in self.nodes if self._node_up(name) and self._suits(name, body)]
            free = [
                name for name in usable if taken.get(name, 0) < int(self.nodes[name]["status"]["allocatable"]["cpu"])
            ]
            kept = self._kept_for_others(body)
            free = [name for name in free if name not in kept]
            if free and not body["metadata"].get("deletionTimestamp"):
                last = _last(body)
                node = min(free, key=lambda name: (name in last, taken.get(name, 0), name))
                body["spec"]["nodeName"] = node
                body["status"].pop("nominatedNodeName", None)
                taken[node] = taken.get(node, 0) + 1
            elif self.preempts and not body["status"].get("nominatedNodeName"):
                self._preempt(body, [name for name in usable if name not in kept])

    def _kept_for_others(self, body: Body) -> set[str]:
        """Nodes on which the scheduler makes room for pods that this one does not outrank."""
        others = [other for other in self._all_pods() if other is not body and not other["spec"].get("nodeName")]
        kept = (o["status"].get("nominatedNodeName") for o in others if o["spec"]["priority"] >= self.priority)
        return {node for node in kept if node}

    def _preempt(self, body: Body, nodes: list[str]) -> None:
        """One pod of lower priority, the least of them, has to go for this one."""
        victims = [
            (other["spec"]["priority"], other["metadata"]["name"], peer)
            for peer in self.peers
            for other in peer.pods.values()
            if other["spec"].get("nodeName") in nodes and other["spec"]["priority"] < self.priority
        ]
        if victims:
            _, name, peer = min(victims, key=lambda victim: victim[:2])
            body["status"]["nominatedNodeName"] = peer.node_of(name)
            peer.evict(name, "PreemptionByScheduler")

    def _suits(self, node: str, body: Body) -> bool:
        labels = self.nodes[node]["metadata"].get("labels", {})
        selector = body["spec"].get("nodeSelector", {})
        return (
            not self.nodes[node]["spec"].get("unschedulable")
            and node not in _avoided(body)
            and all(labels.get(key) == value for key, value in selector.items())
            and not any(labels.get(key) in values for key, values in _excluded(body))
            and not any(_foreign(body, other) for other in self._live_on(node))
        )

    def _live_on(self, node: str) -> list[Body]:
        there = (body for body in self._all_pods() if body["spec"].get("nodeName") == node)
        return [body for body in there if body["status"]["phase"] not in ("Failed", "Succeeded")]

    def _alive(self, uid: str) -> bool:
        body = self.pods.get(uid) or (self.graves[uid] if uid in self.orphans else None)
        if body is None or body["status"]["phase"] != "Running" or body.get("dead"):
            return False
        node = body["spec"].get("nodeName")
        return node in self.nodes and self._node_up(node) and uid not in self.frozen and uid not in self.cut_off

    def _launchers(self) -> None:
        """What launchers do together, as far as the operator can see it."""
        if not self.launched:
            return
        if self.world is not None and not all(map(self._alive, self.world["members"])):
            self._world_ends("Infrastructure", "MemberLost")
        if self.document is None:
            return
        if self.obeys:
            self._drain(self.document["directives"]["drain"])
        generation = self.document["generation"]
        members = [member["podUID"] for member in self.document["members"]]
        drained = set(self.document["directives"]["drain"])
        live = [uid for uid in members if self._alive(uid) and uid not in drained]
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
        leaving = [uid for uid in uids if self._alive(uid)]
        for uid in leaving:
            self._end(self.pods[uid], 75)
        if self.world is not None and set(leaving) & set(self.world["members"]):
            self.world = None

    def _completion(self) -> None:
        if self.complete_at is not None and self.step >= self.complete_at and self.world is not None:
            for uid in self.world["members"]:
                self._end(self.pods[uid], 0)
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

    def _world_ends(self, cause: str, reason: str) -> None:
        if self.world is None:
            return
        world, self.world = self.world, None
        dead = next((uid for uid in world["members"] if not self._alive(uid)), world["members"][0])
        body = self.pods.get(dead) or self.graves.get(dead)
        if not any(map(self._alive, world["members"])):
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

    def _report(self) -> None:
        acknowledged = self.document["acknowledged"] if self.document else []
        done = {(pair["generation"], pair["attempt"]) for pair in acknowledged}
        known = {uid: self.graves[uid] for uid, since in self.orphans.items() if self.now - since < TOKEN_KNOWN}
        for uid, body in (self.pods | known).items() if not self.deaf else ():
            if self._alive(uid):
                self.heard[uid] = (self.now, self._report_of(uid, body, done))
            elif uid in self.frozen and self._node_up(body["spec"]["nodeName"]):  # its sidecar goes on
                silent = (self.now - self.frozen[uid]).total_seconds()
                self.heard[uid] = (self.now, {**self.heard[uid][1], "launcherSilentSeconds": silent})

    def _report_of(self, uid: str, body: Body, done: set[tuple[int, int]]) -> Body:
        report: Body = json.loads((CONTRACT / "report.json").read_text())
        name, node = body["metadata"]["name"], body["spec"]["nodeName"]
        report["pod"] |= {"uid": uid, "name": name, "node": node, "namespace": "ml"}
        report["notices"], report["gpu"] = body.get("notices", []), body.get("gpu", [])
        if not self.launched:
            return {**report, "launcher": None}
        world = self.world if self.world and uid in self.world["members"] else None
        checks = [
            {"name": n, "result": r, "message": f"{n} is {r}", **({"blame": "Job"} if n in self.refused else {})}
            for n, r in self.preflights.get(node, {}).items()
        ]
        unreached = [] if world else self._unreached(uid, node)
        if checks and unreached:  # as told by who became ready last
            checks = [check for check in checks if check["name"] != "Network"]
            checks.append({"name": "Network", "result": "Failed", "message": "cut", "unreached": unreached})
        report["preflight"] = {"checks": checks} if checks else None
        pair = {key: world[key] for key in ("generation", "attempt")} if world else None
        members = [member["podUID"] for member in self.document["members"]] if self.document else []
        lost = [other for other in members if not self._alive(other)]
        report["launcher"] |= {
            "podUID": uid,
            "pod": name,
            "node": node,
            "accepted": pair,
            "started": pair,
            "world": world,
            "restored": self.restored if world else None,
            "phase": "Running" if world else "Waiting",
            "message": "",
            "committedStep": self.step if world else None,
            "committedAt": format_time(self.now) if world else None,
            "checkpoints": self.checkpoints,
            "checkpointsFailing": self.failing_of.get(name, self.failing),
            "highestClaim": None,
            "quarantined": [],
            "notices": [_by_touch_file(notice) for notice in report["notices"]],
            "incidents": [incident for key, incident in self.incidents.items() if key not in done],
            "lostMembers": [{"podUID": other, "since": format_time(self.now), "how": "Silent"} for other in lost],
            "exit": None,
        }
        for rank in report["launcher"]["ranks"]:
            rank["phase"] = "checkpoint" if name in self.saving else "step"
        books = self.books.get(name, {})
        report["launcher"]["accounting"] = books and {"seconds": books, "unattributedSeconds": 0.2}
        return report

    def _unreached(self, uid: str, node: str) -> list[str]:
        """Workers that were there before this one, on nodes to which no packet passes."""
        own = int((self.pods.get(uid) or self.graves[uid])["metadata"]["labels"][c.LABEL_INCARNATION])
        return [
            other
            for other, body in self.pods.items()
            if self._alive(other)
            and int(body["metadata"]["labels"].get(c.LABEL_INCARNATION, own)) < own
            and frozenset((node, body["spec"]["nodeName"])) in self.cut_links
        ]

    # Faults

    def delete(self, uid: str) -> bool:
        """Ask for a pod's end, as kubectl does."""
        body = self.pods.get(uid)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return False
        body["metadata"]["deletionTimestamp"] = format_seconds(self.now)
        return True

    def evict(self, name: str, reason: str = "EvictionByEvictionAPI") -> None:
        """Its deletion, with the condition that says why."""
        body = self.pods[self.uid(name)]
        body["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
        self.delete(self.uid(name))

    def end(self, name: str, code: int, *, reason: str = "Error", message: str = "") -> None:
        """The trainer's container ends."""
        self._end(self.pods[self.uid(name)], code, reason=reason, message=message)

    def _end(self, body: Body, code: int, *, reason: str = "Error", message: str = "") -> None:
        state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else reason, "message": message}}
        phase = "Succeeded" if code == 0 else "Failed"
        statuses = [{"name": "trainer", "state": state}]
        kept = {key: body["status"].get(key) for key in ("podIP", "conditions")}
        body["status"] = {"phase": phase, "containerStatuses": statuses, **kept}

    def freeze(self, name: str) -> None:
        """The launcher hangs; its sidecar goes on."""
        self.frozen[self.uid(name)] = self.now

    def cut(self, *names: str) -> None:
        """The pod's network breaks, as when its CNI does: the kubelet, on the host's network, goes on."""
        self.cut_off.update(map(self.uid, names))

    def add_node(self, name: str, *, cpu: str = "2") -> None:
        """A node joins the cluster."""
        self.nodes[name], self.leases[name] = node_body(name, cpu=cpu), self.now

    def kill_node(self, name: str) -> None:
        """The node falls silent; the API server says so a little later."""
        self.nodes[name]["cut"] = True

    def node_unready(self, name: str) -> None:
        self.nodes[name]["status"]["conditions"][0]["status"] = "Unknown"

    def hang_runtime(self, name: str) -> None:
        """No container of this node starts or ends any more; its kubelet renews its Lease all the same."""
        self.hung[name] = self.now

    def relabel(self, name: str, *labels: str) -> None:
        """Somebody removes these labels of a pod, or with none named its owner."""
        meta = self.pods[self.uid(name)]["metadata"]
        for label in labels:
            del meta["labels"][label]
        if not labels:
            del meta["ownerReferences"]

    def heal_node(self, name: str, *, rebooted: bool) -> None:
        """The node is back; after a reboot nothing of before runs on it."""
        if self.nodes[name].pop("cut", None) and not rebooted:
            self.healed[name] = self.now
        self.nodes[name]["status"]["conditions"][0]["status"] = "True"
        if rebooted:
            self.hung.pop(name, None)
            self.healed.pop(name, None)
            self.orphans = {u: at for u, at in self.orphans.items() if self.graves[u]["spec"]["nodeName"] != name}
            self.nodes[name]["status"]["nodeInfo"]["bootID"] += "x"
            for body in self.pods.values():
                if body["spec"].get("nodeName") == name and body["status"]["phase"] == "Running":
                    self._end(body, 255, reason="Unknown")

    def notice(self, name: str) -> None:
        """The pod's sidecar saw a spot notice."""
        self.pods[self.uid(name)]["notices"] = [
            {
                "id": "n1",
                "reason": "spot",
                "source": "AWS",
                "action": "terminate",
                "deadline": None,
                "observedAt": None,
            }
        ]

    def obey_drain(self) -> None:
        """Launchers that were told to leave have committed and are gone."""
        told = [uid for uid in self.document["directives"]["drain"] if self._alive(uid)] if self.document else []
        if self.world is not None and set(told) & set(self.world["members"]):
            self.world = None
        for uid in told:
            self._end(self.pods[uid], 75)

    def force_gone(self, name: str) -> None:
        """Deleted by force: the object goes at once. Its process runs until its kubelet ends it."""
        uid = self.uid(name)
        self.graves[uid] = self.pods.pop(uid)
        if self.graves[uid]["status"]["phase"] == "Running":
            self.orphans[uid] = self.now


def _by_touch_file(notice: Body) -> Body:
    """A launcher's word for what its sidecar was told: all that the touch-file asks for."""
    return {**notice, "action": "drain" if notice["action"] in c.NOTICE_ACTIONS_LEAVING else "checkpoint"}


def _merged(before: Any, patch: Any) -> Any:
    """RFC 7396, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        kept[key] = _merged(kept.get(key), value)
    return {key: value for key, value in kept.items() if value is not None}


def _restored(body: Body, marks: Body) -> bool:
    body["metadata"]["labels"] |= marks["labels"]
    body["metadata"]["ownerReferences"] = marks["ownerReferences"]
    return True


def _lifted(spec: Body, labels: dict[str, str]) -> bool:
    """As the API server takes it: labels are added with the gate's end, never later."""
    gates = spec.pop("schedulingGates", [])
    others = [gate for gate in gates if gate["name"] != c.GANG_GATE]
    if others:
        spec["schedulingGates"] = others
    if len(others) == len(gates):
        return False
    if labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **labels}
    return True


def _terms(body: Body) -> list[Body]:
    affinity = body["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms: list[Body] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", []
    )
    return terms


def _avoided(body: Body) -> set[str]:
    return {node for term in _terms(body) for field in term.get("matchFields", []) for node in field["values"]}


def _last(body: Body) -> set[str]:
    affinity = body["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    fields = [field for term in terms for field in term["preference"].get("matchFields", [])]
    return {node for field in fields for node in field["values"]}


def _excluded(body: Body) -> list[tuple[str, list[str]]]:
    found = [expression for term in _terms(body) for expression in term.get("matchExpressions", [])]
    return [(expression["key"], expression["values"]) for expression in found if expression["operator"] == "NotIn"]


def _foreign(body: Body, other: Body) -> bool:
    """One of the two wants no worker beside it, or no other job's and they are of two jobs."""
    if any(pod["spec"].get("hostNetwork") for pod in (body, other)):
        return True
    exclusive = any("podAntiAffinity" in pod["spec"].get("affinity", {}) for pod in (body, other))
    return exclusive and body["metadata"]["labels"][c.LABEL_JOB] != other["metadata"]["labels"][c.LABEL_JOB]


@pytest.fixture
def sim() -> Sim:
    """Three workers on four nodes, nothing done yet."""
    return Sim()


@pytest.fixture
def make_sim() -> Callable[..., Sim]:
    """``make_sim(replicas=2, minimum=1, nodes=3, **spec)``."""

    def make(*, nodes: int = 4, **job: Any) -> Sim:
        return Sim(job_body(**job), nodes=nodes)

    return make


@pytest.fixture
def trained(sim: Sim) -> Sim:
    """The same, training with three."""

    def trains() -> bool:
        return sim.status.status == "Training"

    sim.run(60, until=trains)
    return sim


@pytest.fixture
def observed(sim: Sim) -> Observed:
    """A new job on a quiet cluster."""
    return replace(sim.observe())


@pytest.fixture
def final_exit() -> str:
    """What a launcher that will not try again leaves in the termination log."""
    return (CONTRACT / "termination.json").read_text()
