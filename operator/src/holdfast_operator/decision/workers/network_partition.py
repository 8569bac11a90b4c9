"""Workers that are unreachable: the node reports, but neither the peers nor the operator receive anything for long.

The kubelet uses the host's network, so it does not detect a fault of the pod network. Silence alone is no proof. The
operator itself may be unreachable, and a worker whose sidecar failed still trains.

Invariant: a worker that may still train is never taken for unreachable. It may train with a worker that reports, or
with others that are unreachable as well.
"""

from __future__ import annotations

from collections import Counter

from holdfast_operator.api.status import Phase
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.views import Report


def cut_off(draft: PlanDraft) -> frozenset[str]:
    """Return the pod UIDs of the wanted workers that are unreachable."""
    members = frozenset(draft.status.membership.member_uids())
    silent = frozenset(
        worker.pod_uid
        for worker in draft.status.in_phase(Phase.WANTED)
        if (worker.ready_at is not None or worker.pod_uid in members)
        and draft.seen.silent_for(worker.pod_uid, draft.now) >= draft.timings.cut_off
    )
    if not silent or not draft.spec.launched:
        return frozenset()
    heard = _heard(draft, members)
    if not heard or _may_train_alone(draft, members - {report.pod_uid for report in heard}):
        return frozenset()
    return silent - _trains(draft) - _not_lost(heard, members)


def _heard(draft: PlanDraft, members: frozenset[str]) -> list[Report]:
    """Return the fresh reports of the generation's launchers."""
    reports = (draft.seen.report(uid) for uid in members)
    return [report for report in reports if report is not None and report.has_launcher and report.fresh(draft.now)]


def _may_train_alone(draft: PlanDraft, unheard: frozenset[str]) -> bool:
    """Return whether the silent members are enough to train in a world that no report mentions."""
    ended = {pod.uid for pod in draft.seen.pods if pod.terminal} | set(draft.status.membership.gone)
    alive = len(unheard - ended)
    majority = 2 * alive > len(draft.status.membership.members)
    return majority and alive >= draft.spec.min_replicas and draft.spec.shrinkable


def _trains(draft: PlanDraft) -> frozenset[str]:
    worlds = (report.world for report in draft.seen.reports if report.fresh(draft.now))
    return frozenset(uid for world in worlds if world is not None for uid in world.members)


def _not_lost(heard: list[Report], members: frozenset[str]) -> frozenset[str]:
    """Return the members that at most half of the reporting launchers miss."""
    missed = Counter(uid for report in heard for uid in set(report.lost_members))
    return frozenset(uid for uid in members if 2 * missed[uid] <= len(heard))
