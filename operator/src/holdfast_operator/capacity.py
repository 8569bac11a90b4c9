"""Could the cluster hold these pods? Pure, and optimistic: the scheduler has the last word.

Only what our own pods take is known to be taken, so a yes may be wrong; a gang that is not bound in time is gated
again. A no is right as far as requests, node selectors, required node affinity, taints and cordons go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from holdfast_operator import constants as c
from holdfast_operator.api import Json
from holdfast_operator.seen import NodeView, Usage

Amounts = dict[str, Decimal]

_SUFFIX = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
# The API server takes no larger one, and rounds what is finer than the smallest up to it.
_LARGEST, _SMALLEST = Decimal(2**63 - 1), _SUFFIX["n"]
# What is longer is weighed by the scheduler only: templates of other jobs must not cost this pass anything.
_WEIGHED_TEXT, _WEIGHED_EXPRESSIONS = 64, 256


def quantity(text: Any) -> Decimal:
    """A Kubernetes quantity; what cannot be read, and what is below 0, counts as 0."""
    value = str(text)
    if len(value) > _WEIGHED_TEXT:
        return Decimal(0)
    for length in (2, 1, 0):
        number, suffix = (value[:-length], value[-length:]) if length else (value, "")
        if suffix not in _SUFFIX:
            continue
        try:
            found = Decimal(number)
        except InvalidOperation:
            continue
        return _bounded(found, suffix)
    return Decimal(0)


def _bounded(number: Decimal, suffix: str) -> Decimal:
    if not number.is_finite() or number <= 0:
        return Decimal(0)
    if number.adjusted() > _LARGEST.adjusted():
        return _LARGEST
    if number.adjusted() < -_LARGEST.adjusted():
        return _SMALLEST
    return min(_LARGEST, max(_SMALLEST, number * _SUFFIX[suffix]))


def requests(pod_spec: Json) -> Amounts:
    """What a pod asks for: containers and native sidecars together, or its largest init container if that is more."""
    running: Amounts = {"pods": Decimal(1)}
    for container in pod_spec.get("containers") or ():
        _add(running, _container(container))
    peak: Amounts = {}
    sidecars: Amounts = {}
    for container in pod_spec.get("initContainers") or ():
        amounts = _container(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, amounts)
            amounts = {}
        _add(amounts, sidecars)
        peak = _most(peak, amounts)
    _add(running, sidecars)
    result = _most(running, peak)
    _add(result, {key: quantity(value) for key, value in (pod_spec.get("overhead") or {}).items()})
    return result


def _container(container: Json) -> Amounts:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: quantity(value) for key, value in asked.items()}


def _add(into: Amounts, amounts: Mapping[str, Decimal]) -> None:
    for key, value in amounts.items():
        into[key] = into.get(key, Decimal(0)) + value


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {key: max(one.get(key, Decimal(0)), other.get(key, Decimal(0))) for key in one.keys() | other.keys()}


class Room:
    """What is left on each node after the pods that were put there."""

    def __init__(self, nodes: Iterable[NodeView], usage: Iterable[Usage], now: datetime) -> None:
        self._nodes = [node for node in nodes if node.ready and not node.unschedulable and not node.dead(now)]
        self._left = {node.name: {k: quantity(v) for k, v in node.allocatable.items()} for node in self._nodes}
        for taken in usage:
            if taken.node in self._left:
                self._take(taken.node, requests(taken.requests))

    def place(self, pod_spec: Json, count: int, avoid: Sequence[str] = ()) -> int:
        """Put up to ``count`` such pods; returns how many found a place."""
        asked = {key: value for key, value in requests(pod_spec).items() if value > 0}
        allowed = [node.name for node in self._nodes if node.name not in avoid and admits(node, pod_spec)]
        placed = 0
        while placed < count:
            node = self._best(allowed, asked)
            if node is None:
                break
            self._take(node, asked)
            placed += 1
        return placed

    def _best(self, allowed: Sequence[str], asked: Amounts) -> str | None:
        fitting = [name for name in allowed if self._fits(name, asked)]
        return min(fitting, key=lambda name: (self._left[name].get("cpu", Decimal(0)), name), default=None)

    def _fits(self, node: str, asked: Amounts) -> bool:
        left = self._left[node]
        return all(value <= left.get(key, Decimal(0)) for key, value in asked.items())

    def _take(self, node: str, amounts: Amounts) -> None:
        left = self._left[node]
        for key, value in amounts.items():
            left[key] = left.get(key, Decimal(0)) - value


def too_big(pod_spec: Json, nodes: Iterable[NodeView]) -> str:
    """Why not even an empty node could hold one such pod; empty if one could."""
    asked = {key: value for key, value in requests(pod_spec).items() if value > 0}
    known = list(nodes)
    if not known:
        return ""
    for key in sorted(asked):
        most = max(quantity(node.allocatable.get(key, 0)) for node in known)
        if asked[key] > most:
            return f"a worker asks for {_show(asked[key])} {key}, and no node has more than {_show(most)}"
    return ""


def _show(value: Decimal) -> str:
    for suffix in ("Ti", "Gi", "Mi"):
        if value >= _SUFFIX[suffix] and value % (_SUFFIX[suffix] / 64) == 0:
            return f"{(value / _SUFFIX[suffix]).normalize():f}{suffix}"
    return f"{value.normalize():f}"


def admits(node: NodeView, pod_spec: Json) -> bool:
    """Whether the node's labels and taints allow such a pod."""
    selector = pod_spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return False
    required = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = required.get("nodeSelectorTerms") or []
    if terms and _weighed(terms) and not any(_term(node, term) for term in terms):
        return False
    tolerations = pod_spec.get("tolerations") or []
    return all(_tolerated(taint, tolerations) for taint in node.taints)


def _weighed(terms: Sequence[Json]) -> bool:
    expressions = (len(term.get(key) or ()) + 1 for term in terms for key in ("matchExpressions", "matchFields"))
    return len(terms) <= _WEIGHED_EXPRESSIONS and sum(expressions) <= 2 * _WEIGHED_EXPRESSIONS


def _term(node: NodeView, term: Json) -> bool:
    fields = {"metadata.name": node.name}
    return all(_expression(expr, node.labels) for expr in term.get("matchExpressions") or ()) and all(
        _expression(expr, fields) for expr in term.get("matchFields") or ()
    )


def _expression(expression: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:  # Gt, Lt: the scheduler judges
            return True


def _tolerated(taint: tuple[str, str, str], tolerations: Iterable[Json]) -> bool:
    key, value, effect = taint
    if effect == "PreferNoSchedule" or key in (c.TAINT_NOT_READY, c.TAINT_UNREACHABLE):
        return True
    return any(_tolerates(toleration, key, value, effect) for toleration in tolerations)


def _tolerates(toleration: Json, key: str, value: str, effect: str) -> bool:
    if toleration.get("effect") not in (None, "", effect):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", key)
    return toleration.get("key") == key and str(toleration.get("value") or "") == value
