"""The configuration of a node's programs, where a wrong value costs hours."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from holdfast_testbed.cluster.addressing import make_plan
from holdfast_testbed.constants import PAUSE_IMAGE
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.node import cgroups, config, pod_processes, volumes

NODE = make_plan(100, 2).node(2)


@pytest.mark.parametrize("capable", [True, False])
def test_containerd_keeps_oom_scores_that_it_may_not_lower(capable: bool) -> None:
    text = config.containerd_toml(
        root=Path("/r"),
        cni_bin=Path("/b"),
        cni_conf=Path("/c"),
        runc=Path("/bin/runc"),
        containers=Path("/spec.json"),
        may_raise_oom_score=capable,
    )
    plugins = tomllib.loads(text)["plugins"]
    runtime = plugins["io.containerd.cri.v1.runtime"]
    assert runtime["restrict_oom_score_adj"] is not capable
    assert runtime["containerd"]["runtimes"]["runc"]["options"] == {"BinaryName": "/bin/runc", "SystemdCgroup": False}
    assert runtime["containerd"]["runtimes"]["runc"]["base_runtime_spec"] == "/spec.json"
    assert plugins["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == PAUSE_IMAGE


def test_every_container_has_the_hosts_runtime_read_only() -> None:
    spec = json.loads(config.container_spec('{"mounts": [{"destination": "/proc"}]}', runtime=Path("/r")))
    proc, runtime = spec["mounts"]
    assert proc == {"destination": "/proc"}
    assert (runtime["destination"], runtime["source"]) == ("/opt/host", "/r")
    assert "ro" in runtime["options"]


def test_the_kubelet_runs_in_its_own_group_on_both_versions() -> None:
    text = config.kubelet_config(
        node=NODE, cgroup="hf100/n2", authority=Path("/ca"), certificate=Path("/crt"), key=Path("/key")
    )
    proxy = json.loads(text)
    assert proxy["cgroupRoot"] == "/hf100/n2"
    assert proxy["cgroupDriver"] == "cgroupfs"
    assert proxy["failCgroupV1"] is False
    assert proxy["authentication"]["anonymous"]["enabled"] is False


def test_pods_of_a_node_get_addresses_of_its_network() -> None:
    bridge = json.loads(config.cni_conflist(NODE))["plugins"][0]
    assert bridge["ipam"]["ranges"] == [[{"subnet": NODE.pod_network}]]


def test_kube_proxy_leaves_the_hosts_conntrack_limits_alone() -> None:
    proxy = json.loads(config.kube_proxy_config(node=NODE, kubeconfig=Path("/k")))
    assert proxy["mode"] == "nftables"
    assert proxy["conntrack"]["maxPerCore"] == 0


def test_instance_ids_look_like_aws_and_differ() -> None:
    ids = {config.instance_id(node) for node in make_plan(100, 3).nodes}
    assert len(ids) == 3
    assert all(len(name) == 19 and int(name.removeprefix("i-"), 16) for name in ids)


MOUNTINFO = """\
31 24 0:26 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
32 24 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
33 24 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
34 24 0:29 / /dev/shm rw - tmpfs tmpfs rw
"""


def test_control_group_trees_of_both_versions_are_found() -> None:
    trees = cgroups.parse_hierarchies(MOUNTINFO)
    assert [(tree.mount.name, tree.version) for tree in trees] == [("cpuset", 1), ("memory", 1), ("unified", 2)]
    assert "cpuset" in trees[0].controllers


@pytest.mark.parametrize(
    ("groups", "container"),
    [
        (["/hf100/n1/kubepods/burstable/podabc-1/c0ffee"], "c0ffee"),
        (["/user.slice", "/hf100/n1/kubepods/podabc-1/c0ffee/inner"], "c0ffee"),
        (["/hf100/n1/kubepods/burstable/podabc-12/c0ffee"], None),
        (["/"], None),
        ([], None),
    ],
)
def test_a_process_belongs_to_a_pod_by_its_control_group(groups: list[str], container: str | None) -> None:
    assert pod_processes.container_of(groups, "abc-1") == container


def test_containers_of_all_kinds_are_named() -> None:
    pod = {
        "status": {
            "initContainerStatuses": [{"name": "sidecar", "containerID": "containerd://1"}],
            "containerStatuses": [{"name": "trainer", "containerID": "containerd://2"}, {"name": "waiting"}],
        }
    }
    assert pod_processes.container_names(pod) == {"1": "sidecar", "2": "trainer"}


def test_a_job_namespace_enforces_the_restricted_standard() -> None:
    labels = volumes.restricted_namespace("jobs")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_claims_of_two_namespaces_never_share_a_volume() -> None:
    def bound(namespace: str) -> set[str]:
        items = volumes.checkpoint_volume(namespace, Path("/c"))
        return {item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolume"}

    assert bound("one") == {"one-checkpoints"}
    assert not bound("one") & bound("two")


def test_cgroup_v2_names_a_controller_that_is_not_delegated(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb memory")
    (tmp_path / "cgroup.subtree_control").mkdir()
    with pytest.raises(TestbedError, match="the controller 'memory' cannot be used"):
        cgroups.hand_down(tmp_path, "memory")
    cgroups.hand_down(tmp_path, "hugetlb")
    assert list((tmp_path / "cgroup.subtree_control").iterdir()) == []
