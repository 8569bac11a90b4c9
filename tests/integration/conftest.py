"""A real control plane, a real operator process under the chart's rights, and players of kubelets and launchers.

Nothing of Kubernetes is faked but the machines: ``Kubelets`` writes the status that kubelets would write and renews
their leases; ``Launchers`` speaks the agents' API over TLS with real projected tokens, by the rules of protocol.md.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from holdfast_testbed.clock import stamp
from holdfast_testbed.cluster.cluster import Cluster, recorded_clusters, remove_cluster
from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.fakes import chart, fake_agents
from holdfast_testbed.fakes.operator_process import OperatorProcess

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "integration-"
JOBS = ("holdfast.dev", "v1alpha1")
PLURAL = "faulttolerantjobs"
BUSY = (0, 429, 500, 502, 503, 504)
"""Of the API server as a whole, on a machine that has much else to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the control plane."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The control plane, with the CRD installed."""
    _remove_leftovers()
    made = Cluster.up(name=f"{PREFIX}{os.getpid()}", nodes=0)
    try:
        made.kubectl("apply", "-f", str(REPOSITORY / "crds"))
        wait_until(lambda: _explains(made, "ftj"), "the kind is discovered, and its schema published")
        yield made
    finally:
        made.down()


def _explains(cluster: Cluster, kind: str) -> bool:
    """Schemas are published some time after the kind itself."""
    try:
        return bool(cluster.kubectl("explain", kind))
    except CommandFailedError:
        return False


def _remove_leftovers() -> None:
    """Clusters of test runs that were killed: their name tells the process that made them."""
    for name in recorded_clusters():
        pid = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_cluster(name)


@pytest.fixture(scope="package")
def audited(cluster: Cluster) -> Callable[[], list[dict[str, Any]]]:
    """What service accounts asked for since the cluster is up, as far as it is written down."""

    def read() -> list[dict[str, Any]]:
        newest = cluster.control_plane.audit_log
        older = sorted(newest.parent.glob(f"{newest.stem}-*{newest.suffix}"))
        lines = [line for path in (*older, newest) for line in path.read_bytes().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    return read


@pytest.fixture(scope="package")
def admin(cluster: Cluster) -> Any:
    """An API client with all rights, that asks again what the API server has no time to answer."""
    configuration = client.Configuration()
    config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=configuration)
    configuration.retries = Retry(
        total=6, backoff_factor=0.5, status_forcelist=BUSY, allowed_methods=("GET",), raise_on_status=False
    )
    return client.ApiClient(configuration)


@pytest.fixture
def namespace(admin: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own."""
    api = client.CoreV1Api(admin)
    made = api.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(generate_name="t-")))
    name = str(made.metadata.name)
    wait_until(lambda: bool(api.list_namespaced_service_account(name).items), "the service account is there")
    yield name
    api.delete_namespace(name)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 240.0) -> Any:
    """The condition's first true value. Raises when there is none in time.

    What the API server has no time to answer is asked again.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except (ApiException, HTTPError) as error:
            if not is_busy(error):
                raise
            value = None
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def is_busy(error: ApiException | HTTPError) -> bool:
    """Whether the call was right and only its time was wrong."""
    return isinstance(error, HTTPError) or error.status in BUSY


@pytest.fixture(name="wait_until", scope="package")
def _wait_until() -> Callable[..., Any]:
    return wait_until


class Operator(OperatorProcess):
    """``python -m holdfast_operator`` as a process of its own. It is ready once it is started."""

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


class Stage:
    """One namespace with nodes of its own, and what a test does there."""

    def __init__(self, api: Any, operator: Operator, kubelets: Kubelets, namespace: str) -> None:
        self.api = api
        self.core = client.CoreV1Api(api)
        self.custom = client.CustomObjectsApi(api)
        self.operator = operator
        self.kubelets = kubelets
        self.namespace = namespace
        self.launchers: list[Launchers] = []
        self._nodes: list[str] = []

    def nodes(self, count: int, cpu: str = "4", labels: dict[str, str] | None = None) -> list[str]:
        """Nodes that only this test's pods may use."""
        for number in range(count):
            name = f"{self.namespace}-n{len(self._nodes)}"
            own = {"test": self.namespace, "kubernetes.io/hostname": name}
            self.kubelets.add_node(name, cpu=cpu, labels={**own, **(labels or {})})
            self._nodes.append(name)
            assert number < count
        return list(self._nodes)

    def remove_node(self, name: str) -> None:
        """One of them is gone for good."""
        self._nodes.remove(name)
        self.kubelets.remove_node(name)

    def job(self, name: str = "gpt", *, replicas: int = 3, cpu: str = "1", **spec: Any) -> dict[str, Any]:
        """A job's manifest, for this test's nodes."""
        container = {"name": "trainer", "image": "train:1", "resources": {"requests": {"cpu": cpu}}}
        pod = {"nodeSelector": {"test": self.namespace}, "containers": [container]}
        return {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "FaultTolerantJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"workers": {"replicas": replicas, "template": {"spec": pod}}, **spec},
        }

    def apply(self, body: dict[str, Any]) -> str:
        """Create the job; returns its UID."""
        made = self.custom.create_namespaced_custom_object(*JOBS, self.namespace, PLURAL, body)
        return str(made["metadata"]["uid"])

    def play(self, name: str = "gpt", preflights: dict[str, dict[str, Any]] | None = None) -> Launchers:
        """Launchers start in whatever pods of the job run."""
        player = Launchers(self.api, self.operator, self.kubelets, self.namespace, name)
        player.preflights = preflights or {}
        player.start()
        self.launchers.append(player)
        self.kubelets.on_delete.append(player.leave)
        return player

    def run(self, name: str = "gpt", **options: Any) -> Launchers:
        """A job that trains with all its workers."""
        replicas = int(options.get("replicas", 3))
        self.apply(self.job(name, **options))
        player = self.play(name)
        self.wait(lambda: self.condition("Ready", name)["status"] == "True", f"{name} is ready")
        # There may be more by now: a job that may grow begins at once.
        self.wait(lambda: len(self.members(name)) >= replicas, "all are members")
        return player

    def read(self, name: str = "gpt") -> dict[str, Any]:
        """The job."""
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(*JOBS, self.namespace, PLURAL, name)
        return found

    def status(self, name: str = "gpt") -> dict[str, Any]:
        """Its status, {} before there is one."""
        found: dict[str, Any] = self.read(name).get("status") or {}
        return found

    def ready_workers(self) -> tuple[int | None, int | None]:
        """How many workers train, and how many are wanted."""
        status = self.status()
        return status.get("readyWorkers"), status.get("workers")

    def members(self, name: str = "gpt") -> list[str]:
        """Pods in the published generation."""
        listed = (self.status(name).get("membership") or {}).get("members") or []
        return [str(member["pod"]) for member in listed]

    def condition(self, kind: str, name: str = "gpt") -> dict[str, Any]:
        """A condition, with status Unknown before there is one."""
        listed = self.status(name).get("conditions") or []
        return next((c for c in listed if c["type"] == kind), {"status": "Unknown", "reason": "", "message": ""})

    def pods(self, name: str = "gpt") -> list[Any]:
        """Pods of the job."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"holdfast.dev/job-name={name}")
        return list(found.items)

    def pod(self, name: str) -> Any:
        """A pod by name."""
        return self.core.read_namespaced_pod(name, self.namespace)

    def uid(self, name: str) -> str:
        """UID of a pod."""
        return str(self.pod(name).metadata.uid)

    def lose(self, pod: str, player: Launchers) -> None:
        """SIGKILL to a worker's launcher: its peers see it, the kubelet reports 137."""
        player.lose(self.uid(pod))
        self.kubelets.end(self.namespace, pod, 137)

    def recovered(self, members: list[str]) -> bool:
        """Whether these are members, train, and the job says so."""
        trains = self.launchers[-1].world or {"members": []}
        in_it = {pod.metadata.name for pod in self.pods() if pod.metadata.uid in trains["members"]}
        return self.members() == members and in_it == set(members) and self.condition("Ready")["status"] == "True"

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 240.0) -> Any:
        """The condition's first true value; without one, a failure that shows the job and the operator's log."""
        try:
            return wait_until(condition, what, seconds)
        except AssertionError as error:
            told = "\n".join(self.operator.log().splitlines()[-25:])
            jobs = self.custom.list_namespaced_custom_object(*JOBS, self.namespace, PLURAL)["items"]
            shown = json.dumps([job.get("status") for job in jobs], indent=1)[:6000]
            errors = [*self.kubelets.errors, *(e for player in self.launchers for e in player.errors)]
            raise AssertionError(f"{error}\nstatus: {shown}\nplayers: {errors}\noperator:\n{told}") from None

    def close(self) -> None:
        """Everything of the test goes, at once: how a job's things go is for tests that say so."""
        for player in self.launchers:
            player.stop()
            self.kubelets.on_delete.remove(player.leave)
        for job in self.custom.list_namespaced_custom_object(*JOBS, self.namespace, PLURAL)["items"]:
            self.custom.delete_namespaced_custom_object(*JOBS, self.namespace, PLURAL, job["metadata"]["name"])
        wait_until(self._remove_pods, "all pods are gone")
        self.kubelets.broken.pop(self.namespace, None)
        for node in self._nodes:
            self.kubelets.remove_node(node)

    def _remove_pods(self) -> bool:
        """Not left to the garbage collector, which comes to know the kind of the owner up to 30 s after its CRD."""
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        return not self.core.list_namespaced_pod(self.namespace).items


@pytest.fixture(scope="package")
def rights(cluster: Cluster) -> Path:
    """A kubeconfig of the chart's own service account, with exactly the chart's rights."""
    return chart.grant(cluster, chart.rights())


@pytest.fixture(scope="package")
def operator_class() -> type[Operator]:
    """For modules that run it with settings of their own."""
    return Operator


@pytest.fixture(scope="module")
def operator(rights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A running operator. It ends without complaint."""
    made = Operator(rights, tmp_path_factory.mktemp("operator"))
    made.start()
    yield made
    assert made.stop() == 0, made.log()[-3000:]


@pytest.fixture(scope="module")
def kubelets(admin: Any) -> Iterator[Kubelets]:
    """Players of all nodes."""
    made = Kubelets(admin)
    made.start()
    yield made
    made.stop()
    assert made.errors == []


@pytest.fixture
def stage(admin: Any, operator: Operator, kubelets: Kubelets, namespace: str) -> Iterator[Stage]:
    """A namespace to play in."""
    made = Stage(admin, operator, kubelets, namespace)
    yield made
    made.close()


@pytest.fixture(name="token_for", scope="package")
def _token_for() -> Callable[..., str]:
    return token_for
