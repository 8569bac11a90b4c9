"""A save on its way: its bytes are copied, and a thread of its own writes, exchanges and publishes. No torch.

Why a save that is still on its way when its attempt ends can do no harm. Every rank of the attempt *a* began it after
the vote on its step *s* had returned to it, and it is published only if all of them wrote and fsynced their shares.

- Each member that lives therefore leaves *a* at *s* or beyond it, and whatever goes on from the memory of one has *s*
  behind it: the commit (s, a) is a true part of that line, however late it lands. So no claim is needed against it,
  and `fencing.inherits` stays as it is.
- If none of them lives, or none is in the next world, what goes on is older: a checkpoint, or the memory of an
  earlier attempt. Both write a claim: the first always does, and the second because a launcher of the new world (any
  two worlds of a generation share one) had ranks in *a*. It names a step below *s* or an attempt below *a*, so that
  the commit is cut off as a zombie's is. One that landed before they looked is what they go on from.

So a rank does not wait for the disk when it leaves: it gives the save up. Its waits end with the attempt, what the
disk has begun ends by itself, and the result is nobody's: what every rank knows to be durable (`saved_step`) does not
move, and the next step asks for another commit. Two things wait for the thread: the next save, which needs its
memory, and a restore, which may find just this commit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.checkpoint.io.direct_writer import step_back
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.saving.stager import Staged
from holdfast.core.errors import PeerLostError

_SLICE: Final = 0.02


@dataclass
class _Outcome:
    result: SaveResult | None = None
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass(kw_only=True)
class PendingSave:
    """One save: a thread copies, and perhaps another commits. `called` is when training began to wait for it."""

    staged: Staged
    commits: Callable[[], SaveResult]
    ended: Callable[[SaveResult], None]
    called: float
    _copied: float = field(default=math.inf, init=False)

    def copy(self) -> None:
        """All for which training waits."""
        self.staged.copy()
        self._copied = time.monotonic()

    def commit(self) -> SaveResult:
        """The rest, and say how it ended."""
        result, now = self.commits(), time.monotonic()
        copied = min(self._copied, now)
        result = replace(result, stalled=copied - self.called, seconds=now - copied)
        self.ended(result)
        return result


class Saving:
    """One save, by a thread."""

    def __init__(self, work: Callable[[], SaveResult]) -> None:
        self._outcome = _Outcome()
        threading.Thread(target=_run, args=(work, self._outcome), name="holdfast-saving", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._outcome.ended.is_set()

    def settle(self, check: Callable[[], None]) -> None:
        """Wait for its end, whatever it is; `check` may raise to leave that wait."""
        while not self._outcome.ended.wait(_SLICE):
            check()

    @property
    def lost(self) -> str:
        """Why it was given up, if a peer was lost."""
        error = self._outcome.error
        return str(error) or "a peer was lost" if isinstance(error, PeerLostError) else ""

    @property
    def result(self) -> SaveResult:
        """What came of it, once it has ended; the same on all ranks. What its thread raised, here too."""
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._outcome.result is None:
            raise AssertionError("the save is still on its way")
        return self._outcome.result


def _run(work: Callable[[], SaveResult], outcome: _Outcome) -> None:
    try:
        step_back()
        outcome.result = work()
    except BaseException as error:  # noqa: BLE001 - carried over to the thread that asks for the result
        outcome.error = error
    finally:
        outcome.ended.set()
