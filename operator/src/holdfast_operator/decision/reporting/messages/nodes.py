"""Nodes under remediation."""

from __future__ import annotations


def alert_before_node(why: str) -> str:
    return (
        f"{why}: the alert began before this node was created, so it is about an earlier machine of this name; no"
        " action taken unless it begins again"
    )


def only_observed(why: str) -> str:
    return f"{why}; no action taken (mode Observe)"


def blocked(why: str, mode: str, reason: str) -> str:
    return f"{why}; {mode} blocked: {reason}"


def dry_run(why: str, mode: str) -> str:
    return f"{why}; {mode} would be done (dryRun)"


def cordoned(why: str, mode: str) -> str:
    return f"{why}; the node is cordoned, mode {mode}"


def mark_unreadable() -> str:
    return "its mark cannot be read; remove the annotation holdfast.dev/remediation"


def control_plane() -> str:
    return "nodes of the control plane are never acted on"


def not_selected() -> str:
    return "nodeSelector excludes it"


def cordoned_by_others() -> str:
    return "another client cordoned it"


def cooling_down() -> str:
    return "node is cooling down (cooldownSeconds)"


def max_unavailable(limit: int, nodes: int) -> str:
    return f"maxUnavailable reached ({limit} of {nodes} nodes)"


def max_per_hour(limit: int) -> str:
    return f"maxPerHour reached ({limit})"


def stale_mark() -> str:
    return "The node has a mark of an earlier setting; uncordon the node when it is healthy"


def replacing(why: str) -> str:
    return f"{why}; its machine is being replaced"


def uncordoned_externally(why: str) -> str:
    return f"{why}; another client uncordoned the node: no action taken while the alert lasts"


def alert_unheard(why: str, hours: int, node: str) -> str:
    return (
        f"{why}; Alertmanager has reported nothing about it for {hours} h, as when an alert is silenced. No further"
        f" action; the node stays cordoned. If it is healthy: kubectl uncordon {node}"
    )


def gpu_needs_reset() -> str:
    return "its GPU needs a reset, so that proves nothing; the node is uncordoned after a reboot"


def not_ready() -> str:
    return "the node is uncordoned once it is Ready"


def gpus_missing(gpus: int, expected: int) -> str:
    return f"it has {gpus} of {expected} GPUs; the node is uncordoned once it has all"


def alerts_resolved() -> str:
    return "alerts resolved"


def rebooted() -> str:
    return "the node has booted since"


def alerts_silent() -> str:
    return "nothing is reported about its alerts any more"


def released(why: str, reason: str) -> str:
    return f"{why}: {reason}; the node takes pods again"


def uncordon_yourself(why: str) -> str:
    return f"{why}: alerts resolved; uncordon the node when it is healthy"


def uncordon_later(why: str, reason: str, node: str) -> str:
    return f"{why}: alerts resolved, but {reason}, or when you do it: kubectl uncordon {node}"


def uncordon_soon(why: str) -> str:
    return f"{why}: alerts resolved; the node is uncordoned if they stay resolved"


def drain_waits(why: str, pods: str) -> str:
    return f"{why}; waiting for {pods}"


def drain_incomplete(why: str, pods: str) -> str:
    return f"{why}; still there past the deadline: {pods}"


def draining(why: str) -> str:
    return f"{why}; the node is being drained"


def node_drained(why: str) -> str:
    return f"{why}; the node is drained and stays cordoned"
