"""The configuration of a job: arguments override the environment, which overrides defaults. Pure.

`checkpoint_override` reverses the first rule, so that `holdfast resume-check` never touches a job's own checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.io.rate_limit import WRITERS
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.saving import lossy_delta
from holdfast.core.environment import Environment
from holdfast.core.errors import UsageError
from holdfast.core.limits import MOST_FULL_EVERY, MOST_IN_FLIGHT

_DURATION: Final = re.compile(r"([1-9]\d*)(s|m|h)?", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
AUTO: Final = "Auto"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The checkpoint interval: in steps, in seconds, or automatic (`policy.interval`)."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse an interval: `50` is steps; `30s`, `5m`, `1h` are durations; `Auto` leaves the choice to the job."""
        if text.strip() == AUTO:
            return cls(auto=True)
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"checkpoint interval {text!r}: expected steps like '50', a duration like '30s' or '5m', or '{AUTO}'"
            )
        number, unit = int(match[1]), match[2]
        return cls(steps=number) if unit is None else cls(seconds=number * _SECONDS[unit])

    def due_at(self, step: int) -> bool:
        """Return whether every rank saves this step without a request."""
        return self.steps is not None and step % self.steps == 0

    def __str__(self) -> str:
        if self.auto:
            return AUTO
        return f"{self.steps} steps" if self.steps else f"{self.seconds:g} s"


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The effective configuration, and the source of each value."""

    checkpoint_dir: Path | str | None
    interval: Interval
    keep_last: int
    full_every: int
    delta_threshold: float
    retention: Rules
    bytes_per_second: int | None
    max_in_flight: int
    resume: Resume
    sources: Mapping[str, str]

    @property
    def folder(self) -> Path | None:
        """The checkpoint directory, if it is not in an object store."""
        return self.checkpoint_dir if isinstance(self.checkpoint_dir, Path) else None

    def described(self) -> dict[str, Any]:
        """Return the fields of the configuration's log line."""
        values = {
            "checkpoint_dir": str(self.checkpoint_dir) if self.checkpoint_dir else "none",
            "checkpoint_interval": str(self.interval),
            "keep_last": self.keep_last,
            "full_every": self.full_every,
            "delta_threshold": self.delta_threshold,
            "retention": str(self.retention) or "none",
            "bytes_per_second": self.bytes_per_second or "none",
            "max_in_flight": self.max_in_flight,
            "resume": str(self.resume),
        }
        return {name: f"{value} ({self.sources[name]})" for name, value in values.items()}


def effective(
    environment: Environment,
    *,
    checkpoint_dir: Path | str | None = None,
    checkpoint_interval: str | int | None = None,
    keep_last: int | None = None,
    full_every: int | None = None,
    delta_threshold: float | None = None,
    retention: str | None = None,
    max_in_flight: int | None = None,
    resume: str | None = None,
) -> JobConfig:
    """Choose the source of each value. Raise `UsageError` if a value is not valid."""
    sources: dict[str, str] = {}

    def pick(name: str, argument: Any, setting: str) -> Any:
        given = argument not in (None, "") and not environment.checkpoint_override
        sources[name] = "argument" if given else "environment" if setting in environment.given else "default"
        return argument if given else getattr(environment, setting)

    keep = int(pick("keep_last", keep_last, "checkpoint_keep"))
    if keep < 1:
        raise UsageError(f"keep_last is {keep}: keep at least one checkpoint")
    full = int(pick("full_every", full_every, "checkpoint_full_every"))
    if not 1 <= full <= MOST_FULL_EVERY:
        raise UsageError(f"full_every is {full}: expected 1 (every checkpoint is full) to {MOST_FULL_EVERY}")
    threshold = pick("delta_threshold", delta_threshold, "checkpoint_delta_threshold")
    in_flight = pick("max_in_flight", max_in_flight, "checkpoint_in_flight")
    if in_flight is not None and not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise UsageError(f"max_in_flight is {in_flight}: expected 1 to {MOST_IN_FLIGHT}, or None for the default")
    return JobConfig(
        checkpoint_dir=pick("checkpoint_dir", checkpoint_dir, "checkpoint_dir"),
        interval=Interval.parse(str(pick("checkpoint_interval", checkpoint_interval, "checkpoint_interval"))),
        keep_last=keep,
        full_every=full,
        delta_threshold=checked_threshold(float(threshold), full),
        retention=Rules.parse(str(pick("retention", retention, "checkpoint_retention"))),
        bytes_per_second=pick("bytes_per_second", None, "checkpoint_bytes_per_second"),
        max_in_flight=in_flight or WRITERS,
        resume=_resume(str(pick("resume", resume, "resume"))),
        sources=sources,
    )


def checked_threshold(threshold: float, full_every: int) -> float:
    """Return the largest difference between a restored weight and the saved one.

    Raise `UsageError` if it is not valid.
    """
    if lossy_delta.threshold(threshold) and full_every == 1:
        raise UsageError(
            f"delta_threshold is {threshold}, and full_every 1 makes every checkpoint full: set full_every above 1"
        )
    return threshold


def _resume(text: str) -> Resume:
    try:
        return Resume(text)
    except ValueError:
        raise UsageError(f"resume is {text!r}: expected 'Always' or 'Never'") from None
