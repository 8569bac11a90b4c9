"""Conditions: one place where their transition times are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.api.status import Condition, ConditionType, Status, reason_word, say


@dataclass(frozen=True)
class Reason:
    """A decision's reason for machines and message for people."""

    reason: str
    message: str


def set_condition(
    status: Status, kind: ConditionType, holds: bool, words: Reason, *, generation: int, now: datetime
) -> Status:
    """The status with this condition; its time moves only when it turns."""
    before = status.condition(kind)
    since = before.since if before is not None and before.status == holds else now.replace(microsecond=0)
    changed = Condition(
        type=kind,
        status=holds,
        reason=reason_word(words.reason),
        message=say(words.message),
        observed_generation=generation,
        since=since,
    )
    others = [condition for condition in status.conditions if condition.type != kind]
    return replace(status, conditions=tuple(sorted([*others, changed], key=_order)))


def _order(condition: Condition) -> tuple[int, str]:
    known = [*ConditionType, condition.type]  # another writer's types come last
    return known.index(condition.type), condition.type
