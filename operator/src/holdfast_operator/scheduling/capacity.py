"""Estimates whether the cluster can hold pods. Pure, and optimistic: the scheduler decides.

Only our own pods count as usage, so the answer "fits" may be wrong; a gang that is not bound in time is gated again.
The answer "does not fit" is correct for requests, node selectors, required node affinity, taints and cordons. It is
also correct for required anti-affinity among our own pods (``PodRequest.namespace`` and ``labels``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import SUFFIX, Amounts, add, requests
from holdfast_operator.views import NodeUsage, NodeView, PodAffinityInfo

# Longer lists are left to the scheduler: templates of other jobs must not slow down this pass.
_WEIGHED_EXPRESSIONS = 256
# Each obstacle that may keep a pod away from a node, with its message about several nodes.
_SELECTOR, _AFFINITY, _TAINT = "1-selector", "2-affinity", "3-taint"
_WORDS = {
    _SELECTOR: "without the labels of its nodeSelector",
    _AFFINITY: "that its node affinity does not match",
    _TAINT: "with a taint that it does not tolerate",
}
_PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class PodRequest:
    """A number of equal pods without a node."""

    pod_spec: Json = field(hash=False)
    count: int
    avoid: tuple[str, ...] = ()
    namespace: str = ""
    labels: Json = field(default_factory=dict, hash=False)

    def within(self, key: str, domain: str) -> PodRequest:
        """Return the same request, restricted to nodes with this label."""
        selector = {**(self.pod_spec.get("nodeSelector") or {}), key: domain}
        return replace(self, pod_spec={**self.pod_spec, "nodeSelector": selector})


class FreeCapacity:
    """The free capacity of each node after the pods that were placed there."""

    def __init__(self, nodes: Iterable[NodeView], usage: Iterable[NodeUsage], now: datetime) -> None:
        self._nodes = [node for node in nodes if node.ready and not node.unschedulable and not node.dead(now)]
        self._left: dict[str, Amounts] = {node.name: dict(node.offers) for node in self._nodes}
        self._tenants: dict[str, tuple[PodAffinityInfo, ...]] = {}
        self._wary: dict[str, tuple[PodAffinityInfo, ...]] = {}  # those with required anti-affinity
        self._yielded: dict[str, Amounts] = {}  # capacity of pods with lower priority that would be preempted
        for taken in usage:
            if taken.node in self._left:
                self._put(taken.node, taken.amounts, 1, taken.tenants)

    def copy(self) -> FreeCapacity:
        """Return a copy for an attempt. Facts about a node are never modified, only replaced."""
        other = copy(self)
        other._left, other._tenants, other._wary = dict(self._left), dict(self._tenants), dict(self._wary)
        return other

    def without(self, usage: Iterable[NodeUsage]) -> FreeCapacity:
        """Return a copy in which these pods count as gone. Pods are first placed where no other pod must leave."""
        other = self.copy()
        other._yielded = dict(self._yielded)
        for taken in usage:
            if taken.node in other._left:
                other._take_out(taken)
        return other

    def put(self, usage: Iterable[NodeUsage]) -> None:
        """Subtract the requests of these pods, even if the capacity does not suffice."""
        for taken in usage:
            self._put(taken.node, taken.amounts, 1, taken.tenants)

    def beyond(self, before: FreeCapacity) -> tuple[NodeUsage, ...]:
        """Return the requests that were placed here since this was copied from ``before``."""
        return tuple(
            NodeUsage(
                node=node,
                amounts={key: before._left[node].get(key, Decimal(0)) - value for key, value in left.items()},
                tenants=self._tenants[node][len(before._tenants.get(node, ())) :],
            )
            for node, left in self._left.items()
            if left is not before._left[node]
        )

    def vacate(self, nodes: Iterable[str]) -> None:
        """Treat these nodes as empty."""
        self._yielded = {node: amounts for node, amounts in self._yielded.items() if node not in nodes}
        for node in self._nodes:
            if node.name in nodes:
                self._left[node.name] = dict(node.offers)
                self._tenants.pop(node.name, None)
                self._wary.pop(node.name, None)

    def domains(self, key: str) -> list[str]:
        """Return the values of a label on usable nodes."""
        return sorted({str(node.labels[key]) for node in self._nodes if key in node.labels})

    def place(self, ask: PodRequest) -> int:
        """Place up to this many pods, on the fullest nodes first. Return the number that found a node."""
        asked = {key: value for key, value in requests(ask.pod_spec).items() if value > 0}
        own = PodAffinityInfo(namespace=ask.namespace, labels=ask.labels, keeps_away=keeps_away(ask.pod_spec))
        from_itself = [term for term in own.keeps_away if _means(term, own, own)]
        barred, placed = self._barred(own), 0
        for node in self._fullest_first(ask.pod_spec, ask.avoid, asked):
            if placed == ask.count or node in barred:
                continue
            apart = self._sharing((_key(term), node) for term in from_itself)
            here = self._holds(node, asked, 1 if node in apart else ask.count - placed)
            if here:
                self._put(node, asked, here, (own,))
                barred |= apart
            placed += here
        return placed

    def _put(self, node: str, amounts: Amounts, count: int, tenants: Sequence[PodAffinityInfo]) -> None:
        left = dict(self._left[node])
        add(left, amounts, -count)
        self._left[node] = left
        self._tenants[node] = (*self._tenants.get(node, ()), *tenants)
        wary = [tenant for tenant in tenants if tenant.keeps_away]
        if wary:
            self._wary[node] = (*self._wary.get(node, ()), *wary)

    def _take_out(self, taken: NodeUsage) -> None:
        node, gone = taken.node, {id(tenant) for tenant in taken.tenants}
        for amounts in (self._left, self._yielded):
            more = dict(amounts.get(node, {}))
            add(more, taken.amounts)
            amounts[node] = more
        for tenants in (self._tenants, self._wary):
            if node in tenants:
                tenants[node] = tuple(tenant for tenant in tenants[node] if id(tenant) not in gone)

    def _fullest_first(self, pod_spec: Json, avoid: Sequence[str], asked: Amounts) -> list[str]:
        """Return usable nodes, the fullest first. A node that receives a pod stays the fullest."""
        allowed = [node.name for node in self._nodes if node.name not in avoid and admits(node, pod_spec)]
        ordered = sorted(allowed, key=lambda name: (self._left[name].get("cpu", Decimal(0)), name))
        return sorted(ordered, key=lambda name: self._displaces(name, asked)) if self._yielded else ordered

    def _displaces(self, node: str, asked: Amounts) -> bool:
        """Return whether another pod must leave for such a pod. The scheduler prefers other nodes."""
        yielded, left = self._yielded.get(node), self._left[node]
        if not yielded:
            return False
        zero = Decimal(0)
        return any(left.get(key, zero) - yielded.get(key, zero) < value for key, value in asked.items())

    def _barred(self, own: PodAffinityInfo) -> frozenset[str]:
        """Return the nodes that anti-affinity in either direction excludes."""
        keys: set[tuple[str, str]] = set()
        for node, tenants in (self._tenants if own.keeps_away else self._wary).items():
            for tenant in tenants:
                keys.update((_key(term), node) for term in own.keeps_away if _means(term, own, tenant))
                keys.update((_key(term), node) for term in tenant.keeps_away if _means(term, tenant, own))
        return self._sharing(keys)

    def _sharing(self, keys: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Return the nodes with the same value of a label as a named node."""
        wanted = set(keys)
        if not wanted:
            return frozenset()
        labels = {node.name: node.labels for node in self._nodes}
        domains = {(key, labels[node][key]) for key, node in wanted if key in labels[node]}
        return frozenset(node for node in labels if any(labels[node].get(key) == value for key, value in domains))

    def _holds(self, node: str, asked: Amounts, most: int) -> int:
        """Return the number of such pods that still fit, up to the number that matters."""
        left = self._left[node]
        for key, value in asked.items():
            if value * most > left.get(key, Decimal(0)):
                most = max(0, int(left.get(key, Decimal(0)) // value))
        return most


def place_together(room: FreeCapacity, asks: Sequence[PodRequest], key: str = "") -> tuple[tuple[int, ...], str]:
    """Return how many of each find capacity, all in one domain if a label is given, and the domain.

    Subtracts that capacity.
    """
    if not key:
        return tuple(room.place(ask) for ask in asks), ""
    best, most = "", 0
    for domain in room.domains(key):
        trial = room.copy()
        found = sum(trial.place(ask.within(key, domain)) for ask in asks)
        if found > most:
            best, most = domain, found
    if not best:
        return (0,) * len(asks), ""
    return tuple(room.place(ask.within(key, best)) for ask in asks), best


def keeps_away(pod_spec: Json) -> tuple[Json, ...]:
    """Return the required terms of a pod's anti-affinity."""
    affinity = pod_spec.get("affinity")
    if not affinity:
        return ()
    found: Sequence[Json] = (affinity.get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or ()
    return tuple(found) if sum(map(_weight, found)) <= _WEIGHED_EXPRESSIONS else ()


def _weight(term: Json) -> int:
    selectors = (term.get("labelSelector") or {}, term.get("namespaceSelector") or {})
    keys = ("matchLabels", "matchExpressions")
    return 1 + sum(len(selector.get(key) or ()) for selector in selectors for key in keys)


def _key(term: Json) -> str:
    return str(term.get("topologyKey"))


def _means(term: Json, own: PodAffinityInfo, other: PodAffinityInfo) -> bool:
    """Return whether a term of one pod selects another.

    Only names of namespaces are known, so other selectors are left to the scheduler.
    """
    selector, named = term.get("namespaceSelector"), term.get("namespaces") or ()
    there = other.namespace in (named or ([own.namespace] if selector is None else ()))
    if selector is not None:
        there = there or _selects(selector, {c.LABEL_NAMESPACE: other.namespace})
    pods = term.get("labelSelector")
    return there and pods is not None and not term.get("matchLabelKeys") and _selects(pods, other.labels)


def _selects(selector: Json, labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items()) and all(
        _expression(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def no_node(pod_spec: Json, nodes: Iterable[NodeView]) -> str:
    """Return why not even an empty node could hold such a pod, with the remedy; empty if one could.

    Temporary reasons, such as a cordon, do not count.
    """
    known = [_at_rest(node) for node in nodes]
    barriers = [_barrier(node, pod_spec) for node in known]
    if known and all(barriers):
        counts = Counter(barriers)
        told = ", ".join(f"{counts[barrier]} {_WORDS[barrier]}" for barrier in sorted(counts))
        asked = "; ".join(filter(None, (_selector(pod_spec, counts), _taints(known, pod_spec, counts))))
        return (
            f"none of {len(known)} nodes can run a worker: {told}{f' ({asked})' if asked else ''}:"
            " fix the template, or add a node that meets its requests"
        )
    open_ = [node for node, barrier in zip(known, barriers, strict=True) if not barrier]
    which = "no node" if len(open_) == len(known) else "no node that it may use"
    impossible = too_big(pod_spec, open_, which)
    return f"{impossible}: ask for less, or add a larger node" if impossible else ""


def _at_rest(node: NodeView) -> NodeView:
    """Return the node without temporary obstacles."""
    lasting = tuple(taint for taint in node.taints if not _passes(taint[0]))
    return node if lasting == node.taints else replace(node, taints=lasting)


def _passes(taint: str) -> bool:
    return taint in c.TAINTS_LEAVING or taint.startswith(_PASSING)


def _selector(pod_spec: Json, counts: Mapping[str, int]) -> str:
    asked = sorted((pod_spec.get("nodeSelector") or {}).items())[:_SHOWN] if _SELECTOR in counts else ()
    return ", ".join(f"{key}={value}" for key, value in asked)


def _taints(nodes: Iterable[NodeView], pod_spec: Json, counts: Mapping[str, int]) -> str:
    tolerations = pod_spec.get("tolerations") or []
    found = {taint for node in nodes for taint in node.taints if not _tolerated(taint, tolerations)}
    shown = sorted(found)[:_SHOWN] if _TAINT in counts else ()
    return ", ".join(f"{key}{f'={value}' if value else ''}:{effect}" for key, value, effect in shown)


def too_big(pod_spec: Json, nodes: Iterable[NodeView], which: str = "no node") -> str:
    """Return a message if a worker requests more of a resource than any node has; empty if one has enough."""
    asked = {key: value for key, value in requests(pod_spec).items() if value > 0}
    known = list(nodes)
    if not known:
        return ""
    for key in sorted(asked):
        most = max(node.offers.get(key, Decimal(0)) for node in known)
        if asked[key] > most:
            return f"a worker asks for {_show(asked[key])} {key}, and {which} has more than {_show(most)}"
    return ""


def _show(value: Decimal) -> str:
    for suffix in ("Ti", "Gi", "Mi"):
        if value >= SUFFIX[suffix] and value % (SUFFIX[suffix] / 64) == 0:
            return f"{(value / SUFFIX[suffix]).normalize():f}{suffix}"
    return f"{value.normalize():f}"


def admits(node: NodeView, pod_spec: Json) -> bool:
    """Return whether the node's labels and taints allow such a pod."""
    return not _barrier(node, pod_spec)


def _barrier(node: NodeView, pod_spec: Json) -> str:
    """Return what keeps such a pod off the node, in the scheduler's order of checks; empty if nothing does."""
    selector = pod_spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return _SELECTOR
    required = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = required.get("nodeSelectorTerms") or []
    if terms and _weighed(terms) and not any(_term(node, term) for term in terms):
        return _AFFINITY
    tolerations = pod_spec.get("tolerations") or []
    return "" if all(_tolerated(taint, tolerations) for taint in node.taints) else _TAINT


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
        case _:  # Gt, Lt: left to the scheduler
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
