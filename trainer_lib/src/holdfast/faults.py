"""Telling the launcher why this process ends: the script's own exception, or peers that are gone."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from holdfast.constants import MAX_TEXT
from holdfast.errors import PeerLostError
from holdfast.rank_agent import Agent, leave

_TRACEBACK_LINES: Final = 20
# What gloo and NCCL say from inside a script's own communication (DDP, a barrier) when a peer is gone.
_PEER_GONE: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL communicator")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextmanager
def no_blame(agent: Agent, step: Callable[[], int]) -> Iterator[None]:
    """A peer lost in here is told as that, and ends the process quietly: it is nobody's exception."""
    try:
        yield
    except PeerLostError as error:
        lose_peers(agent, step(), str(error))


def lose_peers(agent: Agent, step: int, message: str) -> None:
    """Say it, and go."""
    agent.send("peerLost", step=step, message=message[:MAX_TEXT])
    leave(f"a peer is lost: {message}")


class Reporter:
    """Stands in for `sys.excepthook`: an exception that ends the script is told to the launcher first."""

    def __init__(self, agent: Agent, step: Callable[[], int]) -> None:
        self._agent = agent
        self._step = step
        self._before: Hook = sys.excepthook
        self.failed = False

    def install(self) -> None:
        """From now on."""
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell, then do what would have been done."""
        self.failed = True
        if _lost_peer(error):
            lose_peers(self._agent, self._step(), str(error).splitlines()[0])
        self._agent.send(
            "exception",
            name=kind.__name__,
            message=str(error)[:MAX_TEXT],
            traceback=last_lines(kind, error, trace),
            step=self._step(),
        )
        self._before(kind, error, trace)


def last_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> list[str]:
    """The end of a traceback, a line each, none longer than what a launcher takes."""
    text = "".join(traceback.format_exception(kind, error, trace))
    return [line[:MAX_TEXT] for line in text.rstrip().splitlines()[-_TRACEBACK_LINES:]]


def _lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _PEER_GONE)
