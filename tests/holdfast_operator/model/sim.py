"""A small cluster without processes or clocks: it applies plans, places pods, and lets launchers form worlds.

Everything goes through the same JSON as on a real cluster, so that parsing is tested with it.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bodies import START, Body, lift_gang_gate, merge, restore
from launchers import Launchers

from holdfast_operator.api import names as c
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.status import Phase, Status
from holdfast_operator.api.times import format_seconds, format_time
from holdfast_operator.cluster.agent_hub import steady
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
from holdfast_operator.views import (
    NodeUsage,
    NodeView,
    PodView,
    Renewals,
    parse_node,
    parse_pod,
    parse_report,
    read_renewal,
)

PLATFORM = Installation(sidecar_image="holdfast/sidecar:dev", agents_url="https://operator:8443", ca_bundle="PEM")
LEASE_SECONDS = 20
FAR = START + timedelta(days=3650)


class Sim(Launchers):
    """One job on some nodes, and its operator."""

    def __init__(self, body: Body | None = None, *, nodes: int = 4) -> None:
        super().__init__(body, nodes=nodes)
        self.placed: set[str] = set()  # pods that were workers at some time
        self.renewals: dict[str, Renewals | None] = {}  # as the operator read them
        self.started_at = START - timedelta(hours=1)
        self.applied, self.published, self.rendezvous_ip = "", -1, ""
        self.refusal: CreationError | None = None
        self.peers: list[Sim] = []  # other jobs on the same nodes
        self.documents: dict[int, Body] = {}
        self.nonces = 0
        self.events: list[tuple[str, str]] = []
        self.counted: list[str] = []
        self.children: Body = {}
        self._look_at, self._seen = START, b""  # when the operator looks again, and what it has seen

    # Time

    def tick(
        self, seconds: float = 1.0, cut: Callable[[], int | None] = lambda: None, *, only_if_due: bool = False
    ) -> None:
        """Some time passes. ``only_if_due``: the operator looks at the job when it is woken, or when it said so."""
        self.now += timedelta(seconds=seconds)
        for name in self.nodes:
            if self.node_up(name):
                self.renew_lease(name)
        self.run_kubelets()
        self.schedule()
        self.run_launchers()
        self.report()
        if not only_if_due or self.now >= self._look_at or self._news() != self._seen:
            self.settle(cut)
        self._check_gone()

    def run(self, seconds: float, *, until: Callable[[], bool] | None = None, step: float = 1.0) -> None:
        """Time passes, all of it or until the condition holds; it must, if one is given."""
        for number in range(int(seconds / step)):
            if until is not None and until():
                return
            self.tick(step, only_if_due=number > 0)
        assert until is None or until(), f"not within {seconds} s: {self.status.summary}: {self.plan().message}"

    def _news(self) -> bytes:
        """All that wakes the operator: the job, its pods, the nodes, and what is new in reports."""
        nodes = {name: (body["spec"], body["metadata"], _conditions(body)) for name, body in self.nodes.items()}
        reports = [steady(report) for at, body in self.heard.values() if (report := parse_report(body, at))]
        return pickle.dumps((self.body, self.all_pods(), nodes, list(self.graves), reports))

    def _check_gone(self) -> None:
        """What no operator may do: two worlds train where it takes a pod that runs for gone."""
        status = self.status
        doubted = {worker.pod_uid for worker in status.workers if worker.phase is not Phase.ENDED}
        self.placed |= {worker.pod_uid for worker in status.workers if worker.known}
        for uid in (self.placed - doubted) | set(status.membership.gone):
            assert not self.process_runs(uid), f"{uid} is proved gone, and its process runs"

    # What the operator observes

    @property
    def status(self) -> Status:
        return Status.from_json(self.body.get("status") or {})

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

    def _read(self, name: str) -> NodeView:
        """A node whose life is in doubt, with what the operator knows of its Lease's renewals."""
        view = self._node(name)
        row = read_renewal(self.renewals.get(name), view.lease_renewed, ready=view.ready, now=self.now)
        self.renewals[name] = row
        return replace(view, renewals=row)

    def _node(self, name: str) -> NodeView:
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
        return tuple(filter(None, map(usage_of, self.all_pods())))

    # What the operator does

    def plan(self) -> Plan:
        return decide(self.observe(), self.now)

    def apply(self, plan: Plan, actions: int | None = None) -> bool:
        """Write the status, then so many of the actions (all if None). Returns whether anything was done."""
        patch = status_patch(self.body.get("status") or {}, plan.status.to_json())
        if patch:
            self.body["status"] = merge(self.body.get("status"), copy.deepcopy(patch))
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
                later = plan.requeue_after
                self._look_at = FAR if later is None else self.now + timedelta(seconds=later)
                self._seen = self._news()
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
                return self._change(action.uid, lambda body: lift_gang_gate(body["spec"], labels))
            case LabelPod():
                labels = {c.LABEL_INDEX: action.index}
                return self._change(action.uid, lambda body: bool(body["metadata"]["labels"].update(labels) or True))
            case RestorePod():
                return self._change(action.uid, lambda body: restore(body, dict(action.marks)))
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


def _conditions(node: Body) -> list[tuple[str, str]]:
    """Without the times at which a kubelet reported them."""
    return [(condition["type"], condition["status"]) for condition in node["status"]["conditions"]]


Make = Callable[..., Sim]
"""``make_sim(replicas=2, minimum=1, nodes=3, **spec)``."""
