"""What the job's time went into, added up over all launchers that it ever had.

Launchers tell their books since their own start. The status keeps, worker by worker, how much of them stands in the
job's sums already, so an operator that starts anew adds nothing twice and loses nothing that launchers still tell.
Reports wake nobody, and the sums are written once a minute; the books of a worker that has ended, with its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Goodput, Phase, Worker
from holdfast_operator.api.status.goodput import since
from holdfast_operator.decision.draft import PlanDraft


def apply(draft: PlanDraft) -> PlanDraft:
    """Take over what was booked, where that is due."""
    known = draft.status.goodput
    if known is None or known.time is None or draft.now - known.time >= c.GOODPUT_EVERY:
        return settled(draft)
    return _book(draft, draft.status.in_phase(Phase.ENDED))


def settled(draft: PlanDraft) -> PlanDraft:
    """Take over all that is told: now, and as of now."""
    booked = _book(draft, draft.status.workers)
    goodput = booked.status.goodput
    if goodput is None or goodput == draft.status.goodput:
        return draft
    return booked.with_status(goodput=replace(goodput, time=draft.now))


def _book(draft: PlanDraft, workers: Iterable[Worker]) -> PlanDraft:
    for worker in workers:
        report = draft.seen.report(worker.pod_uid)
        if report is None or not report.books or report.books == worker.booked:
            continue
        goodput = draft.status.goodput or Goodput()
        goodput = replace(goodput, spent=goodput.plus(since(report.books, worker.booked)))
        draft = draft.changed_worker(worker, booked=report.books).with_status(goodput=goodput)
    return draft
