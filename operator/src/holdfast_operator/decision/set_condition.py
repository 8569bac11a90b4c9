"""Update conditions and their transition times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.api.status import Condition, ConditionType, Status, reason_word, say


@dataclass(frozen=True)
class Reason:
    """The reason of a decision, for programs, and its message, for users."""

    reason: str
    message: str


def set_condition(
    status: Status, kind: ConditionType, holds: bool, words: Reason, *, generation: int, now: datetime
) -> Status:
    """Return the status with this condition. The transition time changes only when the condition does."""
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
    known = [*ConditionType, condition.type]  # condition types of other writers come last
    return known.index(condition.type), condition.type
