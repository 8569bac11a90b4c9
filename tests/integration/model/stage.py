"""One namespace with nodes of its own, and what a test does there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client
from players import Kubelets, Launchers, Operator
from waiting import wait_until

JOBS = ("holdfast.dev", "v1alpha1")
PLURAL = "faulttolerantjobs"


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

    def is_true(self, kind: str, name: str = "gpt") -> bool:
        """Whether a condition is true."""
        return bool(self.condition(kind, name)["status"] == "True")

    def incidents(self, name: str = "gpt") -> list[tuple[str, str]]:
        """Cause and pod of each incident."""
        listed = self.status(name).get("incidents") or []
        return [(incident["cause"], incident.get("pod") or "") for incident in listed]

    def await_count(self) -> None:
        """Training may resume before its incident is counted."""
        self.wait(self.incidents, "it is counted")

    def incarnations(self) -> int:
        """How many pods the operator created for the job so far."""
        found: int = json.loads(self.status().get("operatorState", "{}")).get("incarnations", 0)
        return found

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
