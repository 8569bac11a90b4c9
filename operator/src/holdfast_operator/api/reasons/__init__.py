"""Causes, actions and reasons: the values for programs in conditions, events, status and metrics.

A member's docstring is its entry in ``docs/reference/reasons.md``: the first paragraph is the meaning, the second the
action of the user. ``make generate`` writes the page.
"""

from holdfast_operator.api.reasons.decisions import (
    CAUSES,
    LADDER,
    RULE_ACTIONS,
    WITH_BACKOFF,
    Basis,
    Cause,
    DecisionReason,
    RecoveryAction,
    cause_of,
    decision_reason,
)
from holdfast_operator.api.reasons.failures import (
    COLLATERAL,
    SYMPTOMS,
    UNREPEATABLE,
    FailureReason,
    LauncherReason,
)
from holdfast_operator.api.reasons.job import (
    BUDGET_EXCEEDED,
    JobReason,
    WaitReason,
)
from holdfast_operator.api.reasons.nodes import (
    NodeReason,
)
from holdfast_operator.api.reasons.startup import (
    StartupReason,
)
from holdfast_operator.api.reasons.workers import (
    MembershipReason,
    WorkerReason,
)

__all__ = [
    "BUDGET_EXCEEDED",
    "CAUSES",
    "COLLATERAL",
    "LADDER",
    "RULE_ACTIONS",
    "SYMPTOMS",
    "UNREPEATABLE",
    "WITH_BACKOFF",
    "Basis",
    "Cause",
    "DecisionReason",
    "FailureReason",
    "JobReason",
    "LauncherReason",
    "MembershipReason",
    "NodeReason",
    "RecoveryAction",
    "StartupReason",
    "WaitReason",
    "WorkerReason",
    "cause_of",
    "decision_reason",
]
