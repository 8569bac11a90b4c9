"""A cluster: the typed interface that tests and the demo use."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_testbed.build.commands import run
from holdfast_testbed.build.images import build_all
from holdfast_testbed.build.programs import program
from holdfast_testbed.cluster import removal
from holdfast_testbed.cluster.addressing import Plan, free_number, make_plan, node_number
from holdfast_testbed.cluster.controlplane import PARTS, ControlPlane
from holdfast_testbed.cluster.kubeconfig import token_user, write_kubeconfig
from holdfast_testbed.cluster.state import Ports, State, load_state
from holdfast_testbed.constants import DEFAULT_CLUSTER, MACHINE_LOCK, NODE_MONITOR_GRACE_SECONDS
from holdfast_testbed.errors import AlreadyUpError, CommandFailedError, NoSuchClusterError, TestbedError
from holdfast_testbed.fakes import metadata
from holdfast_testbed.locks import locked
from holdfast_testbed.node import network, pod_processes, processes, volumes
from holdfast_testbed.node.config import instance_id
from holdfast_testbed.node.node import Node
from holdfast_testbed.node.processes import Process
from holdfast_testbed.ports import free_port
from holdfast_testbed.progress_output import say
from holdfast_testbed.settings import settings
from holdfast_testbed.waiting import wait_for

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_CONTROL_PLANE_ONLY = 63
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running Kubernetes. `Cluster.up` creates one, and `Cluster.load` returns an existing one."""

    state: State

    @classmethod
    def up(
        cls,
        *,
        name: str = DEFAULT_CLUSTER,
        nodes: int = 3,
        node_monitor_grace_seconds: int = NODE_MONITOR_GRACE_SECONDS,
        images: bool = True,
        replace: bool = False,
    ) -> Cluster:
        """Start a cluster, which is usable when this returns.

        Without nodes, there is only the control plane. Images are built if their content changed, and loaded into
        each node, unless `images` is false. The rest of an earlier run under this name is removed first, and with
        `replace` also a running cluster.
        """
        folder = _folder(name)
        lock = folder.with_name(f"{name}.lock")
        with locked(lock, what=f"cluster '{name}'"):
            _clear_the_way(folder, replace=replace)
            state = _reserve(folder, nodes, node_monitor_grace_seconds)
            cluster = cls(state=state)
            try:
                cluster._start(images)
            except BaseException:
                removal.remove(state)
                lock.unlink()  # while it is held: a waiting process detects this and creates a new one
                raise
            state.complete_file.touch()
        return cluster

    @classmethod
    def load(cls, name: str = DEFAULT_CLUSTER) -> Cluster:
        """Return the cluster of this name that was started before."""
        state = load_state(_folder(name))
        if not state.complete_file.exists():
            raise NoSuchClusterError(
                f"cluster '{name}' did not start completely: remove it with 'down --name {name}'"
            )
        return cls(state=state)

    def _start(self, images: bool) -> None:
        """Start all parts, each as soon as its dependencies run."""
        self.control_plane.prepare()
        with ThreadPoolExecutor() as pool:
            control_plane = pool.submit(self.control_plane.start)
            nodes = [pool.submit(_boot, self.node(node.number)) for node in self.state.plan.nodes]
            archives = pool.submit(build_all).result() if images and nodes else {}
            for part in (control_plane, *nodes):
                part.result()
        wait_for(self._usable, what="namespace 'default' has its service account", seconds=120, every=0.1)
        self._import(archives.values())
        self.wait_for_nodes()

    def _usable(self) -> bool:
        return "default" in self.kubectl("get", "serviceaccounts", "-o", "name")

    def wait_for_nodes(self) -> None:
        """Return when every node is Ready."""
        if not self.nodes:
            return
        wait_for(
            lambda: len(self.ready_nodes()) == self.nodes,
            what=f"all {self.nodes} nodes are Ready",
            seconds=180,
            every=0.25,
            explain=lambda: f"Ready: {', '.join(self.ready_nodes()) or 'none'}; logs are in {self.state.logs}",
        )

    def ready_nodes(self) -> list[str]:
        """Return the names of the nodes that are Ready and have no taint."""
        shown = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return [
            node["metadata"]["name"]
            for node in shown
            if not node["spec"].get("taints")
            and {"type": "Ready", "status": "True"}.items() <= _ready_of(node).items()
        ]

    def load_images(self) -> None:
        """Build changed images, and load all images into every node that has power."""
        self._import(build_all().values())

    def _import(self, paths: Iterable[Path]) -> None:
        with ThreadPoolExecutor() as pool:
            nodes = [node for node in map(self.node, range(1, self.nodes + 1)) if node.alive()]
            loads = [pool.submit(node.import_image, path) for node in nodes for path in paths]
            for load in loads:
                load.result()

    def down(self) -> None:
        """Remove the cluster and everything that it created."""
        remove_cluster(self.name)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.state.name

    @property
    def nodes(self) -> int:
        """The number of nodes, counted from 1."""
        return len(self.state.plan.nodes)

    def node(self, number: int) -> Node:
        """Return node `number`, counted from 1; its name is `node-<number>`."""
        return Node(state=self.state, plan=self.state.plan.node(number))

    @property
    def host_address(self) -> str:
        """The machine's own address in the cluster's network. Pods reach servers that listen there."""
        return self.state.plan.host_address

    def service_address(self, last: int) -> str:
        """Return a cluster IP for a service: number `last` of the first 256."""
        return self.state.plan.first_service_address.rsplit(".", 1)[0] + f".{last}"

    @property
    def control_plane(self) -> ControlPlane:
        """The control plane's processes."""
        return ControlPlane(state=self.state)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state.kubeconfig

    def kubectl(self, *words: str, input: str | None = None, timeout: float = 120.0, check: bool = True) -> str:  # noqa: A002
        """Run kubectl as the administrator and return its output; without `check`, an empty string on failure."""
        try:
            return run(
                [program("kubectl"), *words],
                stdin=input,
                timeout=timeout,
                environment=self._client_environment,
            )
        except CommandFailedError:
            if check:
                raise
            return ""

    @property
    def _client_environment(self) -> dict[str, str]:
        """Return the administrator's kubeconfig, and a separate cache because addresses are used again."""
        return {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.state.folder / "kubectl-cache")}

    def helm(self, *words: str, timeout: float = 300.0) -> str:
        """Run the Helm CLI as the administrator and return its output."""
        home = self.state.folder / "helm"
        folders = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return run([program("helm"), *words], timeout=timeout, environment={**self._client_environment, **folders})

    def api_client(self, kubeconfig: Path | None = None) -> ApiClient:
        """Return a client of the official Python library, as the administrator or as the user of `kubeconfig`."""
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config import load_kube_config

        settings = Configuration()
        load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(kubeconfig or self.kubeconfig), client_configuration=settings
        )
        return ApiClient(configuration=settings)

    def kubeconfig_for(self, *, service_account: str, namespace: str) -> Path:
        """Write a kubeconfig for a service account with a token."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, "--duration=24h").strip()
        return write_kubeconfig(
            self.state.pki.folder / f"service-account-{namespace}-{service_account}.kubeconfig",
            server=self.state.server,
            authority=self.state.pki.certificate_file,
            user=token_user(token),
            namespace=namespace,
        )

    def ensure_namespace(self, name: str) -> None:
        """Create a namespace that enforces the restricted Pod Security Standard, ready for pods."""
        self.kubectl("apply", "-f", "-", input=volumes.manifest_list([volumes.restricted_namespace(name)]))
        wait_for(
            lambda: "default" in self.kubectl("get", "serviceaccounts", "-n", name, "-o", "name"),
            what=f"namespace {name} has its service account",
            seconds=60,
            every=0.1,
        )

    def prepare_namespace(self, name: str) -> None:
        """Create a namespace like `ensure_namespace`, with the shared claim `checkpoints` for jobs."""
        self.ensure_namespace(name)
        folder = self.checkpoint_dir(name)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        self.kubectl("apply", "-f", "-", input=volumes.manifest_list(volumes.checkpoint_volume(name, folder)))

    def checkpoint_dir(self, namespace: str) -> Path:
        """Return the host's folder of the claim `checkpoints` in a namespace."""
        return self.state.checkpoints / namespace

    def pod_processes(self, namespace: str, pod: str) -> list[Process]:
        """Return the processes of a pod, including its sandbox, with the host's PIDs; empty if the pod is gone."""
        shown = self.kubectl("get", "pod", pod, "-n", namespace, "-o", "json", check=False)
        return pod_processes.processes_of(json.loads(shown)) if shown else []

    def signal(self, process: Process, number: int) -> bool:
        """Signal a process of a pod, if it still is the same process. Return whether it was."""
        return processes.send(process.identity, number)

    def notice(
        self,
        node: int,
        *,
        cloud: str = metadata.AWS,
        action: str | None = None,
        seconds: float | None = None,
        resources: tuple[str, ...] = (),
    ) -> None:
        """Announce an event of the cloud for a node's instance, by its kind (one of `metadata.KINDS`).

        The default is the end of the instance, after the cloud's usual time. `resources` are the machines that the
        event concerns, if the cloud names them and it is not only this one.
        """
        where = self.node(node)
        said = metadata.Announcement.read(where.files.announcement)
        if said.cloud != cloud:
            said = metadata.Announcement(instance_id=instance_id(where.plan), cloud=cloud)
        said.announce(
            action or metadata.PREEMPTION[cloud],
            now=said.clock(datetime.now(UTC)),
            seconds=metadata.NOTICE_SECONDS[cloud] if seconds is None else seconds,
            resources=resources,
        ).write(where.files.announcement)

    def clear_notice(self, node: int, *, cloud: str | None = None) -> None:
        """Withdraw everything announced for a node. With `cloud`, the node belongs to that cloud from now on."""
        where = self.node(node)
        said = metadata.Announcement.read(where.files.announcement)
        replace(said.withdraw(), cloud=cloud or said.cloud).write(where.files.announcement)

    def spoil_metadata(self, node: int, fault: str = "", *, clock_ahead_seconds: float = 0.0) -> None:
        """Set the fault of a node's metadata service (one of `metadata.FAULTS`, or a status code) and the lead of its
        clock. Without arguments, both are removed."""
        path = self.node(node).files.announcement
        said = metadata.Announcement.read(path)
        replace(said, fault=fault, clock_ahead_seconds=clock_ahead_seconds).write(path)

    def expire_tokens(self, node: int) -> None:
        """Invalidate all session tokens, as when an instance of AWS was stopped and started."""
        path = self.node(node).files.announcement
        said = metadata.Announcement.read(path)
        replace(said, tokens=said.tokens + 1).write(path)

    def noticed(self) -> list[int]:
        """Return the numbers of the nodes that have an announcement."""
        numbers = range(1, self.nodes + 1)
        return [n for n in numbers if metadata.Announcement.read(self.node(n).files.announcement).events]

    def advertise(self, node: int, resource: str, count: int) -> None:
        """Set the amount of an extended resource (`nvidia.com/gpu`) on a node. Only the scheduler uses it."""
        patch = {"status": {"capacity": {resource: str(count)}, "allocatable": {resource: str(count)}}}
        self.kubectl("patch", "node", self.node(node).name, "--subresource=status", "-p", json.dumps(patch))

    def pause(self, part: str) -> None:
        """Stop the processes of a part, such as `etcd`, `kube-apiserver` (or `apiserver`) or `node-1/kubelet`."""
        self._signal_part(part, signal.SIGSTOP)

    def resume(self, part: str) -> None:
        """Continue a paused part."""
        self._signal_part(part, signal.SIGCONT)

    def _signal_part(self, part: str, number: int) -> None:
        node, slash, inner = part.partition("/")
        if slash:
            self.node(node_number(node)).signal(inner, number)
            return
        name = part if part in PARTS else f"kube-{part}"
        if name not in PARTS:
            raise TestbedError(f"unknown part '{part}': expected one of {', '.join(PARTS)}, or node-1/kubelet")
        if not processes.send(self.control_plane.identity(name), number):
            raise TestbedError(f"{name} does not run")


def _boot(node: Node) -> None:
    node.prepare()
    node.start()


def _ready_of(node: dict[str, Any]) -> dict[str, Any]:
    conditions = node["status"].get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == "Ready"), {})


def _folder(name: str) -> Path:
    """Return the folder of a cluster. A name has one folder, so that no other cluster is removed instead."""
    if not _NAME.fullmatch(name):
        raise TestbedError(f"invalid cluster name '{name}': expected at most 40 of a-z, 0-9 and '-'")
    return settings().clusters / name


def remove_cluster(name: str) -> None:
    """Remove everything of a cluster, even if it never started completely. Raises an error if it is not recorded."""
    folder = _folder(name)
    with locked(folder.with_name(f"{name}.lock"), what=f"cluster '{name}'", remove=True):
        removal.remove(load_state(folder))


def recorded_clusters() -> list[str]:
    """Return the names of all recorded clusters, including those that never started completely."""
    return sorted(path.parent.name for path in settings().clusters.glob("*/cluster.json"))


def _clear_the_way(folder: Path, *, replace: bool) -> None:
    """Remove the rest of a cluster of this name. Refuse to remove a running cluster, unless requested."""
    try:
        state = load_state(folder)
    except NoSuchClusterError:
        return
    runs = state.complete_file.exists() and processes.alive(ControlPlane(state=state).identity("kube-apiserver"))
    if runs and not replace:
        raise AlreadyUpError(f"cluster '{state.name}' is up already; 'down --name {state.name}' removes it")
    say(f"removing what is left of an earlier cluster '{state.name}'")
    removal.remove(state)


def _reserve(folder: Path, nodes: int, grace: int) -> State:
    """Choose free addresses, record them, and take them, before another cluster can."""
    with locked(Path(MACHINE_LOCK), what="choosing addresses"):
        plan = _choose_plan(nodes)
        ports = Ports(
            api=6443 if nodes else free_port(),
            etcd=free_port(),
            etcd_peer=free_port(),
        )
        state = State(folder=folder, name=folder.name, plan=plan, ports=ports, node_monitor_grace_seconds=grace)
        state.save()
        if plan.nodes:
            network.make_switch(plan)
    return state


def _choose_plan(nodes: int) -> Plan:
    if not nodes:
        return make_plan(_CONTROL_PLANE_ONLY, 0)
    return make_plan(free_number(networks=network.networks_in_use(), taken_tags=network.tags_in_use()), nodes)
