"""One node: its namespaces and programs, and its faults."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_testbed.build.commands import run
from holdfast_testbed.build.images import archive
from holdfast_testbed.build.programs import program
from holdfast_testbed.cluster.addressing import NodePlan
from holdfast_testbed.cluster.kubeconfig import certificate_user, write_kubeconfig
from holdfast_testbed.cluster.state import State
from holdfast_testbed.constants import METADATA_ADDRESS
from holdfast_testbed.errors import NotReadyError, TestbedError
from holdfast_testbed.fakes.metadata import Announcement
from holdfast_testbed.node import cgroups, network, processes, runtime
from holdfast_testbed.node.config import (
    CONTAINERD_SOCKET,
    NodeFiles,
    cni_conflist,
    container_spec,
    containerd_toml,
    instance_id,
    kube_proxy_config,
    kubelet_config,
)
from holdfast_testbed.settings import settings
from holdfast_testbed.waiting import wait_for

_CAP_SYS_RESOURCE = 24
PARTS = ("containerd", "kubelet", "kube-proxy")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a cluster."""

    state: State
    plan: NodePlan

    @property
    def name(self) -> str:
        """The node's name in Kubernetes."""
        return self.plan.name

    @property
    def folder(self) -> Path:
        """The folder with the node's disk and configuration."""
        return self.state.node_folder(self.plan)

    @property
    def files(self) -> NodeFiles:
        """The node's configuration files."""
        return NodeFiles(folder=self.folder)

    @property
    def cgroup(self) -> str:
        """The control group of its pods, relative to the root."""
        return f"{self.state.plan.tag}/n{self.plan.number}"

    def prepare(self) -> None:
        """Write certificates and configuration, and create the node's cable."""
        self.files.cni.mkdir(parents=True)
        pki = self.state.pki
        certificate, key = pki.issue(
            self.name, user=f"system:node:{self.name}", groups=["system:nodes"], hosts=[self.name, self.plan.address]
        )
        kubeconfig = write_kubeconfig(
            pki.folder / f"{self.name}.kubeconfig",
            server=self.state.server,
            authority=pki.certificate_file,
            user=certificate_user(certificate, key),
        )
        files = self.files
        (files.cni / "10-testbed.conflist").write_text(cni_conflist(self.plan))
        default_spec = run([str(program("ctr")), "oci", "spec"])
        files.containers.write_text(container_spec(default_spec, runtime=self.state.host_runtime))
        files.containerd.write_text(self._containerd())
        files.kubelet.write_text(
            kubelet_config(
                node=self.plan, cgroup=self.cgroup, authority=pki.certificate_file, certificate=certificate, key=key
            )
        )
        proxy = pki.folder / "kube-proxy.kubeconfig"
        files.kube_proxy.write_text(kube_proxy_config(node=self.plan, kubeconfig=proxy))
        files.boot.write_text(json.dumps(self._boot(kubeconfig), indent=2))
        Announcement(instance_id=instance_id(self.plan)).write(files.announcement)
        network.make_node_network(self.state.plan, self.plan, METADATA_ADDRESS)

    def _containerd(self) -> str:
        return containerd_toml(
            root=self.folder / "containerd",
            cni_bin=program("bridge").parent,
            cni_conf=self.files.cni,
            runc=program("runc"),
            containers=self.files.containers,
            may_raise_oom_score=_has_capability(_CAP_SYS_RESOURCE),
        )

    def _boot(self, kubeconfig: Path) -> dict[str, Any]:
        files, plan = self.files, self.state.plan
        kubelet = [
            str(program("kubelet")),
            f"--config={files.kubelet}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.plan.address}",
            "--root-dir=/var/lib/kubelet",
            "--node-labels=topology.kubernetes.io/zone=testbed-1a",
        ]
        parts = {
            "containerd": [str(program("containerd")), f"--config={files.containerd}", "--log-level=warn"],
            "import-pause": self._import_command(archive("pause"), CONTAINERD_SOCKET),
            "kubelet": kubelet,
            "kube-proxy": [str(program("kube-proxy")), f"--config={files.kube_proxy}"],
        }
        return {
            "name": self.name,
            "disk": str(self.folder / "disk"),
            "private": _private_folders(),
            "api": [plan.host_address, self.state.ports.api],
            "announcement": str(files.announcement),
            "runtime": [[str(source), str(target)] for source, target in runtime.mounts(self.state.host_runtime)],
            "parts": {
                name: {
                    "argv": argv,
                    "log": str(self.state.logs / f"{self.name}.{name}.log"),
                    "restart": name in PARTS,
                }
                for name, argv in parts.items()
            },
        }

    def start(self) -> None:
        """Switch on the node, with its cable plugged in."""
        if self.alive():
            raise TestbedError(f"{self.name} runs already")
        cgroups.remove(self.cgroup)
        cgroups.create(self.cgroup)
        network.unplug_pods(self.plan)
        network.set_cable(self.state.plan, self.plan, up=True)
        tools = [program(name).parent for name in ("containerd", "runc", "nft", "ctr")]
        path = ":".join([*dict.fromkeys(str(tool) for tool in tools), settings().search_path])
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        processes.start(
            self.name,
            [
                *("nsenter", f"--net=/run/netns/{self.plan.namespace}"),
                *namespaces,
                *(sys.executable, "-m", "holdfast_testbed.node.init", self.files.boot),
            ],
            records=self.state.records,
            logs=self.state.logs,
            environment={"PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def kill(self) -> None:
        """Cut the power: unplug the cable first, so that no socket is closed, and kill all processes at once."""
        self.cut()
        first = self._first_process()
        everything = [identity for identity in (first, self._holder) if identity is not None]
        processes.kill_all(everything)

    def cut(self) -> None:
        """Unplug the cable, which causes a network partition. The node continues to run."""
        network.set_cable(self.state.plan, self.plan, up=False)

    def heal(self) -> None:
        """Plug in the cable again."""
        network.set_cable(self.state.plan, self.plan, up=True)

    def alive(self) -> bool:
        """Return whether the node has power."""
        return processes.alive(self._holder)

    def connected(self) -> bool:
        """Return whether the node's cable is plugged in."""
        return network.cable_is_up(self.state.plan, self.plan)

    def signal(self, part: str, number: int) -> None:
        """Signal `kubelet`, `containerd` or `kube-proxy`."""
        processes.send(self._part(part), number)

    def import_image(self, path: Path) -> None:
        """Import an image from an archive into the node."""
        socket = self.inside(CONTAINERD_SOCKET)
        wait_for(socket.exists, what=f"{self.name}'s containerd answers", seconds=60)
        run(self._import_command(path, str(socket)), timeout=300)

    def inside(self, path: str) -> Path:
        """Return the host's path of a path in the node, including its volumes in memory, while it has power."""
        first = self._first_process()
        if first is None:
            raise NotReadyError(f"{self.name} has no power: {path} on it cannot be reached")
        return Path(f"/proc/{first.pid}/root{path}")

    def _import_command(self, path: Path, socket: str) -> list[str]:
        return [str(program("ctr")), "--address", socket, "-n", "k8s.io", "images", "import", str(path)]

    @property
    def _holder(self) -> processes.Identity | None:
        """Return the recorded process. The node's PID 1 is its child and dies with it."""
        return processes.read_record(self.state.records / self.name)

    def _first_process(self) -> processes.Identity | None:
        holder = self._holder
        found = processes.children(holder) if processes.alive(holder) and holder is not None else []
        return found[0] if found else None

    def _part(self, part: str) -> processes.Identity:
        if part not in PARTS:
            raise TestbedError(f"unknown part of a node '{part}': expected one of {', '.join(PARTS)}")
        first = self._first_process()
        for identity in processes.children(first) if first else []:
            if Path(processes.command_line(identity.pid)[0]).name == part:
                return identity
        raise TestbedError(f"{part} does not run on {self.name}")


def _private_folders() -> list[str]:
    """Return the host's folders of which a node has its own, except those that contain what the testbed needs."""
    private = ["/var/lib", "/var/log"]
    for needed in (settings().repository, settings().cache, Path(sys.base_prefix)):
        if any(Path(folder) in needed.parents for folder in private):
            raise TestbedError(f"{needed} would be hidden from the nodes: move the checkout out of /var")
    return private


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
