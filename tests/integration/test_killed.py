"""An operator that is killed after each of its writes: whatever the next one finds half done comes to its end.

Each process writes one thing, which the API server takes, and is killed before it hears so. What Leases, events and
reviews of tokens hold decides nothing and is not counted as a write.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from players import Operator
from stage import Stage
from waiting import wait_until

from holdfast_testbed.fakes.api_faults import api_faults
from holdfast_testbed.fakes.operator_process import MODULE, OperatorProcess

UNCOUNTED = ("/leases", "/events", "/tokenreviews", "/subjectaccessreviews", "/selfsubject")
VERSIONS = ("resourceVersion", "managedFields")
RENEWED = ("progress", "lastCheckpoint", "goodput")
"""Of a status while its job trains, every few seconds: where a start takes as long, none would live to do more."""


class Mortal:
    """The operator, for players of agents too; ``deaths`` says after which write each one died."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.deaths: list[str] = []
        self.dies = False
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)

    def answered(self, method: str, path: str, data: bytes) -> None:
        """The API server has taken a write. One that leaves all as it was is none."""
        if method == "GET" or any(part in path for part in UNCOUNTED):
            return
        body = json.loads(data)
        uid, said = (body.get("metadata") or {}).get("uid"), _said(body)
        with self._lock:
            known, self._said[uid] = self._said.get(uid), said
            if self.dies and said != known and self.process.alive():
                self.process.kill()
                self.deaths.append(f"{method} {path.partition('?')[0].partition('/namespaces/')[2].split('/')[1]}")

    def keep(self, over: threading.Event) -> None:
        """Start the next one whenever the last one is dead. It lives no longer than the thread that started it."""
        while not over.wait(0.02):
            with self._lock:
                if not self.process.alive():
                    OperatorProcess.start(self.process)
        self.process.stop()


def _said(body: dict[str, Any]) -> str:
    """All that a write of the operator may change but versions and what is renewed: of the status of other objects
    it writes nothing."""
    meta = {key: value for key, value in (body.get("metadata") or {}).items() if key not in VERSIONS}
    own = (body.get("status") or {}) if body["kind"] == "FaultTolerantJob" else {}
    status = {key: value for key, value in own.items() if key not in RENEWED}
    return json.dumps({**body, "metadata": meta, "status": status}, sort_keys=True)


@pytest.fixture(scope="module")
def operator(rights: Path, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    """One that is started again whenever it died."""
    folder = tmp_path_factory.mktemp("mortal")
    with api_faults(cluster.state.server, cluster.state.pki.certificate_file) as proxy:
        # With the usual waits: each process lives for one write, and its start takes as long as the short ones.
        process = Operator(proxy.kubeconfig(rights, folder / "kubeconfig"), folder, MODULE)
        mortal = Mortal(process)
        proxy.on_answer = mortal.answered
        over = threading.Event()
        keeper = threading.Thread(target=mortal.keep, args=(over,), daemon=True)
        keeper.start()
        wait_until(process.ready, "it is ready")
        yield mortal
        mortal.dies = False
        over.set()
        keeper.join()


@pytest.mark.thorough
def test_operator_dying_after_each_write_loses_nothing(stage: Stage, operator: Mortal) -> None:
    """Nothing is created twice either."""
    stage.nodes(3)
    operator.dies = True
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    assert set(operator.deaths) == {
        "POST pods",
        "PATCH pods",
        "PATCH faulttolerantjobs",
        "POST poddisruptionbudgets",
        "POST networkpolicies",
        "POST services",
        "POST configmaps",
    }
    operator.deaths.clear()
    assert stage.members() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    before = {pod.metadata.uid for pod in stage.pods()}

    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    stage.wait(lambda: stage.status().get("incidents"), "it is counted")
    found = stage.status()
    assert [(one["cause"], one["pod"]) for one in found["incidents"]] == [("Infrastructure", "gpt-w1")]
    assert (found["incidentCount"], found["membership"]["generation"]) == (1, 2)
    assert [pod.metadata.name for pod in stage.pods()] == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]
    assert {"POST pods", "PATCH faulttolerantjobs"} <= set(operator.deaths)
    assert before <= {pod.metadata.uid for pod in stage.pods()}, "no pod was made anew"
