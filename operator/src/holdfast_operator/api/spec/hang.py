"""``spec.hangDetection``."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import LADDER, RecoveryAction
from holdfast_operator.api.spec.fields import choice, integer, mapping, optional_integer
from holdfast_operator.api.spec.recovery import Rule

_PATH = "spec.hangDetection"


@dataclass(frozen=True, kw_only=True)
class HangSpec:
    """The time limits after which a rank counts as hung."""

    enabled: bool = True
    step: int | None = None  # None: the launchers measure the steps
    min_step: int | None = None  # None: calm deadlines
    data: int = 900
    checkpoint: int = 900
    evaluation: int = 3600


def parse_hang(spec: Json) -> HangSpec | None:
    """Return the limits, or None if the group is absent. Raises ``UnreadableError``."""
    if spec.get("hangDetection") is None:
        return None
    value = mapping(spec["hangDetection"], _PATH)
    return HangSpec(
        enabled=choice(value, "mode", _PATH, ("Enabled", "Disabled"), "Enabled") == "Enabled",
        step=optional_integer(value, "stepTimeoutSeconds", _PATH, minimum=1),
        min_step=optional_integer(value, "minStepTimeoutSeconds", _PATH, minimum=1),
        data=integer(value, "dataTimeoutSeconds", _PATH, 900, minimum=1),
        checkpoint=integer(value, "checkpointTimeoutSeconds", _PATH, 900, minimum=1),
        evaluation=integer(value, "evaluationTimeoutSeconds", _PATH, 3600, minimum=1),
    )


def parse_hang_rule(spec: Json) -> tuple[Rule, ...]:
    """Return ``spec.hangDetection.action`` as a rule after all others. Raises ``UnreadableError``."""
    value = mapping(spec.get("hangDetection") or {}, _PATH)
    action = choice(value, "action", _PATH, LADDER, RecoveryAction.IN_PLACE)
    if action == RecoveryAction.IN_PLACE:
        return ()
    return (Rule(name="hangDetection", action=RecoveryAction(action), hang=True),)
