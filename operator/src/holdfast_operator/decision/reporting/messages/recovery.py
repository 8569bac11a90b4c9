"""Incidents, and what is decided about them."""

from __future__ import annotations

from holdfast_operator.decision.reporting.messages.common import count


def resumed(seconds: float, reason: str, *, launched: bool, lost_steps: int | None = None, origin: str = "") -> str:
    lost = f", {count(lost_steps, 'step')} lost" if lost_steps is not None else ""
    state = f", state from: {origin}" if origin else ""
    what = "Training resumed" if launched else "Workers are running again"
    return f"{what} {seconds:.1f} s after {reason}{lost}{state}"


def budget_exceeded(incidents: int, cause: str, span: str, limit: int, last: str = "") -> str:
    more = f". Last incident: {last}" if last else ""
    return f"Restart budget exceeded: {incidents} {cause} incidents in {span} (limit {limit}){more}"


def repeat_offender(node: str, failures: int, hours: float) -> str:
    return f"Node {node} failed this job {count(failures, 'time')}; the job places no worker there for {hours:.1f} h"


def repeat_offender_still_used(node: str, failures: int) -> str:
    return (
        f"Node {node} failed this job {count(failures, 'time')}; keeping the node because no other node has capacity"
    )


def decision(action: str, why: str) -> str:
    return f"{action}: {why}"


def rule_matches(rule: str, facts: str, *, counts: bool) -> str:
    return f"rule {rule} matches {facts}" + ("" if counts else "; not counted towards any budget")


def no_rule(why: str) -> str:
    return f"no rule matches; {why}"


def node_kept(error: str, why: str) -> str:
    return f"{error}; keeping the node because no other node has capacity; {why}"


def repeated_step() -> str:
    return "the processes repeat the step with less GPU memory; not counted towards any budget"


def unrepeatable(reason: str) -> str:
    return f"another attempt would end with {reason} too"


def in_place() -> str:
    return "the launchers continue in the existing pods"


def replaced(pod: str, avoided_node: str = "") -> str:
    return f"a new pod replaces {pod}" + (f" on another node than {avoided_node}" if avoided_node else "")


def escalated(action: str, times: int, scope: str, seconds: int) -> str:
    return f"{action} was tried {count(times, 'time')} for {scope} within {seconds} s"


def symptom_elsewhere(pod: str, why: str, counted_with: str) -> str:
    return f"{pod}: {why}; counted with {counted_with}"


def gpu_error(pod: str, error: str) -> str:
    return f"GPU error in {pod}: {error}"


def pod_condition(pod: str, kind: str, status: str, reason: str = "") -> str:
    return f"Pod {pod} has the condition {kind} {status}" + (f": {reason}" if reason else "")
