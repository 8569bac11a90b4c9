"""Report to the launcher why this process exits: the script's own exception, or lost peers."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

import torch.distributed

from holdfast.core.errors import PeerLostError
from holdfast.core.limits import MAX_TEXT
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.launcher_client.exit_watch import exit_peer_lost

_TRACEBACK_LINES: Final = 20
# Error texts of gloo and NCCL in a script's own communication (DDP, a barrier) when a peer is lost.
_PEER_LOST: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL communicator")

# Error texts of torch if the script calls torch.distributed without a group: a collective, destroy_process_group().
_NO_GROUP: Final = ("Default process group has not been initialized", "Process group cannot be None")
_NO_GROUP_ADVICE: Final = (
    "Holdfast creates no default process group, because a lost peer breaks it. If the script needs one, call "
    "torch.distributed.init_process_group() after job.manage(); each lost peer then costs a restart. "
    "If not, remove destroy_process_group() from the script"
)

_DECISION_SECONDS: Final = 10.0
"""The time limit for the launchers' decision after a collective of the script failed, in seconds.

A lost peer is detected within this time, and an error of the script must not wait forever.
"""
_SLICE: Final = 0.01

_log = logging.getLogger("holdfast.job")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _no_record() -> OutOfMemory | None:
    """The default: an exception changes no micro-batches."""
    return None


class Reporter:
    """Replaces `sys.excepthook`: reports an exception that ends the script to the launcher first."""

    def __init__(
        self,
        agent: LauncherConnection,
        step: Callable[[], int],
        out_of_memory: Callable[[], OutOfMemory | None] = _no_record,
    ) -> None:
        """`out_of_memory` returns the record of the run after another error of a full GPU memory, if it changes."""
        self._agent = agent
        self._step = step
        self._out_of_memory = out_of_memory
        self._before: Hook = sys.excepthook
        self._owner = os.getpid()
        self.failed = False
        self.trace: TracebackType | None = None  # the traceback of the exception that ended the script

    def install(self) -> None:
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report, then run the original hook. A forked process does not report."""
        if os.getpid() != self._owner:
            self._before(kind, error, trace)
            return
        self.failed, self.trace = True, trace
        if _lost_peer(error):
            message = str(error).splitlines()[0]
            self._agent.send("peerLost", step=self._step(), message=message[:MAX_TEXT])
            exit_peer_lost(f"a peer is lost: {message}")
        if any(mark in str(error) for mark in _NO_GROUP):
            _log.error(_NO_GROUP_ADVICE)
        is_full = isinstance(error, torch.OutOfMemoryError)
        report(self._agent, error, self._step(), self._out_of_memory() if is_full else None)
        self._before(kind, error, trace)


def report(agent: LauncherConnection, error: BaseException, step: int, record: OutOfMemory | None = None) -> None:
    """Report an exception that ends this rank's part to the launcher, which gives `record` to the next process."""
    agent.send(
        "exception",
        name=type(error).__name__,
        message=str(error)[:MAX_TEXT],
        traceback=last_lines(type(error), error, error.__traceback__),
        step=step,
        **({} if record is None else {"outOfMemory": record.to_json()}),
    )


def last_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return the last lines of a traceback, each truncated to the length that a launcher accepts."""
    text = "".join(traceback.format_exception(kind, error, trace))
    return [line[:MAX_TEXT] for line in text.rstrip().splitlines()[-_TRACEBACK_LINES:]]


def ours(error: Exception) -> str:
    """Return why the attempt is over for this rank, if a collective of Holdfast raised the error; otherwise ""."""
    return str(error) if isinstance(error, PeerLostError) else ""


def lost(error: Exception, *, cancel: CancelToken, single_rank: bool) -> str:
    """Return the same for the script's own collectives.

    Only the launchers can distinguish a lost peer from an error of the script.
    """
    communicates = isinstance(error, torch.distributed.DistError) or _lost_peer(error)
    if single_rank or not communicates:
        return ours(error)
    end_of_wait = time.monotonic() + _DECISION_SECONDS
    while not cancel.is_set() and time.monotonic() < end_of_wait:
        time.sleep(_SLICE)
    return cancel.reason


def _lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _PEER_LOST)
