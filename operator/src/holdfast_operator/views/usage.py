"""The usage of a node by the operator's own pods."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import Amounts


@dataclass(frozen=True, kw_only=True)
class PodAffinityInfo:
    """One of our pods on a node, with the facts for anti-affinity in both directions."""

    namespace: str
    labels: Json = field(default_factory=dict, hash=False)
    keeps_away: tuple[Json, ...] = field(default=(), hash=False)


@dataclass(frozen=True, kw_only=True)
class NodeUsage:
    """The usage of a node by our pods of one priority, with the facts for anti-affinity."""

    node: str
    amounts: Amounts = field(hash=False)
    tenants: tuple[PodAffinityInfo, ...] = ()
    priority: int = 0
