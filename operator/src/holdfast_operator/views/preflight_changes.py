"""The changes of a pod's preflight between two reports."""

from __future__ import annotations

from holdfast_operator.api.spec.preflight import CHECKS
from holdfast_operator.views.reports import Preflight


def results(told: Preflight | None) -> set[tuple[str, str]]:
    """Return check and result, only of known checks."""
    return {(check.name, check.result) for check in (told.checks if told else ()) if check.name in CHECKS}


def news(before: Preflight | None, after: Preflight | None, *, first: bool) -> set[tuple[str, str]]:
    """Return the checks that passed or failed since the pod's last report.

    Of the first report only failures count, because the previous process counted what passed before this one started.
    """
    counted = {"Failed"} if first else {"Passed", "Failed"}
    return {found for found in results(after) - results(before) if found[1] in counted}
