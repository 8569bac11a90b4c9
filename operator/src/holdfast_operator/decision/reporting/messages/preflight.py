"""Preflight checks."""

from __future__ import annotations


def preflight_failed(pod: str, node: str, checks: str) -> str:
    return f"{pod} failed its preflight on {node}: {checks}"


def not_reached(pods: str) -> str:
    return f"not reached by {pods}"


def preflight_of_job(failed: str) -> str:
    return f"{failed}; this is not a node problem. New pods read a changed Secret: delete the waiting ones"


def preflight_on_every_node(failed: str) -> str:
    return f"{failed}; the check fails on every node, so no node is avoided"


def preflight_without_other_node(failed: str) -> str:
    return (
        f"{failed}; no other node has capacity: repair the node, add another one, or set preflight.onFailure to"
        " Ignore"
    )


def preflight_fails_job(failed: str) -> str:
    return f"{failed} (preflight.onFailure: Fail)"


def preflight_ignored(failed: str) -> str:
    return f"{failed}; joining anyway (preflight.onFailure: Ignore)"


def preflight_avoids_node(failed: str, hours: float) -> str:
    return f"{failed}; moving to another node, and the job places no worker there for {hours:.0f} h"
