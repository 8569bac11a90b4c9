"""The API server, kubelets and scheduler of a small cluster that runs one job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from bodies import START, Body, avoided_nodes, excluded_labels, job_body, keeps_apart, last_choices, node_body

from holdfast_operator.api import names as c
from holdfast_operator.api.times import format_seconds, format_time, parse_time
from holdfast_operator.views import parse_pod

RENEWAL = timedelta(seconds=10)
HEARTBEAT = timedelta(minutes=5)
WATCH_BACKOFF = timedelta(seconds=30)  # after a partition a kubelet's watch of pods takes as long to come back
RUNTIME_NOTICED = timedelta(minutes=3)  # a kubelet notices a hung container runtime as late


def _time(text: str) -> datetime:
    time = parse_time(text)
    assert time is not None, text
    return time


class Cluster:
    """Nodes and the pods of one job on them."""

    peers: Sequence[Cluster]  # other jobs on the same nodes

    def __init__(self, body: Body | None = None, *, nodes: int = 4) -> None:
        self.now = START
        self.body = body or job_body()
        self.nodes = {f"node-{n}": node_body(f"node-{n}") for n in range(1, nodes + 1)}
        self.leases = dict.fromkeys(self.nodes, START)
        self.pods: dict[str, Body] = {}
        self.graves: dict[str, Body] = {}
        self.orphans: dict[str, datetime] = {}  # pods deleted by force whose processes run, and since when
        self.healed: dict[str, datetime] = {}  # nodes whose partition has healed, and when
        self.hung: dict[str, datetime] = {}  # nodes whose container runtime hangs, and since when
        self.refusing: dict[str, tuple[str, str]] = {}  # nodes whose kubelet admits no pod: its reason and message
        self.frozen: dict[str, datetime] = {}  # pods whose launcher hangs, and since when
        self.cut_off: set[str] = set()  # pods whose network is broken, on nodes that are heard of
        self.unplaceable = False
        self.priority, self.preempts = 0, True  # of its pods, as admission sets it
        self.lingers = timedelta(0)  # so long its pods take to end
        self.created_names: list[str] = []

    # Questions

    def stamp(self) -> str:
        """Now, as in the contract."""
        return format_time(self.now)

    def names(self) -> list[str]:
        """Pods that exist."""
        return sorted(body["metadata"]["name"] for body in self.pods.values())

    def running(self) -> list[str]:
        """Pods whose launcher runs and is heard."""
        return sorted(self.pods[uid]["metadata"]["name"] for uid in self.pods if self.alive(uid))

    @property
    def launched(self) -> bool:
        """Whether Holdfast's launchers run in the workers."""
        return bool(self.body["spec"].get("rendezvous", {}).get("backend", "Holdfast") == "Holdfast")

    def uid(self, name: str) -> str:
        return next(uid for uid, body in self.pods.items() if body["metadata"]["name"] == name)

    def node_of(self, name: str) -> str:
        return str(self.pods[self.uid(name)]["spec"]["nodeName"])

    def all_pods(self) -> list[Body]:
        return [body for sim in (self, *self.peers) for body in sim.pods.values()]

    def _live_on(self, node: str) -> list[Body]:
        there = (body for body in self.all_pods() if body["spec"].get("nodeName") == node)
        return [body for body in there if body["status"]["phase"] not in ("Failed", "Succeeded")]

    def node_up(self, name: str) -> bool:
        return bool(self.nodes[name]["status"]["conditions"][0]["status"] == "True") and not self.nodes[name].get(
            "cut"
        )

    def alive(self, uid: str) -> bool:
        body = self.pods.get(uid) or (self.graves[uid] if uid in self.orphans else None)
        if body is None or body["status"]["phase"] != "Running" or body.get("dead"):
            return False
        node = body["spec"].get("nodeName")
        return node in self.nodes and self.node_up(node) and uid not in self.frozen and uid not in self.cut_off

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

    # Requests to the API server

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

    def end_pod(self, body: Body, code: int, *, reason: str = "Error", message: str = "") -> None:
        state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else reason, "message": message}}
        phase = "Succeeded" if code == 0 else "Failed"
        statuses = [{"name": "trainer", "state": state}]
        kept = {key: body["status"].get(key) for key in ("podIP", "conditions")}
        body["status"] = {"phase": phase, "containerStatuses": statuses, **kept}

    # Kubelets

    def renew_lease(self, name: str) -> None:
        """A kubelet renews its Lease every 10 s, and reports its state every 5 min or when it has changed."""
        if self.now - self.leases[name] >= RENEWAL or self.healed.get(name) == self.now:
            self.leases[name] = self.now
        condition = self.nodes[name]["status"]["conditions"][0]
        hung = name in self.hung and self.now - self.hung[name] >= RUNTIME_NOTICED
        state = "False" if hung else "True"
        if condition["status"] != state or self.now - _time(condition["lastHeartbeatTime"]) >= HEARTBEAT:
            condition |= {"status": state, "lastHeartbeatTime": format_seconds(self.now)}

    def _connected(self, node: str) -> bool:
        """Whether its kubelet knows which pods it is to run, and its runtime does as it is told."""
        watches = node not in self.healed or self.now >= self.healed[node] + WATCH_BACKOFF
        return node in self.nodes and self.node_up(node) and watches and node not in self.hung

    def run_kubelets(self) -> None:
        for uid, since in list(self.orphans.items()):
            node = self.graves[uid]["spec"]["nodeName"]
            known = max(since, self.healed.get(node, since) + WATCH_BACKOFF) if node in self.healed else since
            if node not in self.nodes or (self._connected(node) and self.now >= known + self.lingers):
                del self.orphans[uid]
        for uid, body in list(self.pods.items()):
            node = body["spec"].get("nodeName")
            up = node is None or self._connected(node)
            if body["metadata"].get("deletionTimestamp") and up:
                if self.now < _time(body["metadata"]["deletionTimestamp"]) + self.lingers:
                    continue
                if body["status"]["phase"] == "Running":
                    self.end_pod(body, 75)
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

    # The scheduler

    def schedule(self) -> None:
        taken: dict[str, int] = {}
        for body in self.all_pods():
            if body["spec"].get("nodeName") and body["status"]["phase"] not in ("Failed", "Succeeded"):
                taken[body["spec"]["nodeName"]] = taken.get(body["spec"]["nodeName"], 0) + 1
        for body in sorted(self.pods.values(), key=lambda body: str(body["metadata"]["name"])):
            if body["spec"].get("nodeName") or body["spec"].get("schedulingGates") or self.unplaceable:
                continue
            usable = [name for name in self.nodes if self.node_up(name) and self._suits(name, body)]
            free = [
                name for name in usable if taken.get(name, 0) < int(self.nodes[name]["status"]["allocatable"]["cpu"])
            ]
            kept = self._kept_for_others(body)
            free = [name for name in free if name not in kept]
            if free and not body["metadata"].get("deletionTimestamp"):
                last = last_choices(body)
                node = min(free, key=lambda name: (name in last, taken.get(name, 0), name))
                body["spec"]["nodeName"] = node
                body["status"].pop("nominatedNodeName", None)
                taken[node] = taken.get(node, 0) + 1
            elif self.preempts and not body["status"].get("nominatedNodeName"):
                self._preempt(body, [name for name in usable if name not in kept])

    def _kept_for_others(self, body: Body) -> set[str]:
        """Nodes on which the scheduler makes room for pods that this one does not outrank."""
        others = [other for other in self.all_pods() if other is not body and not other["spec"].get("nodeName")]
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
            and node not in avoided_nodes(body)
            and all(labels.get(key) == value for key, value in selector.items())
            and not any(labels.get(key) in values for key, values in excluded_labels(body))
            and not any(keeps_apart(body, other) for other in self._live_on(node))
        )
