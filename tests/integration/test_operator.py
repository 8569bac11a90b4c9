"""The operator as a real process under the chart's rights, against a real control plane."""

from __future__ import annotations

from typing import Any


def test_a_job_is_gated_placed_published_and_ready(stage: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3)
    status = stage.status()
    assert stage.members() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert status["ready"] == "3/3"
    assert status["membership"]["generation"] == 1
    assert status["restartCount"] == 0
    assert player.worlds == [(1, 1, tuple(stage.uid(name) for name in stage.members()))]
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step"), "progress is shown")
    active = stage.wait(lambda: stage.status()["membership"].get("active"), "the world is recorded as started")
    assert active == {"generation": 1, "attempt": 1}
    for pod in stage.pods():
        assert not pod.spec.scheduling_gates
        assert [c.name for c in pod.spec.init_containers] == ["holdfast-sidecar"]
        assert pod.spec.init_containers[0].restart_policy == "Always"
        assert pod.spec.restart_policy == "Never"
        assert pod.metadata.labels["holdfast.dev/worker-index"] in ("0", "1", "2")
