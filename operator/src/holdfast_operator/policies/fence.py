"""Who is proved gone: cannot run again, whatever the network does (docs/reference/protocol.md, Membership, 5).

A silent node proves nothing. Nor does another machine's clock: of a Lease only that it changed counts, and when the
operator saw it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator import constants as c
from holdfast_operator.policies.draft import Draft
from holdfast_operator.status import Phase, Worker


def apply(draft: Draft) -> Draft:
    """Move proved workers from Lost (or Leaving) to Ended."""
    for worker in draft.status.in_phase(Phase.LOST, Phase.LEAVING):
        if _proved(draft, worker):
            draft = draft.with_worker(replace(worker, phase=Phase.ENDED, since=draft.now))
        elif worker.absent_since is not None:
            draft = _watched(draft, worker, _ended_by(worker, worker.absent_since))
    return draft


def _watched(draft: Draft, worker: Worker, ended_by: datetime) -> Draft:
    """Once its pod must have ended, the next renewal of the Lease shows a kubelet that was there to end it."""
    if draft.now < ended_by:
        return draft.wake_at(ended_by)
    node = draft.node(worker)
    if worker.lease_seen is None and node is not None:
        draft = draft.changed_worker(worker, lease_seen=node.lease_renewed)
    return draft.wake_in(timedelta(seconds=10))


def _ended_by(worker: Worker, absent_since: datetime) -> datetime:
    return absent_since + timedelta(seconds=worker.grace_seconds) + c.GONE_MARGIN


def _proved(draft: Draft, worker: Worker) -> bool:
    if not worker.known or not worker.node:
        return worker.absent_since is not None and not worker.node
    node = draft.node(worker)
    if node is None or node.out_of_service:
        return True
    if worker.boot_id and node.boot_id and node.boot_id != worker.boot_id:
        return True
    return worker.lease_seen is not None and node.lease_renewed not in (None, worker.lease_seen)


def proved_gone(draft: Draft) -> frozenset[str]:
    """Pod UIDs that can never train again."""
    return frozenset(worker.pod_uid for worker in draft.status.in_phase(Phase.ENDED) if worker.known)
