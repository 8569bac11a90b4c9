"""The state of a cluster on disk. `cluster.json` is written before anything is started or created."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.cluster.addressing import NodePlan, Plan, make_plan
from holdfast_testbed.cluster.pki import Authority
from holdfast_testbed.errors import NoSuchClusterError


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports on the host that the cluster listens on."""

    api: int
    etcd: int
    etcd_peer: int


@dataclass(frozen=True, kw_only=True)
class State:
    """A cluster's folder and the content of `cluster.json`."""

    folder: Path
    name: str
    plan: Plan
    ports: Ports
    node_monitor_grace_seconds: int

    @property
    def records(self) -> Path:
        """A file for each process of the cluster."""
        return self.folder / "processes"

    @property
    def logs(self) -> Path:
        """A log for each process."""
        return self.folder / "logs"

    @property
    def pki(self) -> Authority:
        return Authority(self.folder / "pki")

    @property
    def server(self) -> str:
        return f"https://{self.plan.host_address}:{self.ports.api}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def checkpoints(self) -> Path:
        """The shared (RWX) storage, with a folder for each namespace."""
        return self.folder / "checkpoints"

    @property
    def host_runtime(self) -> Path:
        """Empty on the host. Each node mounts the host's interpreter there."""
        return self.folder / "host-runtime"

    @property
    def complete_file(self) -> Path:
        """Exists when the cluster has started completely."""
        return self.folder / "complete"

    def node_folder(self, node: NodePlan) -> Path:
        return self.folder / "nodes" / node.name

    def save(self) -> None:
        """Create the folders and write `cluster.json`."""
        for folder in (self.folder, self.records, self.logs, self.pki.folder, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        document = {
            "name": self.name,
            "number": self.plan.number,
            "nodes": len(self.plan.nodes),
            "ports": vars(self.ports),
            "nodeMonitorGraceSeconds": self.node_monitor_grace_seconds,
        }
        temporary = self.folder / "cluster.json.tmp"
        temporary.write_text(json.dumps(document, indent=2) + "\n")
        temporary.rename(self.folder / "cluster.json")


def load_state(folder: Path) -> State:
    try:
        document = json.loads((folder / "cluster.json").read_text())
    except FileNotFoundError as error:
        raise NoSuchClusterError(f"no cluster '{folder.name}' is recorded in {folder.parent}") from error
    return State(
        folder=folder,
        name=document["name"],
        plan=make_plan(document["number"], document["nodes"]),
        ports=Ports(**document["ports"]),
        node_monitor_grace_seconds=document["nodeMonitorGraceSeconds"],
    )
