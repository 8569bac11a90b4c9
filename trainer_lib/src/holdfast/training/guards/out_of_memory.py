"""The responses to a GPU that is out of memory: repeat the step with empty caches, then with smaller micro-batches.
Pure.

The rank that is out of memory decides, and all ranks adopt the newest record when they enter the next world.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from holdfast.core.json_fields import JsonFields

SOON: Final = 100
"""In steps. Empty caches did not help if the memory is full again within this number of steps."""
NEARLY_FULL: Final = 0.95
_ADVICE: Final = (
    "Pass a smaller micro_batch_size to job.batches, use activation checkpointing, or set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True"
)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(JsonFields):
    """How often a rank of this run was out of GPU memory, and the response. Every rank has the same record.

    `step` is the last completed step before the last time. `micro_batch` is the largest micro-batch since then, for
    scripts that request `requested`; 0 without a limit. A script that requests another size has no limit.
    """

    times: int = 0
    step: int = 0
    micro_batch: int = 0
    requested: int = 0

    def limit(self, requested: int) -> int:
        """Return the size of micro-batches for a script that requests `requested`."""
        return min(self.micro_batch, requested) if self.micro_batch and requested == self.requested else requested

    def once_more(self, step: int, *, requested: int = 0, used: int = 0) -> OutOfMemory | None:
        """Return the record after another time; None if no response is left.

        `used` is the size of the largest micro-batch in this step; 0 if the script has its own loader.
        """
        after = replace(self, times=self.times + 1, step=step)
        if not self.times or step > self.step + SOON:
            return after
        return replace(after, micro_batch=(used + 1) // 2, requested=requested) if used > 1 else None


def latest(one: OutOfMemory, other: OutOfMemory) -> OutOfMemory:
    """Return the record with more times."""
    return max(one, other, key=lambda record: record.times)


def repeats(error: str, rank: int, record: OutOfMemory) -> str:
    """Return the message if the step is repeated."""
    how = f"micro-batches of size {record.micro_batch}" if record.micro_batch else "empty caches"
    return f"rank {rank} is out of GPU memory after step {record.step}. All ranks repeat the step with {how}: {error}"


def fails(error: str, why: str) -> str:
    """Return the message if the step is not repeated."""
    return f"out of GPU memory, and the step is not repeated: {why}. {_ADVICE}. {error}"


def nearly_full(*, allocated: int, reserved: int, total: int) -> str:
    """Return the warning about the highest use of a device's memory so far; "" below the limit. All in bytes."""
    if reserved <= NEARLY_FULL * total:
        return ""
    return (
        f"GPU memory is nearly full: PyTorch has reserved {reserved / total:.1%} of {total / 2**30:.1f} GiB and used "
        f"{allocated / total:.1%}. If the memory is full, steps are repeated with smaller micro-batches. {_ADVICE}"
    )
