"""Who is proved gone: cannot run again, whatever the network does (docs/reference/protocol.md, Membership, 5).

A silent node proves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from holdfast_operator import constants as c
from holdfast_operator.policies.draft import Draft
from holdfast_operator.status import Phase, Worker


def apply(draft: Draft) -> Draft:
    """Move proved workers from Lost (or Leaving) to Ended."""
    for worker in draft.status.in_phase(Phase.LOST, Phase.LEAVING):
        if _proved(draft, worker):
            draft = draft.with_worker(replace(worker, phase=Phase.ENDED, since=draft.now))
        elif worker.absent_since is not None:
            draft = draft.wake_in(timedelta(seconds=10))
    return draft


def _proved(draft: Draft, worker: Worker) -> bool:
    if not worker.known or not worker.node:
        return worker.absent_since is not None and not worker.node
    node = draft.node(worker)
    if node is None or node.out_of_service:
        return True
    if worker.boot_id and node.boot_id and node.boot_id != worker.boot_id:
        return True
    if worker.absent_since is None or node.lease_renewed is None:
        return False
    ended_by = worker.absent_since + timedelta(seconds=worker.grace_seconds) + c.GONE_MARGIN
    return node.lease_renewed > ended_by


def proved_gone(draft: Draft) -> frozenset[str]:
    """Pod UIDs that can never train again."""
    return frozenset(worker.pod_uid for worker in draft.status.in_phase(Phase.ENDED) if worker.known)
