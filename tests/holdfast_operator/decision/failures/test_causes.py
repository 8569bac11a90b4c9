"""The cause of a worker's end is one of those of the contract."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import Cause
from holdfast_operator.decision.failures import causes
from holdfast_operator.views import Exit, NodeView, PodView

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
GOOD = NodeView(name="n", boot_id="b1", lease_renewed=NOW)


def pod(**changes: Any) -> PodView:
    return replace(PodView(name="gpt-w0", uid="u", incarnation=0, node="n", phase="Failed"), **changes)


def tainted(key: str) -> NodeView:
    """A node that is heard of, with a taint that ends pods."""
    return replace(GOOD, taints=((key, "", "NoExecute"),))


@pytest.mark.parametrize(
    ("view", "node", "cause", "reason"),
    [
        (pod(exit=Exit(code=137, reason="OOMKilled")), GOOD, "OOM", "OOMKilled"),
        (pod(exit=Exit(code=137, reason="Error")), GOOD, "Infrastructure", "Killed"),
        (pod(exit=Exit(code=1, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=139, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=255, reason="Unknown")), GOOD, "Infrastructure", "ExitStatusUnknown"),
        (pod(exit=Exit(code=255, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=70)), GOOD, "Infrastructure", "LauncherFailed"),
        (pod(exit=Exit(code=75)), GOOD, "Interruption", "DrainedOnRequest"),
        (pod(exit=Exit(code=1, cause=Cause.OOM, reason="CudaOOM")), GOOD, "OOM", "CudaOOM"),
        (pod(exit=Exit(code=127)), GOOD, None, "HoldfastMissing"),
        (pod(exit=Exit(code=128, reason="StartError", message="permission denied")), GOOD, None, "ContainerFailed"),
        (pod(exit=Exit(code=75), deleted_at=NOW), GOOD, "Interruption", "PodDeleted"),
        (pod(exit=Exit(code=143), deleted_at=NOW), GOOD, "Interruption", "PodDeleted"),
        (pod(exit=Exit(code=137), disruption="EvictionByEvictionAPI"), GOOD, "Interruption", "EvictionByEvictionAPI"),
        (pod(exit=Exit(code=75), failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (pod(exit=Exit(code=0), failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (pod(failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (
            pod(failure_reason="Evicted", disruption="TerminationByKubelet"),
            GOOD,
            "Interruption",
            "TerminationByKubelet",
        ),
        (pod(exit=Exit(code=137, reason="OOMKilled"), failure_reason="Evicted"), GOOD, "OOM", "OOMKilled"),
        (pod(disruption="PreemptionByScheduler"), GOOD, "Interruption", "PreemptionByScheduler"),
        (
            pod(disruption="PreemptionByScheduler"),
            replace(GOOD, ready=False),
            "Interruption",
            "PreemptionByScheduler",
        ),
        (pod(exit=Exit(code=255, reason="Unknown"), deleted_at=NOW), GOOD, "Interruption", "PodDeleted"),
        (
            pod(exit=Exit(code=255, reason="Unknown"), disruption="PreemptionByScheduler"),
            GOOD,
            "Interruption",
            "PreemptionByScheduler",
        ),
        (
            pod(exit=Exit(code=255, reason="Unknown"), disruption="DeletionByTaintManager"),
            GOOD,
            "Infrastructure",
            "ExitStatusUnknown",
        ),
        (pod(disruption="DeletionByTaintManager"), replace(GOOD, ready=False), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), None, "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted(c.TAINT_UNREACHABLE), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted(c.TAINT_NOT_READY), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted("maintenance"), "Interruption", "DeletionByTaintManager"),
        (
            pod(exit=Exit(code=1, cause=Cause.APPLICATION, reason="Exception"), deleted_at=NOW),
            GOOD,
            "Application",
            "Exception",
        ),
        (pod(deleted_at=NOW), replace(GOOD, ready=False), "Infrastructure", "NodeLost"),
        (pod(), GOOD, "Infrastructure", "PodRefused"),
    ],
)
def test_causes_are_those_of_the_contract(
    view: PodView, node: NodeView | None, cause: str | None, reason: str
) -> None:
    verdict = causes.of_exit(view, node, NOW)
    assert (verdict.cause, verdict.reason) == (cause, reason)
    assert verdict.message
