"""The use of the job's time, summed over all launchers that it ever had.

A launcher reports its accounts since its own start. The status records per worker how much of them the job's sums
include. After a restart, the operator therefore adds nothing twice and loses nothing that launchers still report.
Reports trigger no pass. The sums are written once a minute, and the accounts of a worker that ended at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Goodput, Phase, Worker
from holdfast_operator.api.status.goodput import since
from holdfast_operator.decision.draft import PlanDraft


def apply(draft: PlanDraft) -> PlanDraft:
    """Add what launchers accounted for, if it is due."""
    known = draft.status.goodput
    if known is None or known.time is None or draft.now - known.time >= c.GOODPUT_EVERY:
        return settled(draft)
    return _book(draft, draft.status.in_phase(Phase.ENDED))


def settled(draft: PlanDraft) -> PlanDraft:
    """Add everything that launchers report now, and set the time of the sums."""
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
