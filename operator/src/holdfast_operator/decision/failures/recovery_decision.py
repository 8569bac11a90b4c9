"""The decision about an incident: from a rule of the job, the default, or an escalation of either.

Every incident gets exactly one decision, which may be to do nothing. Condition, event, log and metric show its reason
and message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import UNREPEATABLE, Basis, Cause, DecisionReason, LauncherReason, RecoveryAction
from holdfast_operator.api.spec.recovery import Escalation
from holdfast_operator.api.status import Incident, Phase, Worker
from holdfast_operator.api.status.failure_history import ActionHistory
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.rules import first_match, gpu_error
from holdfast_operator.decision.reporting import messages
from holdfast_operator.views import GpuError

_ADVICE = (RecoveryAction.RECREATE_POD, RecoveryAction.REPLACE_NODE)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, with the cause under which the incident is counted; ``why`` is the explanation for users."""

    action: RecoveryAction
    basis: Basis
    why: str
    cause: Cause

    @property
    def reason(self) -> DecisionReason:
        """The reason as an enum member."""
        return DecisionReason(f"{self.action}{self.basis}")

    @property
    def message(self) -> str:
        """The sentence that condition, event and log show."""
        return messages.recovery.decision(self.action, self.why)

    @property
    def counts(self) -> bool:
        return self.action != RecoveryAction.IGNORE


def of(draft: PlanDraft, incident: Incident, facts: FailureEvidence, worker: Worker | None) -> Decision:
    """Return the decision about one incident, with escalation."""
    return _escalated(draft, incident, first(draft, incident, facts, worker))


def advised(facts: FailureEvidence) -> GpuError | None:
    """Return the GPU error for which the sidecar's table recommends to recreate the pod or to replace its node."""
    return next((error for error in facts.gpu_errors if error.action in _ADVICE), None)


def first(draft: PlanDraft, incident: Incident, facts: FailureEvidence, worker: Worker | None) -> Decision:
    """Return the decision without escalation."""
    match = first_match(draft.spec.rules, facts)
    if match is not None:
        rule = match.rule
        why = messages.recovery.rule_matches(rule.name, match.why, counts=rule.action != RecoveryAction.IGNORE)
        error = gpu_error(rule, facts)
        cause = rule.cause or (error.cause if error is not None else None) or incident.cause
        return Decision(action=rule.action, basis=Basis.RULE, why=why, cause=cause)
    error = advised(facts)
    if error is not None:
        shown = error.message or error.kind
        why = messages.recovery.no_rule(shown)
        if error.action == RecoveryAction.REPLACE_NODE and not _can_leave(draft, incident, worker):
            action, rest = _default(draft, incident, worker)
            why = messages.recovery.no_rule(messages.recovery.node_kept(shown, rest))
            return Decision(action=action, basis=Basis.DEFAULT, why=why, cause=error.cause or incident.cause)
        return Decision(
            action=RecoveryAction(error.action), basis=Basis.DEFAULT, why=why, cause=error.cause or incident.cause
        )
    action, why = _default(draft, incident, worker)
    return Decision(action=action, basis=Basis.DEFAULT, why=messages.recovery.no_rule(why), cause=incident.cause)


def _can_leave(draft: PlanDraft, incident: Incident, worker: Worker | None) -> bool:
    """Return whether the job's workers on the node fit elsewhere, or those elsewhere may continue without them."""
    node = incident.node or (worker.node if worker is not None else "")
    wanted = draft.needed
    moved = [other for other in wanted if other.node == node]
    if worker is None or worker.phase is not Phase.WANTED:
        moved.append(worker or draft.some_worker())
    elsewhere = sum(1 for other in wanted if other.node not in ("", node))
    elsewhere -= elsewhere % draft.spec.replica_step
    if draft.spec.shrinkable and elsewhere >= max(draft.spec.min_replicas, 1):
        return True
    return draft.can_place_elsewhere(node, moved)


def _default(draft: PlanDraft, incident: Incident, worker: Worker | None) -> tuple[RecoveryAction, str]:
    """Return the action without a matching rule: launchers restart in place, and lost workers are replaced."""
    if incident.reason == LauncherReason.OUT_OF_MEMORY_RETRIED:
        return RecoveryAction.IGNORE, messages.recovery.repeated_step()
    if incident.reason in UNREPEATABLE:
        return RecoveryAction.FAIL_JOB, messages.recovery.unrepeatable(incident.reason)
    if incident.pod is None or (worker is not None and worker.phase is Phase.WANTED):
        return RecoveryAction.IN_PLACE, messages.recovery.in_place()
    node = worker.node if worker is not None else incident.node
    # Not ReplaceNode: the entry that avoids the node already has its duration.
    avoided = any(entry.node == node and entry.required for entry in draft.status.avoided)
    return RecoveryAction.RECREATE_POD, messages.recovery.replaced(incident.pod, (node or "") if avoided else "")


def _escalated(draft: PlanDraft, incident: Incident, first: Decision) -> Decision:
    """Return the first action of the ladder that was not taken too often. Interruptions do not escalate."""
    ladder = draft.spec.escalation
    if ladder is None or first.action not in ladder.actions or first.cause == Cause.INTERRUPTION:
        return first
    decision = first
    for following in ladder.actions[ladder.actions.index(first.action) + 1 :]:
        times = _taken(draft, decision.action, incident, ladder)
        if times < ladder.failures:
            break
        of_what = incident.pod or "the job" if decision.action == RecoveryAction.IN_PLACE else "the job"
        why = messages.recovery.escalated(decision.action, times, of_what, ladder.window_seconds)
        decision = replace(first, action=following, basis=Basis.ESCALATED, why=why)
    return decision


def _scope(action: str, incident: Incident) -> str:
    """Return whose failures count together: those of the pod for ``InPlace``, those of the job otherwise."""
    return incident.pod or "" if action == RecoveryAction.IN_PLACE else ""


def _taken(draft: PlanDraft, action: str, incident: Incident, ladder: Escalation) -> int:
    wanted = (action, _scope(action, incident))
    found = (tally for tally in draft.status.tallies if (tally.action, tally.scope) == wanted)
    return sum(tally.within(draft.now, ladder.window_seconds) for tally in found)


def tallied(draft: PlanDraft, incident: Incident, decision: Decision) -> PlanDraft:
    """Remember the decision for the window of the escalation."""
    ladder = draft.spec.escalation
    if ladder is None and decision.counts:
        return draft
    span = ladder.window_seconds if ladder is not None else c.DEFAULT_WINDOW_SECONDS
    name = (decision.action, _scope(decision.action, incident))
    known = {(tally.action, tally.scope): tally for tally in draft.status.tallies if tally.within(draft.now, span)}
    known[name] = known.get(name, ActionHistory(action=name[0], scope=name[1])).plus(draft.now)
    newest = sorted(known.values(), key=lambda tally: (tally.times[-1], tally.action, tally.scope))
    return draft.with_status(tallies=tuple(newest[-c.TALLIES_KEPT :]))


def ignored(draft: PlanDraft) -> int:
    """Return how many incidents were recently ignored. They count in no budget, but repeated failures still wait."""
    found = (tally for tally in draft.status.tallies if tally.action == RecoveryAction.IGNORE)
    return sum(tally.within(draft.now, c.DEFAULT_WINDOW_SECONDS) for tally in found)
