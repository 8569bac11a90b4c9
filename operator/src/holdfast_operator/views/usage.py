"""What the operator's own pods take of a node."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import Amounts


@dataclass(frozen=True, kw_only=True)
class PodAffinityInfo:
    """A pod of ours on a node, as far as others keep away from it or it from them."""

    namespace: str
    labels: Json = field(default_factory=dict, hash=False)
    keeps_away: tuple[Json, ...] = field(default=(), hash=False)


@dataclass(frozen=True, kw_only=True)
class NodeUsage:
    """What pods of ours, of one priority, take of a node, and who they are to those that keep away from them."""

    node: str
    amounts: Amounts = field(hash=False)
    tenants: tuple[PodAffinityInfo, ...] = ()
    priority: int = 0
