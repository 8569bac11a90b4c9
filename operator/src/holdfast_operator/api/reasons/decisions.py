"""Causes of incidents, and the operator's decisions about them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """The cause under which an incident counts. Each cause can have a budget in `spec.recovery.budgets`."""

    APPLICATION = "Application"
    """The training script, its image or its configuration failed.

    Read the traceback in the incident's message and fix the script.
    """
    INFRASTRUCTURE = "Infrastructure"
    """A node, its GPUs, its network or its container runtime failed.

    Check the node that the incident names.
    """
    INTERRUPTION = "Interruption"
    """The worker was evicted, preempted, drained or deleted, or its node is being removed."""
    OOM = "OOM"
    """A process or container exceeded its memory limit.

    Raise the memory limit of the trainer container or reduce the memory that the script uses.
    """
    NON_FINITE = "NonFinite"
    """The loss, gradients or weights were not finite, or a spike, and the job rolled back or failed.

    Look at the samples and modules that the log names, and lower the learning rate.
    """


CAUSES = tuple(Cause)
WITH_BACKOFF = frozenset({Cause.APPLICATION, Cause.OOM})
"""Causes that recur at once after a restart, so that replacements wait."""


class RecoveryAction(StrEnum):
    """What the operator does about a failure."""

    IN_PLACE = "InPlace"
    """The launchers restart the processes; pods and nodes stay."""
    RECREATE_POD = "RecreatePod"
    """A new pod replaces the worker's pod."""
    REPLACE_NODE = "ReplaceNode"
    """All workers of the node move to other nodes, and the job avoids the node for 24 hours."""
    RESTART_GANG = "RestartGang"
    """New pods replace the pods of all workers."""
    FAIL_JOB = "FailJob"
    """The job fails."""
    IGNORE = "Ignore"
    """As InPlace, and the incident counts towards no budget."""
    AVOID_NODE = "AvoidNode"
    """The job places no new worker on the node for a while."""


LADDER = (
    RecoveryAction.IN_PLACE,
    RecoveryAction.RECREATE_POD,
    RecoveryAction.REPLACE_NODE,
    RecoveryAction.RESTART_GANG,
    RecoveryAction.FAIL_JOB,
)
"""The actions that an escalation may use, the gentlest first."""
RULE_ACTIONS = (*LADDER, RecoveryAction.IGNORE)


class Basis(StrEnum):
    """Why the operator chose an action: the end of a decision's reason."""

    RULE = "ByRule"
    """A rule of `spec.recovery.rules` matches the failure."""
    DEFAULT = "ByDefault"
    """No rule matches the failure."""
    ESCALATED = "Escalated"
    """The gentler action was taken too often (`spec.recovery.escalation`)."""


class DecisionReason(StrEnum):
    """The operator's decision about an incident: an action and why it was chosen."""

    IN_PLACE_BY_RULE = "InPlaceByRule"
    """A rule of the job asks for InPlace."""
    RECREATE_POD_BY_RULE = "RecreatePodByRule"
    """A rule of the job asks for RecreatePod."""
    REPLACE_NODE_BY_RULE = "ReplaceNodeByRule"
    """A rule of the job asks for ReplaceNode."""
    RESTART_GANG_BY_RULE = "RestartGangByRule"
    """A rule of the job asks for RestartGang."""
    FAIL_JOB_BY_RULE = "FailJobByRule"
    """A rule of the job asks for FailJob.

    Fix what the message names, then create the job again.
    """
    IGNORE_BY_RULE = "IgnoreByRule"
    """A rule of the job asks for Ignore."""
    IGNORE_BY_DEFAULT = "IgnoreByDefault"
    """The processes repeat a step with less GPU memory, which counts towards no budget."""
    FAIL_JOB_BY_DEFAULT = "FailJobByDefault"
    """No rule matches, and another attempt would meet the same numbers or samples.

    Fix what the message names, then create the job again.
    """
    IN_PLACE_BY_DEFAULT = "InPlaceByDefault"
    """No rule matches, and the launchers restart the processes in the same pods."""
    RECREATE_POD_BY_DEFAULT = "RecreatePodByDefault"
    """No rule matches, and the pod cannot continue."""
    REPLACE_NODE_BY_DEFAULT = "ReplaceNodeByDefault"
    """No rule matches, and the GPU error requires another node.

    Check or reset the GPU of the node.
    """
    RECREATE_POD_ESCALATED = "RecreatePodEscalated"
    """InPlace was taken too often."""
    REPLACE_NODE_ESCALATED = "ReplaceNodeEscalated"
    """The gentler actions were taken too often."""
    RESTART_GANG_ESCALATED = "RestartGangEscalated"
    """The gentler actions were taken too often."""
    FAIL_JOB_ESCALATED = "FailJobEscalated"
    """All gentler actions were taken too often.

    Fix what the message names, then create the job again.
    """

    @property
    def basis(self) -> Basis:
        """The basis of the decision."""
        return next(basis for basis in Basis if self.endswith(basis))

    @property
    def action(self) -> RecoveryAction:
        return RecoveryAction(self.removesuffix(self.basis))


def cause_of(word: Any) -> Cause | None:
    """Return the cause of this name; None for any other value."""
    return Cause(word) if word in CAUSES else None


def decision_reason(word: str) -> DecisionReason | None:
    """Return the decision of this name; None for any other one."""
    return DecisionReason(word) if word in DecisionReason.__members__.values() else None
