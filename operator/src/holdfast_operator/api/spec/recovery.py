"""``spec.recovery``: budgets, backoff, rules and escalation."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import CAUSES, LADDER, RULE_ACTIONS, Cause, RecoveryAction, cause_of
from holdfast_operator.api.spec.fields import choice, integer, items, mapping
from holdfast_operator.errors import UnreadableError

_RULES = "spec.recovery.rules"
_ESCALATION = "spec.recovery.escalation"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The number of incidents of one cause that a job may have within a window."""

    cause: Cause
    max_restarts: int
    window_seconds: int = c.DEFAULT_WINDOW_SECONDS


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The wait before restart n: initial · 2^(n-1), at most max."""

    initial_seconds: int = 5
    max_seconds: int = 300
    jitter_percent: int = 10

    def seconds(self, count: int) -> float:
        """Return the wait before restart number ``count`` (from 1), in seconds."""
        if count <= 0:
            return 0.0
        return float(min(self.max_seconds, self.initial_seconds * 2 ** min(count - 1, 20)))


@dataclass(frozen=True, kw_only=True)
class ExitCodes:
    """A set of exit codes, or all other codes of a failure."""

    operator: str
    values: tuple[int, ...]

    def hold(self, code: int) -> bool:
        """Return whether the set contains this code."""
        return (code in self.values) == (self.operator == c.IN)


@dataclass(frozen=True, kw_only=True)
class PodCondition:
    """A condition of the worker's pod; without a reason, one with any reason."""

    type: str
    status: str = "True"
    reason: str = ""

    def holds(self, condition: tuple[str, str, str]) -> bool:
        """Return whether this matches a pod's (type, status, reason)."""
        kind, status, reason = condition
        return (kind, status) == (self.type, self.status) and self.reason in {"", reason}


@dataclass(frozen=True, kw_only=True)
class GpuErrors:
    """Errors of a worker's GPUs, by XID or by kind."""

    xids: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()

    def mean(self, kind: str, xid: int | None) -> bool:
        """Return whether this matches the error."""
        return kind in self.kinds or (xid is not None and xid in self.xids)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The conditions of a rule, which must all hold, and its action."""

    name: str
    action: RecoveryAction
    cause: Cause | None = None  # None: the cause that the operator decides
    exit_codes: ExitCodes | None = None
    signals: tuple[int, ...] = ()
    oom: str = ""
    pod_conditions: tuple[PodCondition, ...] = ()
    gpu_errors: GpuErrors | None = None
    hang: bool = False

    @property
    def for_launchers(self) -> bool:
        """Return whether a launcher can evaluate all conditions of this rule."""
        return not self.pod_conditions and self.gpu_errors is None


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """Actions, the gentlest first. Each is replaced by the next after this many failures in its scope."""

    actions: tuple[RecoveryAction, ...]
    failures: int = 2
    window_seconds: int = 3600


def parse_budgets(recovery: Json) -> tuple[Budget, ...]:
    """Return the restart budgets. Raises ``UnreadableError``."""
    default = [{"cause": Cause.APPLICATION, "maxRestarts": 3}]
    path = "spec.recovery.budgets"
    return tuple(
        Budget(
            cause=Cause(choice(mapping(item, path), "cause", path, CAUSES, None)),
            max_restarts=integer(item, "maxRestarts", path, minimum=0),
            window_seconds=integer(item, "windowSeconds", path, c.DEFAULT_WINDOW_SECONDS, minimum=1),
        )
        for item in items(recovery.get("budgets", default), path)
    )


def parse_backoff(recovery: Json) -> Backoff:
    """Return the wait between restarts. Raises ``UnreadableError``."""
    path = "spec.recovery.backoff"
    value = mapping(recovery.get("backoff", {}), path)
    return Backoff(
        initial_seconds=integer(value, "initialSeconds", path, 5, minimum=0),
        max_seconds=integer(value, "maxSeconds", path, 300, minimum=0),
        jitter_percent=min(100, integer(value, "jitterPercent", path, 10, minimum=0)),
    )


def parse_rules(recovery: Json) -> tuple[Rule, ...]:
    """Return the rules in their order. Raises ``UnreadableError``."""
    return tuple(_rule(mapping(value, _RULES)) for value in items(recovery.get("rules", []), _RULES))


def parse_escalation(recovery: Json) -> Escalation | None:
    """Return the ladder, if there is one. Raises ``UnreadableError``."""
    if recovery.get("escalation") is None:
        return None
    value = mapping(recovery["escalation"], _ESCALATION)
    actions = [RecoveryAction(_word(action, LADDER, f"{_ESCALATION}.actions")) for action in _some(value, "actions")]
    return Escalation(
        actions=tuple(sorted(actions, key=LADDER.index)),
        failures=integer(value, "failures", _ESCALATION, 2, minimum=1),
        window_seconds=integer(value, "windowSeconds", _ESCALATION, 3600, minimum=1),
    )


def _rule(value: Json) -> Rule:
    return Rule(
        name=str(value.get("name") or "unnamed"),
        action=RecoveryAction(choice(value, "action", _RULES, RULE_ACTIONS, None)),
        cause=cause_of(choice(value, "cause", _RULES, ("", *CAUSES), "")),
        exit_codes=_exit_codes(value),
        signals=tuple(_signal(name) for name in items(value.get("onSignals", []), f"{_RULES}.onSignals")),
        oom=choice(value, "onOOM", _RULES, ("", *c.OOM_SCOPES), ""),
        pod_conditions=tuple(
            map(_pod_condition, items(value.get("onPodConditions", []), f"{_RULES}.onPodConditions"))
        ),
        gpu_errors=_gpu_errors(value),
        hang=value.get("onHang") is True,
    )


def _exit_codes(value: Json) -> ExitCodes | None:
    if value.get("onExitCodes") is None:
        return None
    path = f"{_RULES}.onExitCodes"
    codes = mapping(value["onExitCodes"], path)
    values = tuple(_number(code, path) for code in items(codes.get("values"), f"{path}.values"))
    return ExitCodes(operator=choice(codes, "operator", path, (c.IN, c.NOT_IN), None), values=values)


def _pod_condition(value: Any) -> PodCondition:
    path = f"{_RULES}.onPodConditions"
    condition = mapping(value, path)
    return PodCondition(
        type=str(condition.get("type") or ""),
        status=choice(condition, "status", path, ("True", "False", "Unknown"), "True"),
        reason=str(condition.get("reason") or ""),
    )


def _gpu_errors(value: Json) -> GpuErrors | None:
    if value.get("onGpuErrors") is None:
        return None
    path = f"{_RULES}.onGpuErrors"
    errors = mapping(value["onGpuErrors"], path)
    return GpuErrors(
        xids=tuple(_number(xid, path) for xid in items(errors.get("xids", []), f"{path}.xids")),
        kinds=tuple(str(kind) for kind in items(errors.get("kinds", []), f"{path}.kinds")),
    )


def _signal(name: Any) -> int:
    try:
        return int(signal.Signals[str(name)])
    except KeyError:
        raise UnreadableError(f"{_RULES}.onSignals has no signal {name!r}") from None


def _number(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnreadableError(f"{path} must be integers, not {value!r}")
    return value


def _some(value: Json, key: str) -> list[Any]:
    found = items(value.get(key), f"{_ESCALATION}.{key}")
    if not found:
        raise UnreadableError(f"{_ESCALATION}.{key} is empty")
    return found


def _word(value: Any, known: tuple[str, ...], path: str) -> str:
    if value not in known:
        raise UnreadableError(f"{path} must be some of {', '.join(known)}, not {value!r}")
    return str(value)
