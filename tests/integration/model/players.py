"""Players of what is not real in these tests: kubelets, sidecars and launchers.

``Kubelets`` writes the status that kubelets would write and renews their leases; ``Launchers`` speaks the agents' API
over TLS with real projected tokens, by the rules of protocol.md.
"""

from __future__ import annotations

import http.client
import itertools
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError
from waiting import is_busy, wait_until

from holdfast_testbed.clock import stamp
from holdfast_testbed.fakes import fake_agents
from holdfast_testbed.fakes.operator_process import OperatorProcess

SHORT_WAITS = (str(Path(__file__).resolve().parents[1] / "scripts" / "short_waits.py"),)


class Operator(OperatorProcess):
    """The operator with short waits, as a process of its own. It is ready once it is started."""

    def __init__(
        self, kubeconfig: Path, folder: Path, program: Sequence[str] = SHORT_WAITS, **environment: str
    ) -> None:
        super().__init__(kubeconfig, folder, program, **environment)

    def start(self) -> None:
        """Start it; returns when it is ready."""
        super().start()
        wait_until(lambda: not self.alive() or self.ready(), "the operator is ready")
        assert self.alive(), self.log()

    def restart(self) -> None:
        """SIGKILL and start anew."""
        self.kill()
        self.start()

    def began(self) -> int:
        """How often the program began, in this process or an earlier one."""
        return self.log().count('"message": "holdfast operator ')

    def lines(self) -> list[dict[str, Any]]:
        """Its log, parsed: every line must be JSON."""
        return [json.loads(line) for line in self.log().splitlines()]

    def metric(self, name: str, **labels: str) -> float:
        """A sample of ``/metrics``; 0 when there is none."""
        listed = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{listed}}}" if labels else name
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{wanted} "):
                return float(line.rpartition(" ")[2])
        return 0.0


class Kubelets(threading.Thread):
    """Writes what kubelets write: leases, pods that run, pods that end."""

    def __init__(self, api: Any) -> None:
        super().__init__(name="kubelets", daemon=True)
        self._core = client.CoreV1Api(api)
        self._leases = client.CoordinationV1Api(api)
        self._over = threading.Event()
        self._addresses = itertools.count(2)
        self.nodes: dict[str, float] = {}
        self.silent: set[str] = set()
        """Nodes without power: no lease, no status."""
        self.broken: dict[str, tuple[str, str]] = {}
        """Namespace → (reason, message): its containers wait instead of running."""
        self.on_delete: list[Callable[[Any], bool]] = []
        """Asked about each pod that is told to go, until one says that it has gone."""
        self.errors: list[BaseException] = []

    def add_node(self, name: str, *, cpu: str = "4", labels: dict[str, str] | None = None) -> None:
        """A node that is Ready."""
        self._core.create_node({"metadata": {"name": name, "labels": labels or {}}, "spec": {}})
        capacity = {"cpu": cpu, "memory": "16Gi", "pods": "110"}
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": stamp()}
        info = dict.fromkeys(
            ("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeletVersion"), "x"
        ) | {"bootID": f"boot-{name}", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64"}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [condition], "nodeInfo": info}
        self._core.patch_node_status(name, {"status": status})
        self._renew(name)
        self.nodes[name] = time.monotonic()
        wait_until(lambda: not self._core.read_node(name).spec.taints, f"{name} has no taint")

    def remove_node(self, name: str) -> None:
        """The node object goes."""
        self.nodes.pop(name, None)
        self._core.delete_node(name)

    def end(self, namespace: str, name: str, code: int, reason: str = "Error", message: str = "") -> None:
        """All containers of a pod end."""
        pod = self._core.read_namespaced_pod(name, namespace)
        self._patch(pod, self._ended(pod, code, reason, message))

    def stop(self) -> None:
        self._over.set()
        self.join(120)

    def run(self) -> None:
        while not self._over.wait(0.15):
            try:
                self._tick()
            except (ApiException, HTTPError) as error:
                if not is_busy(error) and getattr(error, "status", None) not in (404, 409):
                    self.errors.append(error)

    def _tick(self) -> None:
        for name, renewed in list(self.nodes.items()):
            if name not in self.silent and time.monotonic() - renewed > 5:
                self._renew(name)
                self.nodes[name] = time.monotonic()
        for pod in self._core.list_pod_for_all_namespaces().items:
            if pod.spec.node_name in self.nodes and pod.spec.node_name not in self.silent:
                self._drive(pod)

    def _drive(self, pod: Any) -> None:
        if pod.metadata.deletion_timestamp is not None:
            if pod.status.phase == "Running":
                if all(gone(pod) for gone in self.on_delete):
                    self._patch(pod, self._ended(pod, 75, "Error", ""))
                return
            self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)
        elif pod.status.phase == "Pending":
            broken = self.broken.get(pod.metadata.namespace)
            self._patch(pod, self._waiting(pod, *broken) if broken else self._running(pod))

    def _running(self, pod: Any) -> dict[str, Any]:
        number = next(self._addresses)
        address = f"10.244.{number // 250}.{number % 250 + 2}"
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": stamp(),
            **self._containers(pod, {"running": {"startedAt": stamp()}}),
        }

    def _waiting(self, pod: Any, reason: str, message: str) -> dict[str, Any]:
        return {"phase": "Pending", **self._containers(pod, {"waiting": {"reason": reason, "message": message}})}

    def _ended(self, pod: Any, code: int, reason: str, message: str) -> dict[str, Any]:
        state = {
            "exitCode": code,
            "reason": reason if code else "Completed",
            "message": message,
            "finishedAt": stamp(),
        }
        phase = "Failed" if code else "Succeeded"
        return {"phase": phase, **self._containers(pod, {"terminated": state})}

    @staticmethod
    def _containers(pod: Any, state: dict[str, Any]) -> dict[str, Any]:
        def of(container: Any) -> dict[str, Any]:
            return {
                "name": container.name,
                "image": container.image,
                "imageID": "x",
                "ready": "running" in state,
                "restartCount": 0,
                "state": state,
            }

        return {
            "containerStatuses": [of(container) for container in pod.spec.containers],
            "initContainerStatuses": [of(container) for container in pod.spec.init_containers or ()],
        }

    def _patch(self, pod: Any, status: dict[str, Any]) -> None:
        meta = pod.metadata
        body = {"metadata": {"uid": meta.uid}, "status": status}
        self._core.patch_namespaced_pod_status(meta.name, meta.namespace, body)

    def _renew(self, node: str) -> None:
        spec = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": stamp()}
        body = {"metadata": {"name": node, "namespace": "kube-node-lease"}, "spec": spec}
        try:
            self._leases.patch_namespaced_lease(node, "kube-node-lease", body)
        except ApiException as error:
            if error.status != 404:
                raise
            self._leases.create_namespaced_lease("kube-node-lease", body)


class Agent:
    """The sidecar of one pod: a real token bound to the pod, real HTTPS."""

    def __init__(self, api: Any, operator: Operator, pod: Any, trust: str) -> None:
        self.pod = pod
        meta, node = pod.metadata, pod.spec.node_name
        self.worker = fake_agents.Worker(namespace=meta.namespace, name=meta.name, uid=meta.uid, node=node)
        self.uid = self.worker.uid
        self.membership: dict[str, Any] | None = None
        self.answers: list[int] = []
        self._operator = operator
        self._context = ssl.create_default_context(cadata=trust)
        self._token = token_for(api, pod)
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def report(self, launcher: dict[str, Any] | None, preflight: dict[str, Any] | None = None) -> int:
        """POST; returns the status code, 0 when nobody answered."""
        body = fake_agents.report(self.worker, launcher, number=next(self._numbers), preflight=preflight)
        while (status := self.call("POST", "/v1/report", json.dumps(body))[0]) == 429:
            time.sleep(0.1)  # as a sidecar waits that reported too often
        return status

    def call(self, method: str, path: str, body: str | None = None, token: str | None = None) -> tuple[int, Any]:
        """One request; (0, None) when nobody answered."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._operator.agents_port, timeout=40, context=self._context
        )
        headers = {"Authorization": f"Bearer {token or self._token}"}
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else None
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def stop(self) -> None:
        self._over.set()

    def _poll(self) -> None:
        while not self._over.is_set():
            after = self.membership["revision"] if self.membership else 0
            status, document = self.call("GET", f"/v1/membership?after={after}")
            self.answers.append(status)
            if status == 200:
                self.membership = document
            elif status != 204:
                self._over.wait(0.2)


def token_for(api: Any, pod: Any, audience: str = "holdfast") -> str:
    """What a projected volume would hold: a token bound to the pod."""
    meta = pod.metadata
    body = fake_agents.token_request(pod=meta.name, uid=meta.uid, audience=audience)
    made = client.CoreV1Api(api).create_namespaced_service_account_token("default", meta.namespace, body)
    return str(made.status.token)


class Launchers(threading.Thread):
    """All launchers of one job as one deterministic player, by the rules of protocol.md without the training."""

    def __init__(self, api: Any, operator: Operator, kubelets: Kubelets, namespace: str, job: str) -> None:
        super().__init__(name=f"launchers-{job}", daemon=True)
        self._kubelets = kubelets
        self._api = api
        self._core = client.CoreV1Api(api)
        self._operator = operator
        self._namespace = namespace
        self._job = job
        self._over = threading.Event()
        self._trust: str | None = None
        self.agents: dict[str, Agent] = {}
        self.dead: set[str] = set()
        """Pods whose launcher died or was cut off."""
        self.ordered: set[str] = set()
        """Pods that left because the operator said so, and not since somebody deleted them: no incident."""
        self.left: dict[str, float] = {}
        """Pods whose launcher leaves on request, since when."""
        self.preflights: dict[str, dict[str, Any]] = {}
        """What the sidecars on a node tell of it, by its name."""
        self.broken = False
        """The world has lost a member and cannot go on without it."""
        self.world: dict[str, Any] | None = None
        self.worlds: list[tuple[int, int, tuple[str, ...]]] = []
        self.step = 0
        self.incidents: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []

    def lose(self, uid: str) -> None:
        """The launcher of this pod dies without a word."""
        self.dead.add(uid)

    def leave(self, pod: Any) -> bool:
        """SIGTERM: commit, leave. True once the others go on without it (or there is nobody)."""
        if pod.metadata.namespace != self._namespace or pod.metadata.uid not in self.agents:
            return True
        since = self.left.setdefault(pod.metadata.uid, time.monotonic())
        if self.world is None or pod.metadata.uid not in self.world["members"]:
            return True
        return time.monotonic() - since > 2

    def stop(self) -> None:
        self._over.set()
        self.join(120)
        for agent in self.agents.values():
            agent.stop()

    def run(self) -> None:
        while not self._over.wait(0.2):
            try:
                self._tick()
            except (ApiException, HTTPError) as error:
                if not is_busy(error) and getattr(error, "status", None) not in (404, 409):
                    self.errors.append(error)

    def _tick(self) -> None:
        self._meet()
        membership = fake_agents.newest(agent.membership for agent in self.agents.values())
        if membership is not None:
            self._obey(membership)
            self._form(membership)
        if self.world is not None and not self.broken:
            self.step += 1
        for uid, agent in list(self.agents.items()):
            if uid not in self.dead and uid not in self.left:
                agent.report(self._status(agent), self.preflights.get(agent.pod.spec.node_name))

    def _meet(self) -> None:
        """Launchers start in the pods that run."""
        pods = self._core.list_namespaced_pod(
            self._namespace, label_selector=f"holdfast.dev/job-name={self._job}"
        ).items
        for pod in pods:
            if pod.status.phase == "Running" and pod.metadata.uid not in self.agents | dict.fromkeys(self.dead):
                if self._trust is None:
                    bundle = self._core.read_namespaced_config_map(f"{self._job}-holdfast-ca", self._namespace)
                    self._trust = str(bundle.data["ca.crt"])
                self.agents[pod.metadata.uid] = Agent(self._api, self._operator, pod, self._trust)
        running = {pod.metadata.uid for pod in pods if pod.status.phase == "Running"}
        for uid in set(self.agents) - running:
            self.agents.pop(uid).stop()

    def _obey(self, document: dict[str, Any]) -> None:
        """Who is told to leave commits, and ends once the others go on without it (or nobody is to go on)."""
        told = set(document["directives"]["drain"])
        self.ordered |= {uid for uid in told & set(self.agents) - set(self.left) if not self._deleted(uid)}
        if self.world is not None and set(self.world["members"]) <= told:
            self.world, self.broken = None, False
        for uid in told & set(self.agents):
            pod = self.agents[uid].pod
            if self.leave(pod):
                self._kubelets.end(self._namespace, pod.metadata.name, 75)

    def _deleted(self, uid: str) -> bool:
        pod = self._core.read_namespaced_pod(self.agents[uid].pod.metadata.name, self._namespace)
        return pod.metadata.deletion_timestamp is not None

    def _form(self, membership: dict[str, Any]) -> None:
        """A new world where the rules allow one."""
        ended = self.world
        up = set(self.agents) - self.dead - set(self.left) - set(membership["directives"]["drain"])
        self.incidents = fake_agents.unacknowledged(self.incidents, membership)
        self.world, self.broken = fake_agents.form(membership, ended, broken=self.broken, up=up)
        if self.world is not None and self.world is not ended:
            self.worlds.append((self.world["generation"], self.world["attempt"], tuple(self.world["members"])))
        gone = fake_agents.gone(ended, self.world)
        if ended and gone and not set(gone) <= self.ordered:
            drained = set(gone) <= set(self.left)
            pod = next((member["pod"] for member in membership["members"] if member["podUID"] == gone[0]), None)
            steps = 0 if drained else 3
            self.incidents.append(
                fake_agents.incident(ended, gone, at=stamp(), drained=drained, pod=pod, lost_steps=steps)
            )

    def _status(self, agent: Agent) -> dict[str, Any]:
        now, seen = stamp(), {uid for world in self.worlds for uid in world[2]}
        return fake_agents.status(
            agent.worker,
            self.world,
            step=self.step,
            at=now,
            broken=self.broken,
            tiers=("shared",),
            incidents=self.incidents,
            lost=dict.fromkeys(sorted(self.dead & seen), now),
        )
