"""The micro-batch that the script got last from `job.batches`, and which of the script's calls are still made for it.

When a world ends, the script does not know it yet: it may call `job.step` for a batch of that world, or `job.save`
at a step that its peers have passed. Such calls are answered without being made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.core.errors import UsageError
from holdfast.training.data.loader import MicroBatch


class BatchState(Enum):
    """What became of the last micro-batch."""

    NONE = "its step was made, or there was none yet"
    HELD = "the script has it, and its step is still to come"
    STEP_LOST = "its world has ended: its step is not made"
    SAVE_LOST = "its world has ended in its step: a save before the next batch is not made"
    BOTH_LOST = "its world has ended: neither its step nor a save before that is made"


# After a world has ended. Peers may have completed the step before it ended: their next call is a step and no save.
_WITHOUT_SAVE = {BatchState.NONE: BatchState.SAVE_LOST, BatchState.STEP_LOST: BatchState.BOTH_LOST}
_SAVE_SKIPPED = {BatchState.SAVE_LOST: BatchState.NONE, BatchState.BOTH_LOST: BatchState.STEP_LOST}
_STEP_SKIPPED = {BatchState.STEP_LOST: BatchState.NONE, BatchState.BOTH_LOST: BatchState.SAVE_LOST}


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A micro-batch whose step the script makes. `last`: it is the last one of its global batch on this rank."""

    micro: MicroBatch
    last: bool


class ScriptBatch:
    """Follows one micro-batch after the other from the loader to its step."""

    def __init__(self) -> None:
        self.state = BatchState.NONE
        self._taken: Taken | None = None

    @property
    def held(self) -> bool:
        """Whether the script holds a micro-batch."""
        return self.state is BatchState.HELD

    def give(self, micro: MicroBatch, *, last: bool) -> None:
        """Note that the script gets this micro-batch."""
        self.state, self._taken = BatchState.HELD, Taken(micro=micro, last=last)

    def take(self) -> Taken | None:
        """Return the micro-batch for its step; None if the step is not made, because its world has ended.

        UsageError if the script holds none.
        """
        taken, self._taken = self._taken, None
        if self.held:
            self.state = BatchState.NONE
            return taken
        if self.state not in _STEP_SKIPPED:
            raise UsageError("job.step(loss) was called without a batch of job.batches: call it once for each batch")
        self.state = _STEP_SKIPPED[self.state]
        return None

    def take_back(self) -> None:
        """Another world was entered: a micro-batch that the script holds belongs to none."""
        if self.held:
            self.state, self._taken = BatchState.STEP_LOST, None

    def end_world(self) -> None:
        """Skip a save that the script calls before it has come to the next batch."""
        self.state = _WITHOUT_SAVE.get(self.state, self.state)

    def end_world_in_save(self) -> None:
        """Skip no other save than the one in which the world ended, unless the batch's step is still to come."""
        if self.state is BatchState.SAVE_LOST:
            self.state = BatchState.NONE

    def skip_save(self) -> bool:
        """Return whether a save that is called now is not made. At most one save is skipped."""
        skipped = self.state in _SAVE_SKIPPED
        self.state = _SAVE_SKIPPED.get(self.state, self.state)
        return skipped
