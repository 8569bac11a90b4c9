"""A save in the background: after the state is copied, a separate thread writes, exchanges and publishes. No torch.

A save that is still running when its attempt ends is harmless. Every rank of the attempt *a* began the save after the
vote on its step *s* had returned to it. The checkpoint is published only if all ranks wrote and fsynced their shares.

- Each surviving member therefore leaves *a* at step *s* or later. A state that continues from a member's memory
  includes *s*. The checkpoint (s, a) is a valid part of that line, even if it is published late. It needs no claim
  against it, and `fencing.inherits` needs no exception.
- If no member survives, or none is in the next world, training continues from an older checkpoint or from the memory
  of an earlier attempt. Both cases write a claim. The first always does. The second does because a launcher of the
  new world had ranks in *a*: any two worlds of a generation share a launcher. The claim names a step below *s* or an
  attempt below *a*, so that it cuts the checkpoint off like that of any replaced attempt. If the checkpoint was
  published before the new attempt searched, training continues from it.

A rank therefore does not wait for the disk when it leaves, but abandons the save. Its waits end with the attempt, the
writes that have started finish, and the result is ignored. `saved_step`, the step that every rank knows to be
durable, does not change, and the next step requests another checkpoint. Two operations wait for the thread: the next
save, which needs its memory, and a restore, which may find this checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.checkpoint.io.direct_writer import step_back
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.saving.stager import Staged
from holdfast.core.errors import PeerLostError
from holdfast.core.interpreter import start_thread

_SLICE: Final = 0.02


@dataclass
class _Outcome:
    result: SaveResult | None = None
    error: BaseException | None = None


@dataclass(kw_only=True)
class PendingSave:
    """One save. One thread copies, and possibly another one writes.

    `called` is the time at which training stopped for it.
    """

    staged: Staged
    commits: Callable[[], SaveResult]
    ended: Callable[[SaveResult], None]
    called: float
    _copied: float = field(default=math.inf, init=False)

    def copy(self) -> None:
        """Copy the state. Training is paused during this call."""
        self.staged.copy()
        self._copied = time.monotonic()

    def commit(self) -> SaveResult:
        """Write and publish the checkpoint, report the result to `ended`, and return it."""
        result, now = self.commits(), time.monotonic()
        copied = min(self._copied, now)
        result = replace(result, stalled=copied - self.called, seconds=now - copied)
        self.ended(result)
        return result


class Saving:
    """A save that runs on its own thread."""

    def __init__(self, work: Callable[[], SaveResult]) -> None:
        self._outcome = _Outcome()
        self._thread = start_thread(_run, work, self._outcome, name="holdfast-saving")

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until the save has ended, with any result, and its thread has freed the tensors.

        `check` may raise to stop waiting.
        """
        self._thread.join(_SLICE)
        while not self.ended:
            check()
            self._thread.join(_SLICE)

    @property
    def lost(self) -> str:
        """The reason for which the save was abandoned, if a peer was lost; otherwise ""."""
        error = self._outcome.error
        return str(error) or "a peer was lost" if isinstance(error, PeerLostError) else ""

    @property
    def result(self) -> SaveResult:
        """The result of a save that has ended, the same on all ranks.

        Raise the error of its thread, if there was one.
        """
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._outcome.result is None:
            raise AssertionError("the save is still in progress")
        return self._outcome.result


def _run(work: Callable[[], SaveResult], outcome: _Outcome) -> None:
    try:
        step_back()
        outcome.result = work()
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that reads the result
        outcome.error = error
