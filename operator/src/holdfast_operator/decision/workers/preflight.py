"""``spec.preflight``: a worker joins once its node has passed the checks. A node that failed one is avoided.

The gate is the worker's readiness: no generation lists a worker that was never ready. Storage, object store and clock
may be shared by all nodes. A shared check that fails on every node that ran it, at least two, is not the node's
fault: no node is avoided, and the job waits with the fix in its message. The job also waits if no other node has
capacity, and at once if the check failed because of the job's own settings.

If two workers do not reach each other, the one that the fewest others reach is at fault.

Invariant: a member of the generation is never ordered away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import Cause, RecoveryAction, StartupReason
from holdfast_operator.api.spec.preflight import CLOCK, NETWORK, OBJECT_STORE, STORAGE
from holdfast_operator.api.status import ConditionType, Phase, Worker, say
from holdfast_operator.api.status.serialization import shorten
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.lifecycle.finished import finish
from holdfast_operator.decision.plan import DecisionMetric
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers.replicas import order_away, planned
from holdfast_operator.decision.workers.unreachable_peers import to_blame
from holdfast_operator.views import Check, Report

_SHARED = frozenset({STORAGE, OBJECT_STORE, CLOCK})


class _FailureScope(Enum):
    NODE = "the node"
    SHARED = "the part that all nodes share"
    JOB = "the job's settings"
    UNKNOWN = "other checks are still running"


@dataclass(frozen=True, kw_only=True)
class _FailedPreflight:
    worker: Worker
    failed: tuple[Check, ...]


def admits(draft: PlanDraft, own: Report) -> bool:
    """Return whether the preflight admits the worker with this report. An older pod was not asked to run one."""
    asked = draft.spec.preflight
    return asked is None or asked.on_failure == RecoveryAction.IGNORE or own.preflight is None or own.preflight.passed


def apply(draft: PlanDraft) -> PlanDraft:
    """Handle failed checks as ``onFailure`` requires."""
    answer = _answer(draft)
    if not answer or draft.spec.suspend:
        return draft
    if answer == RecoveryAction.IGNORE:
        for unfit in _failing(draft, joined=True):
            draft = _ignore(draft, unfit)
        return draft
    spares = {worker.incarnation for worker in draft.spares}
    for unfit in _all_unfit(draft):
        if answer == c.FAIL and unfit.worker.incarnation not in spares:
            return _fail(draft, unfit)
        draft = _leave(draft, unfit)
    return _named(draft)


def held(draft: PlanDraft) -> Reason | None:
    """Return why a worker cannot join although its node is not avoided, with the fix."""
    if _answer(draft) != RecoveryAction.AVOID_NODE:
        return None
    spares = {worker.incarnation for worker in draft.spares}
    for unfit in _all_unfit(draft):
        if unfit.worker.incarnation in spares:
            continue
        told = _told(draft, unfit)
        match _blame(draft, unfit):
            case _FailureScope.JOB:
                message = messages.preflight.preflight_of_job(told)
                return Reason(StartupReason.PREFLIGHT_FAILED, message)
            case _FailureScope.SHARED:
                message = messages.preflight.preflight_on_every_node(told)
                return Reason(StartupReason.PREFLIGHT_FAILED, message)
            case _FailureScope.NODE:
                return Reason(StartupReason.PREFLIGHT_FAILED, messages.preflight.preflight_without_other_node(told))
            case _:
                continue
    return None


def _answer(draft: PlanDraft) -> str:
    """Return the action after a failed check; empty without a preflight. It never fails a job that trained."""
    asked = draft.spec.preflight
    if asked is None:
        return ""
    trained = draft.status.membership.active is not None
    return RecoveryAction.AVOID_NODE if asked.on_failure == c.FAIL and trained else asked.on_failure


def _all_unfit(draft: PlanDraft) -> list[_FailedPreflight]:
    """Return the workers at fault for a failed check; of the network check, this may be another worker."""
    told = list(_failing(draft))
    culprits = _not_reached(draft, told)
    found = []
    for unfit in told:
        failed = tuple(x for x in unfit.failed if x.name != NETWORK or unfit.worker.pod_uid in culprits)
        if failed:
            found.append(_FailedPreflight(worker=unfit.worker, failed=failed))
    known = {unfit.worker.pod_uid for unfit in told}
    for worker in draft.status.in_phase(Phase.WANTED):
        if worker.pod_uid in culprits and worker.pod_uid not in known:
            by = [x.worker for x in told if any(worker.pod_uid in check.unreached for check in x.failed)]
            names = ", ".join(sorted(pod_name(draft.seen.job.name, other.incarnation) for other in by))
            check = Check(name=NETWORK, result="Failed", message=messages.preflight.not_reached(names))
            found.append(_FailedPreflight(worker=worker, failed=(check,)))
    return found


def _failing(draft: PlanDraft, *, joined: bool = False) -> Iterator[_FailedPreflight]:
    """Yield the workers with failed checks that wait to join; with ``joined``, also the others."""
    for worker in draft.status.in_phase(Phase.WANTED):
        report, pod = draft.seen.report(worker.pod_uid), draft.pod(worker)
        if report is None or report.preflight is None or not report.fresh(draft.now) or not worker.node:
            continue
        waits = worker.ready_at is None or joined
        if waits and pod is not None and not pod.absent and not pod.terminal and report.preflight.failed:
            yield _FailedPreflight(worker=worker, failed=report.preflight.failed)


def _not_reached(draft: PlanDraft, told: Sequence[_FailedPreflight]) -> frozenset[str]:
    """Return the UIDs of the workers that are at fault for failed connections."""
    here = {worker.pod_uid: worker for worker in draft.status.in_phase(Phase.WANTED) if worker.known}
    pairs = [
        (unfit.worker.pod_uid, uid)
        for unfit in told
        for check in unfit.failed
        if check.name == NETWORK
        for uid in check.unreached
        if uid in here and uid != unfit.worker.pod_uid
    ]
    members = draft.status.membership.member_uids()
    left = any(NETWORK in entry.failed_checks for entry in draft.status.avoided)
    # The newest worker first; if avoiding a node did not help, the oldest first.
    order = sorted(here, key=lambda uid: here[uid].incarnation, reverse=not left)
    return to_blame(pairs, [uid for uid in order if uid not in members])


def _told(draft: PlanDraft, unfit: _FailedPreflight) -> str:
    checks = "; ".join(f"{check.name}: {check.message}" for check in unfit.failed)
    name = pod_name(draft.seen.job.name, unfit.worker.incarnation)
    return messages.preflight.preflight_failed(name, unfit.worker.node, checks)


def _fail(draft: PlanDraft, unfit: _FailedPreflight) -> PlanDraft:
    message = say(messages.preflight.preflight_fails_job(_told(draft, unfit)))
    draft = draft.with_decision_metric(
        DecisionMetric(
            cause=Cause.INFRASTRUCTURE, action=RecoveryAction.FAIL_JOB, reason=StartupReason.PREFLIGHT_FAILED
        )
    )
    return finish(draft, ConditionType.FAILED, StartupReason.PREFLIGHT_FAILED, message)


def _ignore(draft: PlanDraft, unfit: _FailedPreflight) -> PlanDraft:
    """Report it once for each worker and check."""
    keys = tuple(f"{StartupReason.PREFLIGHT_FAILED}/{check.name}" for check in unfit.failed)
    new = tuple(key for key in keys if key not in unfit.worker.symptoms)
    if not new:
        return draft
    draft = draft.changed_worker(unfit.worker, symptoms=(*unfit.worker.symptoms, *new))
    message = messages.preflight.preflight_ignored(_told(draft, unfit))
    return _said(draft, RecoveryAction.IGNORE, StartupReason.PREFLIGHT_IGNORED, message)


def _leave(draft: PlanDraft, unfit: _FailedPreflight) -> PlanDraft:
    node = unfit.worker.node
    blame = _blame(draft, unfit)
    if blame is _FailureScope.UNKNOWN:
        return draft.requeue_in(c.POLL_OPEN)
    lacking = max(0, draft.target - len(draft.status.in_phase(Phase.WANTED)))
    moved = (*(other.worker for other in _all_unfit(draft) if other.worker.node == node), *planned(draft, lacking))
    if blame in (_FailureScope.SHARED, _FailureScope.JOB) or not draft.can_place_elsewhere(node, moved):
        return draft
    hours = c.AVOID_UNFIT.total_seconds() / 3600
    message = say(messages.preflight.preflight_avoids_node(_told(draft, unfit), hours))
    kept = shorten(message, c.MAX_AVOIDED_MESSAGE)
    failed, reason = tuple(check.name for check in unfit.failed), StartupReason.PREFLIGHT_FAILED
    draft = avoiding(draft, node, reason, c.AVOID_UNFIT, message=kept, failed_checks=failed)
    draft = order_away(draft, unfit.worker, reason, message)
    return _said(draft, RecoveryAction.AVOID_NODE, reason, message)


def _said(draft: PlanDraft, action: RecoveryAction, reason: StartupReason, message: str) -> PlanDraft:
    word = DecisionMetric(cause=Cause.INFRASTRUCTURE, action=action, reason=reason)
    return draft.with_decision_metric(word).with_event(reason, say(message), warning=True)


def _blame(draft: PlanDraft, unfit: _FailedPreflight) -> _FailureScope:
    """Return where the fault lies. If one failed check passes on another node, the node is at fault."""
    found = [_of_check(draft, unfit.worker.node, check) for check in unfit.failed]
    for blame in (_FailureScope.NODE, _FailureScope.UNKNOWN, _FailureScope.JOB):
        if blame in found:
            return blame
    return _FailureScope.SHARED


def _of_check(draft: PlanDraft, node: str, check: Check) -> _FailureScope:
    if check.of_the_job:
        return _FailureScope.JOB
    name = check.name
    if name == NETWORK:
        return _of_network(draft)
    if name not in _SHARED:
        return _FailureScope.NODE
    results = [result for worker, result in _results(draft, name) if worker.node != node]
    if "Passed" in results:
        return _FailureScope.NODE
    if "Running" in results:
        return _FailureScope.UNKNOWN
    before = any(name in entry.failed_checks for entry in draft.status.avoided if entry.node != node)
    return _FailureScope.SHARED if before or "Failed" in results else _FailureScope.NODE


def _of_network(draft: PlanDraft) -> _FailureScope:
    """Return who is at fault after all have tried. If avoiding several nodes did not help, no node is."""
    if any(result == "Running" for _, result in _results(draft, NETWORK)):
        return _FailureScope.UNKNOWN
    left = len({entry.node for entry in draft.status.avoided if NETWORK in entry.failed_checks})
    return _FailureScope.SHARED if left >= c.UNREACHED_NODES else _FailureScope.NODE


def _results(draft: PlanDraft, name: str) -> Iterator[tuple[Worker, str]]:
    """Yield each worker's result; ``Running`` while a result may still arrive."""
    asked = draft.spec.preflight
    span = timedelta(seconds=asked.timeout_seconds if asked is not None else 0) + c.PREFLIGHT_MARGIN
    for worker in draft.status.in_phase(Phase.WANTED):
        report = draft.seen.report(worker.pod_uid)
        result = report.preflight.result(name) if report is not None and report.preflight is not None else ""
        if result in ("Passed", "Failed"):
            yield worker, result
        elif worker.node and worker.ready_at is None and draft.now - (worker.bound_at or draft.now) < span:
            yield worker, "Running" if result in ("", "Running") else result


def _named(draft: PlanDraft) -> PlanDraft:
    """Report in the condition too that the start waits for another node."""
    if draft.status.membership.active is not None or draft.hold is not None:
        return draft
    left = [entry for entry in draft.status.avoided if entry.failed_checks and entry.message]
    waits = (worker for worker in draft.status.in_phase(Phase.WANTED) if worker.ready_at is None)
    if not left or not any(waits):
        return draft
    newest = max(left, key=lambda entry: (entry.until, entry.node))
    return draft.waiting_for(StartupReason.PREFLIGHT_FAILED, newest.message)
