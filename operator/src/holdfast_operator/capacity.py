"""Could the cluster hold these pods? Pure, and optimistic: the scheduler has the last word.

Only what our own pods take is known to be taken, so a yes may be wrong; a gang that is not bound in time is gated
again. A no is right as far as requests, node selectors, required node affinity, taints and cordons go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from holdfast_operator import constants as c
from holdfast_operator.api import Json
from holdfast_operator.quantities import SUFFIX, Amounts, add, requests
from holdfast_operator.seen import NodeView, Usage

# What is longer is weighed by the scheduler only: templates of other jobs must not cost this pass anything.
_WEIGHED_EXPRESSIONS = 256


class Room:
    """What is left on each node after the pods that were put there."""

    def __init__(self, nodes: Iterable[NodeView], usage: Iterable[Usage], now: datetime) -> None:
        self._nodes = [node for node in nodes if node.ready and not node.unschedulable and not node.dead(now)]
        self._left = {node.name: dict(node.offers) for node in self._nodes}
        for taken in usage:
            if taken.node in self._left:
                add(self._left[taken.node], taken.amounts, -1)

    def place(self, pod_spec: Json, count: int, avoid: Sequence[str] = ()) -> int:
        """Put up to ``count`` such pods, the fullest nodes first; returns how many found a place."""
        asked = {key: value for key, value in requests(pod_spec).items() if value > 0}
        placed = 0
        for node in self._fullest_first(pod_spec, avoid):
            if placed == count:
                break
            here = self._holds(node, asked, count - placed)
            add(self._left[node], asked, -here)
            placed += here
        return placed

    def _fullest_first(self, pod_spec: Json, avoid: Sequence[str]) -> list[str]:
        """A node that takes a pod stays the fullest, so the order holds until all are put."""
        allowed = [node.name for node in self._nodes if node.name not in avoid and admits(node, pod_spec)]
        return sorted(allowed, key=lambda name: (self._left[name].get("cpu", Decimal(0)), name))

    def _holds(self, node: str, asked: Amounts, most: int) -> int:
        """How many pods that ask for so much still fit, as far as that matters."""
        left = self._left[node]
        for key, value in asked.items():
            if value * most > left.get(key, Decimal(0)):
                most = max(0, int(left.get(key, Decimal(0)) // value))
        return most


def too_big(pod_spec: Json, nodes: Iterable[NodeView]) -> str:
    """Why not even an empty node could hold one such pod; empty if one could."""
    asked = {key: value for key, value in requests(pod_spec).items() if value > 0}
    known = list(nodes)
    if not known:
        return ""
    for key in sorted(asked):
        most = max(node.offers.get(key, Decimal(0)) for node in known)
        if asked[key] > most:
            return f"a worker asks for {_show(asked[key])} {key}, and no node has more than {_show(most)}"
    return ""


def _show(value: Decimal) -> str:
    for suffix in ("Ti", "Gi", "Mi"):
        if value >= SUFFIX[suffix] and value % (SUFFIX[suffix] / 64) == 0:
            return f"{(value / SUFFIX[suffix]).normalize():f}{suffix}"
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
