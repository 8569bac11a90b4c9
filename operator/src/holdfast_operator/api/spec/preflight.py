"""``spec.preflight``: checks before a worker may join, and the action after a failed one."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import RecoveryAction
from holdfast_operator.api.spec.fields import choice, integer, items, mapping, size
from holdfast_operator.errors import UnreadableError

GPU = "GPU"
STORAGE = "Storage"
NETWORK = "Network"
CLOCK = "Clock"
OBJECT_STORE = "ObjectStore"
CHECKS = (GPU, STORAGE, OBJECT_STORE, NETWORK, CLOCK)
_PATH = "spec.preflight"


@dataclass(frozen=True, kw_only=True)
class PreflightSpec:
    """The checks of each worker's node."""

    checks: tuple[str, ...] = CHECKS
    on_failure: str = RecoveryAction.AVOID_NODE
    timeout_seconds: int = 60
    free_bytes: int = 1 << 30
    write_bytes: int = 1 << 20  # per second
    skew_seconds: int = 5


def parse_preflight(spec: Json) -> PreflightSpec | None:
    """Return the group, or None if it is absent. Raises ``UnreadableError``."""
    if spec.get("preflight") is None:
        return None
    value = mapping(spec["preflight"], _PATH)
    storage = mapping(value.get("storage", {}), f"{_PATH}.storage")
    clock = mapping(value.get("clock", {}), f"{_PATH}.clock")
    checks = items(value.get("checks", list(CHECKS)), f"{_PATH}.checks")
    unknown = [check for check in checks if check not in CHECKS]
    if unknown:
        raise UnreadableError(f"{_PATH}.checks must be some of {', '.join(CHECKS)}, not {unknown[0]!r}")
    return PreflightSpec(
        checks=tuple(checks),
        on_failure=choice(
            value,
            "onFailure",
            _PATH,
            (RecoveryAction.AVOID_NODE, c.FAIL, RecoveryAction.IGNORE),
            RecoveryAction.AVOID_NODE,
        ),
        timeout_seconds=integer(value, "timeoutSeconds", _PATH, 60, minimum=1),
        free_bytes=size(storage, "minFreeBytes", f"{_PATH}.storage") or 1 << 30,
        write_bytes=size(storage, "minWriteBytesPerSecond", f"{_PATH}.storage") or 1 << 20,
        skew_seconds=integer(clock, "maxSkewSeconds", f"{_PATH}.clock", 5, minimum=1),
    )
