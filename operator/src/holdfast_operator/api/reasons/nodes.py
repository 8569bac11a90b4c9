"""Node remediation."""

from __future__ import annotations

from enum import StrEnum


class NodeReason(StrEnum):
    """Node remediation: events on Node objects."""

    NODE_ALERTED = "NodeAlerted"
    """An alert fires for the node, and the mode for it is Observe."""
    DRY_RUN = "DryRun"
    """What would be done with the node if `nodeRemediation.dryRun` were false."""
    NODE_CORDONED = "NodeCordoned"
    """The node is cordoned because of an alert."""
    NODE_DRAINING = "NodeDraining"
    """The node is being drained."""
    DRAIN_WAITS = "DrainWaits"
    """The drain waits for pods that remediation does not evict.

    Delete or move the pods that the message names.
    """
    DRAIN_INCOMPLETE = "DrainIncomplete"
    """Pods are still on the node after the deadline.

    Delete or move the pods that the message names, or set `nodeRemediation.force`.
    """
    NODE_DRAINED = "NodeDrained"
    """The node is drained and stays cordoned.

    Repair it, then uncordon it.
    """
    NODE_REPLACED = "NodeReplaced"
    """The cloud provider is replacing the machine."""
    REPLACE_FAILED = "ReplaceFailed"
    """The cloud provider refused to replace the machine.

    Check the operator's cloud permissions.
    """
    NODE_RELEASED = "NodeReleased"
    """The node is healthy again and takes pods."""
    ALERTS_RESOLVED = "AlertsResolved"
    """The alerts are resolved; the message says when the node is uncordoned."""
    ALERT_UNHEARD = "AlertUnheard"
    """Alertmanager has reported nothing about the alert for 12 hours.

    If the node is healthy, uncordon it.
    """
    STALE_ALERT = "StaleAlert"
    """The alert began before the node was created, so it is about an earlier machine of this name."""
    STALE_REMEDIATION_MARK = "StaleRemediationMark"
    """The node has a mark of an earlier setting.

    Uncordon the node when it is healthy, and remove the annotation.
    """
    UNCORDONED_EXTERNALLY = "UncordonedExternally"
    """Another client uncordoned the node, so remediation leaves it alone until the alert ends."""
    MARK_UNREADABLE = "MarkUnreadable"
    """The node's remediation annotation cannot be read.

    Remove the annotation `holdfast.dev/remediation`.
    """
    CONTROL_PLANE = "ControlPlane"
    """Nodes of the control plane are never acted on."""
    NOT_SELECTED = "NotSelected"
    """`nodeRemediation.nodeSelector` excludes the node."""
    CORDONED_BY_OTHERS = "CordonedByOthers"
    """Another client cordoned the node."""
    COOLING_DOWN = "CoolingDown"
    """The node was acted on recently (`nodeRemediation.cooldownSeconds`)."""
    BREAKER_OPEN = "BreakerOpen"
    """Too many nodes are unavailable (`nodeRemediation.maxUnavailable`).

    Check whether the alert is wrong.
    """
    RATE_LIMITED = "RateLimited"
    """Too many nodes were acted on within the last hour (`nodeRemediation.maxPerHour`)."""
