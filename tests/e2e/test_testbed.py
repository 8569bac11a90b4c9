"""The testbed itself: what its nodes promise to pods, what can befall them, and that nothing stays behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.cluster import removal
from holdfast_testbed.cluster.cluster import Cluster, remove_cluster
from holdfast_testbed.cluster.state import State, load_state
from holdfast_testbed.constants import POD_BRIDGE
from holdfast_testbed.errors import AlreadyUpError, CommandFailedError, NoSuchClusterError
from holdfast_testbed.node import cgroups, network, processes
from holdfast_testbed.node.node import Node
from holdfast_testbed.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

GRACE_SECONDS = 10
NAMESPACE = "jobs"
SERVE = "import http.server as h; h.ThreadingHTTPServer(('', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
FETCH_METADATA = """
import urllib.request as u
put = u.Request('http://169.254.169.254/latest/api/token', method='PUT',
                headers={'X-aws-ec2-metadata-token-ttl-seconds': '60'})
token = u.urlopen(put, timeout=30).read().decode()
get = u.Request('http://169.254.169.254/latest/meta-data/spot/instance-action',
                headers={'X-aws-ec2-metadata-token': token})
print('ANSWER', u.urlopen(get, timeout=30).read().decode())
"""
ASK_API_SERVER = """
import os, ssl, urllib.request as u
folder = '/var/run/secrets/kubernetes.io/serviceaccount'
token = open(f'{folder}/token').read()
request = u.Request(f"https://{os.environ['KUBERNETES_SERVICE_HOST']}/version",
                    headers={'Authorization': f'Bearer {token}'})
answer = u.urlopen(request, context=ssl.create_default_context(cafile=f'{folder}/ca.crt'), timeout=30)
print('ANSWER', answer.status)
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Cluster]:
    """Two nodes with a short grace period, and a namespace ready for jobs."""
    cluster = Cluster.up(name="testbed-e2e", nodes=2, node_monitor_grace_seconds=GRACE_SECONDS, replace=True)
    try:
        cluster.prepare_namespace(NAMESPACE)
        yield cluster
    finally:
        cluster.down()


def trainer_pod(name: str, script: str, *, node: int = 1, memory: str = "1Gi") -> dict[str, Any]:
    """A pod as a job's: the trainer image, and all that the restricted standard asks for."""
    container = {
        "name": "trainer",
        "image": "holdfast/trainer:dev",
        "command": ["python", "-c", script],
        "resources": {"limits": {"memory": memory}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "checkpoints", "mountPath": "/checkpoints", "subPath": f"{NAMESPACE}/{name}"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeName": f"node-{node}",
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [
                {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


class Pods:
    """Pods of one test, gone at its end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names: list[str] = []

    def run(
        self, name: str, script: str, *, node: int = 1, until: str = "Running", memory: str = "1Gi"
    ) -> dict[str, Any]:
        """Start a pod and wait for its phase."""
        self._names.append(name)
        self._cluster.kubectl(
            "create", "-f", "-", input=json.dumps(trainer_pod(name, script, node=node, memory=memory))
        )
        finished = {"Succeeded", "Failed"}
        wait_for(
            lambda: self.phase(name) in {until, *finished},
            what=f"pod {name} is {until}",
            seconds=120,
            every=0.2,
            explain=lambda: self._cluster.kubectl("describe", "pod", name, "-n", NAMESPACE)[-1500:],
        )
        assert self.phase(name) == until, self.logs(name)
        return self.get(name)

    def get(self, name: str) -> dict[str, Any]:
        """The pod as the API server has it."""
        pod: dict[str, Any] = json.loads(self._cluster.kubectl("get", "pod", name, "-n", NAMESPACE, "-o", "json"))
        return pod

    def phase(self, name: str) -> str:
        """Its phase."""
        return str(self.get(name)["status"].get("phase"))

    def logs(self, name: str) -> str:
        """What it printed."""
        return self._cluster.kubectl("logs", name, "-n", NAMESPACE, check=False)

    def clean(self) -> None:
        """Remove all."""
        for name in self._names:
            self._cluster.kubectl(
                "delete", "pod", name, "-n", NAMESPACE, "--ignore-not-found", "--force", "--grace-period=0"
            )


@pytest.fixture
def pods(bed: Cluster) -> Iterator[Pods]:
    made = Pods(bed)
    try:
        yield made
    finally:
        made.clean()


def test_a_restricted_pod_runs_the_hosts_torch(bed: Cluster, pods: Pods) -> None:
    script = "import torch, os; print('ANSWER', os.getuid(), int(torch.arange(5).sum()))"
    pods.run("torch", script, until="Succeeded")
    assert "ANSWER 65532 10" in pods.logs("torch")


def test_the_trainer_image_brings_the_library_and_its_command(bed: Cluster, pods: Pods) -> None:
    script = "import holdfast, shutil; print('ANSWER', holdfast.__file__, shutil.which('holdfast'))"
    pods.run("library", script, until="Succeeded")
    assert "ANSWER /opt/holdfast/src/holdfast/__init__.py /opt/holdfast/bin/holdfast" in pods.logs("library")


def test_the_namespace_refuses_a_pod_that_is_not_restricted(bed: Cluster) -> None:
    pod = trainer_pod("loose", "pass")
    del pod["spec"]["containers"][0]["securityContext"]
    with pytest.raises(CommandFailedError, match='violates PodSecurity "restricted'):
        bed.kubectl("create", "-f", "-", "--dry-run=server", input=json.dumps(pod))


def test_checkpoints_are_shared_with_the_host(bed: Cluster, pods: Pods) -> None:
    pods.run("writer", "open('/checkpoints/commit', 'w').write('durable')", until="Succeeded")
    written = bed.checkpoint_dir(NAMESPACE) / NAMESPACE / "writer" / "commit"
    assert written.read_text() == "durable"


def test_a_notice_reaches_the_pods_of_its_node_alone(bed: Cluster, pods: Pods) -> None:
    bed.notice(1, action="terminate", seconds=120)
    try:
        pods.run("noticed", FETCH_METADATA, node=1, until="Succeeded")
        pods.run("spared", FETCH_METADATA, node=2, until="Failed")
    finally:
        bed.clear_notice(1)
    assert '"action": "terminate"' in pods.logs("noticed")
    assert "404" in pods.logs("spared")


def test_pods_reach_the_api_server_by_its_cluster_address(bed: Cluster, pods: Pods) -> None:
    pods.run("client", ASK_API_SERVER, until="Succeeded")
    assert "ANSWER 200" in pods.logs("client")


def test_pods_are_reached_from_other_nodes_and_from_the_host(bed: Cluster, pods: Pods) -> None:
    address = pods.run("server", SERVE, node=1)["status"]["podIP"]
    fetch = f"import urllib.request as u; print('ANSWER', u.urlopen('http://{address}:8000', timeout=30).status)"
    wait_for(lambda: answers(f"http://{address}:8000"), what="the pod answers the host", seconds=240)
    pods.run("visitor", fetch, node=2, until="Succeeded")
    assert "ANSWER 200" in pods.logs("visitor")


def test_a_process_of_a_pod_is_found_by_container_and_signalled(bed: Cluster, pods: Pods) -> None:
    pods.run("victim", SERVE)
    found = bed.pod_processes(NAMESPACE, "victim")
    main = [process for process in found if process.container == "trainer"]
    assert [process.cmdline[-1] for process in main] == [SERVE]
    assert {process.container for process in found} == {"trainer", ""}, "the sandbox has no container name"
    assert bed.signal(main[0], signal.SIGKILL)
    wait_for(lambda: pods.phase("victim") == "Failed", what="the kubelet notices", seconds=240, every=0.2)
    assert not bed.signal(main[0], signal.SIGKILL), "a process that is gone is not signalled"


def test_container_beyond_its_memory_is_killed_as_oom(bed: Cluster, pods: Pods) -> None:
    """The kubelet reports the cause."""
    pod = pods.run("greedy", "print(len(b'x' * 2**28))", until="Failed", memory="64Mi")
    terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["reason"], terminated["exitCode"]) == ("OOMKilled", 137)


def test_a_command_runs_in_a_container(bed: Cluster, pods: Pods) -> None:
    pods.run("host", SERVE)
    said = bed.kubectl("exec", "host", "-n", NAMESPACE, "--", "python", "-c", "import os; print(os.getuid())")
    assert said.strip() == "65532"


def test_a_partitioned_node_is_lost_while_its_pods_run_on(bed: Cluster, pods: Pods) -> None:
    pods.run("survivor", SERVE, node=2)
    node = bed.node(2)
    node.cut()
    try:
        wait_for(lambda: "node-2" not in bed.ready_nodes(), what="node-2 is lost", seconds=240, every=0.5)
        assert node.alive()
        assert any(p.container == "trainer" for p in bed.pod_processes(NAMESPACE, "survivor"))
    finally:
        node.heal()
    bed.wait_for_nodes()


def cables_of_pods(node: Node) -> set[str]:
    shown = network.ip("-n", node.plan.namespace, "-j", "link", "show", "type", "veth", "master", POD_BRIDGE)
    return {link["ifname"] for link in json.loads(shown)}


def test_a_power_cut_ends_all_at_once_and_a_start_is_a_new_boot(bed: Cluster, pods: Pods) -> None:
    pods.run("lost", SERVE, node=2)
    node, before = bed.node(2), boot_id(bed, "node-2")
    plugged, (process, *_) = cables_of_pods(node), bed.pod_processes(NAMESPACE, "lost")
    with Path(f"/proc/{process.pid}/ns/net").open():  # a dead pod's network lives on, as with sockets that wait
        node.kill()
        try:
            assert not node.alive()
            assert bed.pod_processes(NAMESPACE, "lost") == []
        finally:
            node.start()
        assert plugged
        assert not plugged & cables_of_pods(node), "a pod that is dead still answers for its address"
    wait_for(lambda: boot_id(bed, "node-2") != before, what="node-2 says that it booted", seconds=240, every=0.5)
    bed.wait_for_nodes()


def test_a_paused_api_server_does_not_answer_until_it_is_resumed(bed: Cluster) -> None:
    bed.pause("apiserver")
    try:
        assert not bed.control_plane.ready()
    finally:
        bed.resume("apiserver")
    bed.control_plane.wait_for_api(seconds=240)


def test_a_service_account_has_only_its_own_rights(bed: Cluster) -> None:
    from kubernetes.client import CoreV1Api
    from kubernetes.client.exceptions import ApiException

    client = bed.api_client(bed.kubeconfig_for(service_account="default", namespace=NAMESPACE))
    with pytest.raises(ApiException, match="cannot list resource") as refused:
        CoreV1Api(client).list_namespaced_pod(NAMESPACE)
    assert refused.value.status == 403


def test_a_running_cluster_is_not_replaced(bed: Cluster) -> None:
    with pytest.raises(AlreadyUpError):
        Cluster.up(name=bed.name, nodes=2)


def test_second_cluster_runs_alongside_and_leaves_no_trace(bed: Cluster) -> None:
    second = Cluster.up(name="testbed-e2e-second", nodes=1, images=False, replace=True)
    try:
        assert second.state.plan.number != bed.state.plan.number
        assert second.ready_nodes() == ["node-1"]
        assert traces(second.state), "the check below would prove nothing"
    finally:
        second.down()
    assert traces(second.state) == []
    assert len(bed.ready_nodes()) == 2


@pytest.mark.parametrize(
    "moment", ["cluster.json", "processes/etcd", "processes/node-1", "nodes/node-1/disk/var-lib"]
)
def test_a_killed_up_is_cleaned_away(moment: str) -> None:
    from holdfast_testbed.settings import settings

    name = "testbed-e2e-killed"
    folder = settings().clusters / name
    command = [sys.executable, "-m", "holdfast_testbed", "up", "--name", name, "--nodes", "1", "--no-images"]
    upping = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for((folder / moment).exists, what=f"{moment} is there", seconds=240, every=0.002)
    finally:
        upping.kill()
        upping.wait()
    state = load_state(folder)
    with pytest.raises(NoSuchClusterError, match="did not start completely"):
        Cluster.load(name)
    remove_cluster(name)
    assert traces(state) == []


def test_down_after_the_nodes_lost_power_leaves_no_trace() -> None:
    cluster = Cluster.up(name="testbed-e2e-dark", nodes=1, images=False, replace=True)
    try:
        cluster.node(1).kill()
    finally:
        cluster.down()
    assert traces(cluster.state) == []


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 — only http://, to a pod
            return bool(answer.status == 200)
    except OSError:
        return False


def boot_id(cluster: Cluster, node: str) -> str:
    return cluster.kubectl("get", "node", node, "-o", "jsonpath={.status.nodeInfo.bootID}")


def traces(state: State) -> list[str]:
    """Everything on the machine that a cluster made and that is there still."""
    looks: list[Callable[[State], list[str]]] = [
        _processes, _namespaces, _links, _routes, _mounts, _control_groups, _files
    ]  # fmt: skip
    deadline = time.monotonic() + 60
    while True:
        found = [trace for look in looks for trace in look(state)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _processes(state: State) -> list[str]:
    found = []
    for stat in processes.everything():
        words = " ".join(processes.command_line(stat.pid))
        grouped = any(f"/{state.plan.tag}/" in f"{group}/" for group in cgroups.group_of(stat.pid))
        if f"{state.folder}/" in words or grouped:
            found.append(f"process {stat.pid} {words}")
    return found


def _namespaces(state: State) -> list[str]:
    return [f"namespace {name}" for name in state.plan.namespaces if Path("/run/netns", name).exists()]


def _links(state: State) -> list[str]:
    links = json.loads(network.ip("-j", "link"))
    return [f"link {link['ifname']}" for link in links if link["ifname"].startswith(state.plan.tag)]


def _routes(state: State) -> list[str]:
    mine = f"10.{state.plan.number}."
    return [f"route {route}" for route in network.networks_in_use() if route.startswith(mine)]


def _mounts(state: State) -> list[str]:
    return [f"mount {point}" for point in removal.mounts_below(state.folder)]


def _control_groups(state: State) -> list[str]:
    places = [tree.mount / state.plan.tag for tree in cgroups.hierarchies()]
    return [f"control group {place}" for place in places if place.exists()]


def _files(state: State) -> list[str]:
    return [f"folder {state.folder}"] if state.folder.exists() else []
