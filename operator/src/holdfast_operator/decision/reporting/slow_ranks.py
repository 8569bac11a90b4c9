"""The ranks for which the others wait, as the launcher of rank 0 reports them.

Alerts about a slow rank name its node, and an administrator may let them drain it. A launcher runs in the pod of a
user, so the node is the one on which the operator sees the slow rank's pod.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting.progress import reports_of_newest_world
from holdfast_operator.views.reports import SlowRank


def slow_ranks(draft: PlanDraft) -> tuple[SlowRank, ...]:
    """Return the slow ranks of the world that trains. A rank in no pod of the job is left out."""
    told = next((report.slow_ranks for report in reports_of_newest_world(draft) if report.slow_ranks), ())
    pods = [(one, draft.seen.pod_named(one.pod)) for one in told]
    return tuple(replace(one, node=pod.node) for one, pod in pods if pod is not None)
