"""Exit processes whose script has ended, while the interpreter still waits for threads and children.

A non-daemon thread (of an experiment tracker, a metrics server) or `multiprocessing` child may never end. The work is
done and saved, but the job would keep its GPUs. Such threads and children are logged after some seconds, and the
process exits after a time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NoReturn

from holdfast.core.protocol import EXIT_PEER_LOST

_log = logging.getLogger("holdfast.job")

WARN_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_MOST_NAMED: Final = 10
_TEXT: Final = (
    "the script has ended, but %d of its threads or child processes still run: %s; this process exits in %.0f s "
    "(HOLDFAST_EXIT_SECONDS), and its work is saved: end them in the script, or make them daemons"
)


def exit_now(status: int) -> NoReturn:
    """Exit this process immediately. Flush its output if possible: a full disk must not keep the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have replaced the streams
            stream.flush()
    os._exit(status)


def exit_peer_lost(why: str) -> NoReturn:
    """Exit this process immediately, because its peers or its launcher are lost. The script did not cause it.

    A regular exit would wait for communicators that never answer.
    """
    logging.getLogger("holdfast.rank_agent").warning("this process exits: %s", why)
    exit_now(EXIT_PEER_LOST)


def watch_exit(close: Callable[[], None], *, limit: float, failed: Callable[[], bool]) -> None:
    """Call `close` and exit this process `limit` seconds after its script has ended without an exception."""

    def watch() -> None:
        threading.main_thread().join()
        if not failed() and outlast(keepers, limit=limit, clock=time.monotonic, sleep=time.sleep):
            close()
            exit_now(0)

    threading.Thread(target=watch, name="holdfast-exit", daemon=True).start()


def outlast(
    keeping: Callable[[], Sequence[str]],
    *,
    limit: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Wait at most `limit` seconds for what keeps the process. Return whether something is left.

    The threads and children are logged once after `WARN_SECONDS`, or earlier if the limit is shorter.
    """
    began, warned = clock(), False
    while found := keeping():
        waited = clock() - began
        if not warned and waited >= min(WARN_SECONDS, limit):
            warned = True
            named = ", ".join(found[:_MOST_NAMED]) + (", …" if len(found) > _MOST_NAMED else "")
            _log.warning(_TEXT, len(found), named, max(0.0, limit - waited))
        if waited >= limit:
            _log.warning(
                "this process exits: its threads or child processes did not end within %.0f s of the script", limit
            )
            return True
        sleep(_LOOK_SECONDS)
    return False


def keepers() -> list[str]:
    """Return what the interpreter waits for at its exit: threads with their place, and children with their process
    ID.
    """
    loaded = sys.modules.get("multiprocessing.process")
    children = [] if loaded is None else [child for child in loaded.active_children() if not child.daemon]
    return [*_threads(), *(f"{child.name} (process {child.pid})" for child in children)]


def _threads() -> list[str]:
    frames = sys._current_frames()
    here = (threading.main_thread(), threading.current_thread())
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread not in here]
    return [f"{thread.name} ({_place(frames.get(thread.ident or 0))})" for thread in threads]


def _place(frame: FrameType | None) -> str:
    """Return file and line of the innermost code outside Python's own threading module."""
    own = frame
    while own is not None and own.f_code.co_filename == threading.__file__:
        own = own.f_back
    found = own or frame
    return "just ended" if found is None else f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"
