"""How a pod's preflight changed between two reports."""

from __future__ import annotations

from holdfast_operator.api.spec.preflight import CHECKS
from holdfast_operator.views.reports import Preflight


def results(told: Preflight | None) -> set[tuple[str, str]]:
    """Check and result; nothing that this operator does not know."""
    return {(check.name, check.result) for check in (told.checks if told else ()) if check.name in CHECKS}


def news(before: Preflight | None, after: Preflight | None, *, first: bool) -> set[tuple[str, str]]:
    """Which checks passed or failed since the pod's last report.

    Of the first one only failures count: what passed before this process began was counted by the one before it.
    """
    counted = {"Failed"} if first else {"Passed", "Failed"}
    return {found for found in results(after) - results(before) if found[1] in counted}
