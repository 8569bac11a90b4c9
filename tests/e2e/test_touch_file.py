"""Anyone who can write into a pod may ask for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast_testbed.drill.faults import DrillJob

pytestmark = pytest.mark.e2e

RUN = "/var/run/holdfast"


def test_touch_file_triggers_an_acknowledged_checkpoint(running_job: Callable[..., Any]) -> None:
    stage: DrillJob = running_job().stage
    pod = stage.workers()[-1].name

    def in_pod(command: str) -> str:
        words = ("exec", pod, "-c", "trainer", "--", "sh", "-c", command)
        return stage.cluster.kubectl("-n", stage.watcher.namespace, *words, check=False)

    def acknowledgement() -> str:
        return in_pod(f"cat {RUN}/emergency_checkpoint.ack")

    before = acknowledgement()
    in_pod(f"touch {RUN}/emergency_checkpoint")
    told = [before]

    def answered() -> bool:
        told.append(acknowledgement())
        return told[-1] not in ("", before)

    stage.watcher.wait("the acknowledgement", answered, timeout=240)

    acknowledged = json.loads(told[-1])
    assert acknowledged["result"] == "Committed"
    [commit] = stage.checkpoints.glob(f"step-{acknowledged['step']}.g*.a*")
    manifest = json.loads((commit / "MANIFEST.json").read_text())
    assert manifest["step"] == acknowledged["step"]
    assert {path.name for path in commit.glob("rank-*.safetensors")} == {f"rank-{n}.safetensors" for n in range(3)}
