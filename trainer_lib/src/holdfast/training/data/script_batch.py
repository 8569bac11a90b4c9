"""The micro-batch that the script received last from `job.batches`, and which calls for it are still executed.

When a world ends, the script does not know it yet. It may call `job.step` for a batch of that world, or `job.save` at
a step that its peers have passed. Such calls return without doing anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.core.errors import UsageError
from holdfast.training.data.loader import MicroBatch


class BatchState(Enum):
    """The state of the last micro-batch."""

    NONE = "its step is finished, or there was no batch yet"
    HELD = "the script has it, and its step is not finished"
    STEP_LOST = "its world has ended: its step is skipped"
    SAVE_LOST = "its world has ended in its step: a save before the next batch is skipped"
    BOTH_LOST = "its world has ended: its step and a save before it are skipped"


# After a world has ended. Peers may have completed the step before the end: their next call is a step and not a save.
_WITHOUT_SAVE = {BatchState.NONE: BatchState.SAVE_LOST, BatchState.STEP_LOST: BatchState.BOTH_LOST}
_SAVE_SKIPPED = {BatchState.SAVE_LOST: BatchState.NONE, BatchState.BOTH_LOST: BatchState.STEP_LOST}
_STEP_SKIPPED = {BatchState.STEP_LOST: BatchState.NONE, BatchState.BOTH_LOST: BatchState.SAVE_LOST}


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A micro-batch whose step the script executes. `last`: it is the last one of its global batch on this rank."""

    micro: MicroBatch
    last: bool


class ScriptBatch:
    """Tracks each micro-batch from the loader to its step."""

    def __init__(self) -> None:
        self.state = BatchState.NONE
        self._taken: Taken | None = None

    @property
    def held(self) -> bool:
        return self.state is BatchState.HELD

    @property
    def world_ended(self) -> bool:
        """Whether the world of the last batch has ended, so that peers may be past what the script calls now."""
        return self.state in _SAVE_SKIPPED

    def give(self, micro: MicroBatch, *, last: bool) -> None:
        """Record that the script receives this micro-batch."""
        self.state, self._taken = BatchState.HELD, Taken(micro=micro, last=last)

    def take(self) -> Taken | None:
        """Return the micro-batch for its step; None if the step is skipped, because its world has ended.

        Raise `UsageError` if the script holds no micro-batch.
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
        """Record that another world was entered, to which a micro-batch that the script holds does not belong."""
        if self.held:
            self.state, self._taken = BatchState.STEP_LOST, None

    def end_world(self) -> None:
        """Skip a save that the script calls before its next batch."""
        self.state = _WITHOUT_SAVE.get(self.state, self.state)

    def end_world_in_save(self) -> None:
        """Skip only the save in which the world ended, unless the batch's step is still to come."""
        if self.state is BatchState.SAVE_LOST:
            self.state = BatchState.NONE

    def skip_save(self) -> bool:
        """Return whether a save that is called now is skipped. At most one save is skipped."""
        skipped = self.state in _SAVE_SKIPPED
        self.state = _SAVE_SKIPPED.get(self.state, self.state)
        return skipped
