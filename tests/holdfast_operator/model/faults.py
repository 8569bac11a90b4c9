"""Faults of nodes, pods and networks."""

from __future__ import annotations

from bodies import node_body
from cluster import Cluster


class FaultyCluster(Cluster):
    """A cluster in which a test injects faults."""

    def end(self, name: str, code: int, *, reason: str = "Error", message: str = "") -> None:
        """The trainer's container ends."""
        self.end_pod(self.pods[self.uid(name)], code, reason=reason, message=message)

    def freeze(self, name: str) -> None:
        """The launcher hangs; its sidecar goes on."""
        self.frozen[self.uid(name)] = self.now

    def cut(self, *names: str) -> None:
        """The pod's network breaks, as when its CNI does: the kubelet, on the host's network, goes on."""
        self.cut_off.update(map(self.uid, names))

    def relabel(self, name: str, *labels: str) -> None:
        """Somebody removes these labels of a pod, or with none named its owner."""
        meta = self.pods[self.uid(name)]["metadata"]
        for label in labels:
            del meta["labels"][label]
        if not labels:
            del meta["ownerReferences"]

    def force_gone(self, name: str) -> None:
        """Deleted by force: the object goes at once. Its process runs until its kubelet ends it."""
        uid = self.uid(name)
        self.graves[uid] = self.pods.pop(uid)
        if self.graves[uid]["status"]["phase"] == "Running":
            self.orphans[uid] = self.now

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
                    self.end_pod(body, 255, reason="Unknown")

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
