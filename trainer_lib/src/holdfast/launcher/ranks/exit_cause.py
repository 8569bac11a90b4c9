"""Determines why a rank process ended, from everything that was observed. Pure."""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass
from typing import Any, Final

from holdfast.core.protocol import BAD_SAMPLES, EXIT_PEER_LOST, OUT_OF_MEMORY_RETRIED, Cause
from holdfast.launcher.membership.messages import Failure, Priority

# Both patterns must match. A script has its own connections, for example to its data: only an error that names
# torch's communication indicates a lost peer. But torch's communication also reports errors of the script (different
# shapes).
_COMMUNICATION = re.compile(r"(?i)\bgloo\b|\bc10d\b|\bTCPStore\b|\bDist(?:Network|Backend|Store)Error\b|\bNCCL")
_LOST_PEER = re.compile(
    r"(?i)connection (?:was likely )?(?:closed|reset|refused)|broken pipe|\bgloo\b.*(?:timed? ?out|timeout)|"
    r"socket timeout|NCCL (?:remote process|communicator was aborted|system) error|NCCL communicator was aborted|"
    r"NCCL.*remote process exited|store.*(?:closed|broken)"
)
# Only the end of the output is kept, so the first line of a traceback may be missing. Other lines are no exception.
_TRACEBACK = re.compile(
    r"(?:\[rank\d+\]: ?)?(?:Traceback\b|\s*File \"[^\"]+\", line \d+|[\w.]+(?:Error|Exception)\b)"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Of the host or of a GPU. Torch's allocators raise a RuntimeError.
_OUT_OF_MEMORY = re.compile(
    r"(?:[\w.]*\b_?(?:Array)?MemoryError|(?:[\w.]+\.)?OutOfMemoryError)\b|"
    r"RuntimeError: .*(?:DefaultCPUAllocator: can't allocate memory|std::bad_alloc|CUDA out of memory)"
)
# The guards of the job have skipped steps and samples, and rolled back, before they raise these.
_NON_FINITE = re.compile(r"(?:holdfast\.core\.errors\.)?NonFiniteError\b")
_BAD_SAMPLES = re.compile(r"(?:holdfast\.core\.errors\.)?BadSampleError\b")
# A restart fixes none of these. It may fix errors of the host, a device, a network or a library.
_MISTAKES = frozenset(
    {
        *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NameError"),
        *("UnboundLocalError", "AttributeError", "TypeError", "ValueError", "KeyError", "IndexError"),
        *("AssertionError", "NotImplementedError", "ZeroDivisionError", "UsageError"),
    }
)
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)')
_NO_RESOURCES = tuple(os.strerror(number) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE))
_STOPPED_BY_US = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """All observations of a rank process that ended."""

    rank: int
    pid: int
    returncode: int  # negative: the signal
    sent: frozenset[int] = frozenset()
    oom: bool = False  # the cgroup counted a kill for memory
    greeted: bool = False  # it runs Holdfast's loop
    done: bool = False
    peer_lost: str = ""
    exception: str = ""  # from the socket or from torch's error file
    traceback: tuple[str, ...] = ()
    step: int | None = None

    @property
    def ended_well(self) -> bool:
        """Whether it returned normally: after its loop was done, or without ever having had Holdfast's loop."""
        return self.returncode == 0 and (self.done or not self.greeted)

    @property
    def ended_by_us(self) -> bool:
        """Whether this launcher sent the signal that ended it, or requested it to leave and it did."""
        return bool(self.sent & _STOPPED_BY_US) and (self.returncode >= 0 or -self.returncode in self.sent)

    @property
    def exit_code(self) -> int:
        """The exit code of a shell."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode


@dataclass(frozen=True, kw_only=True)
class FailureContext:
    """Time and place of a failure."""

    pod: str
    node: str
    at: float

    def failure(self, cause: Cause, reason: str, priority: Priority, message: str, **details: Any) -> Failure:
        """Return a failure here. `details`: further fields of `Failure`."""
        return Failure(
            cause=cause,
            reason=reason,
            priority=priority,
            message=message,
            at=self.at,
            pod=self.pod,
            node=self.node,
            **details,
        )


def judge(end: RankEnd, place: FailureContext) -> Failure | None:
    """Return the failure that this end represents, or None."""
    who = f"rank {end.rank} (pid {end.pid})"
    if end.oom and end.returncode == -signal.SIGKILL:  # even if this launcher was about to kill it
        return _failure(
            end, place, Cause.OOM, "OutOfMemory", Priority.OOM, f"{who} was killed by the kernel: out of memory"
        )
    if end.ended_by_us or end.ended_well:
        return None
    if end.returncode == -signal.SIGKILL:
        return _failure(
            end, place, Cause.INFRASTRUCTURE, "RankKilled", Priority.KILLED, f"{who} was ended by SIGKILL"
        )
    if end.returncode == 0:
        text = f"{who} ended with 0 at step {end.step or 0} while others still have steps to do"
        return _failure(end, place, Cause.APPLICATION, "EndedEarly", Priority.ENDED_EARLY, text)
    return _died(end, place, who)


def _died(end: RankEnd, place: FailureContext, who: str) -> Failure:
    if end.peer_lost or end.returncode == EXIT_PEER_LOST:
        return peer_lost(end.rank, end.peer_lost or "its process exited", place, step=end.step)
    last = end.exception or (end.traceback[-1].strip() if end.traceback else "")
    if end.returncode < 0:
        name = _signal_name(-end.returncode)
        text = f"{who} was ended by {name}" + (f": {last}" if last else "")
        return _failure(end, place, Cause.APPLICATION, "Signal", Priority.EXCEPTION, text)
    if not end.exception and _COMMUNICATION.search(last) and _LOST_PEER.search(last):
        return _failure(end, place, Cause.INFRASTRUCTURE, "PeerLost", Priority.PEER_LOST, f"{who}: {last}")
    if end.exception or any(map(_TRACEBACK.match, end.traceback)):
        cause, reason = _of_exception(last)
        return _failure(end, place, cause, reason, Priority.EXCEPTION, last)
    text = f"{who} ended with {end.returncode}" + (f": {last}" if last else "")
    return _failure(end, place, Cause.APPLICATION, "ExitCode", Priority.EXCEPTION, text)


def peer_lost(rank: int, message: str, place: FailureContext, *, step: int | None) -> Failure:
    """A collective failed. This is the root cause only if no other failure is reported."""
    message = f"rank {rank} lost its peers: {message}"
    return place.failure(Cause.INFRASTRUCTURE, "PeerLost", Priority.PEER_LOST, message, rank=rank, step=step)


REPEATS: Final = {
    "rolledBack": (Cause.NON_FINITE, "RolledBack"),
    "outOfMemory": (Cause.OOM, OUT_OF_MEMORY_RETRIED),
}
"""The messages of guards with which a rank leaves an attempt, and cause and reason of its end."""


def repeated(kind: str, rank: int, message: str, place: FailureContext, *, step: int | None) -> Failure:
    """A rank left the attempt, with its process, because a guard (`REPEATS`) repeats steps in the next one."""
    cause, reason = REPEATS[kind]
    return place.failure(cause, reason, Priority.EXCEPTION, message, rank=rank, step=step)


def hung(rank: int, message: str, place: FailureContext, *, cause: Cause, step: int | None) -> Failure:
    """A rank keeps the others waiting."""
    return place.failure(cause, "Hung", Priority.KILLED, message, rank=rank, step=step)


def raised(
    rank: int, exception: str, traceback: tuple[str, ...], place: FailureContext, *, step: int | None = None
) -> Failure:
    """The script raised an exception, which its loop reported before the process ended."""
    cause, reason = _of_exception(exception)
    return place.failure(
        cause,
        reason,
        Priority.EXCEPTION,
        exception,
        rank=rank,
        exit_code=1,
        traceback=traceback,
        step=step,
        mistake=_mistake(exception, traceback),
    )


def _of_exception(text: str) -> tuple[Cause, str]:
    """Return cause and reason of an exception, from its type and message."""
    if _OUT_OF_MEMORY.match(_RANK_PREFIX.sub("", text)):
        return Cause.OOM, "OutOfMemory"
    if _NON_FINITE.match(_RANK_PREFIX.sub("", text)):
        return Cause.NON_FINITE, str(Cause.NON_FINITE)
    if _BAD_SAMPLES.match(_RANK_PREFIX.sub("", text)):
        return Cause.APPLICATION, BAD_SAMPLES
    return Cause.APPLICATION, "Exception"


def _mistake(exception: str, traceback: tuple[str, ...]) -> str:
    """Return type and place of an error in the program, which the next attempt would repeat; "" for other errors."""
    kind = _RANK_PREFIX.sub("", exception).partition(":")[0].removeprefix("holdfast.core.errors.").strip()
    frames = [match for line in traceback if (match := _FRAME.match(_RANK_PREFIX.sub("", line)))]
    return f"{kind} at {frames[-1][1]}:{frames[-1][2]}" if kind in _MISTAKES and frames else ""


def not_started(program: str, message: str, place: FailureContext) -> Failure:
    """The command could not be started."""
    code = 127 if os.strerror(errno.ENOENT) in message else 126
    exhausted = any(text in message for text in _NO_RESOURCES)
    cause = Cause.INFRASTRUCTURE if exhausted else Cause.APPLICATION
    said = message or f"cannot start {program!r}"
    return place.failure(cause, "CannotStart", Priority.EXCEPTION, said, exit_code=code, traceback=(message,))


def _failure(  # noqa: PLR0917  (a table of causes reads best in columns)
    end: RankEnd, place: FailureContext, cause: Cause, reason: str, priority: Priority, message: str
) -> Failure:
    return place.failure(
        cause,
        reason,
        priority,
        message,
        rank=end.rank,
        exit_code=end.exit_code or 1,
        traceback=end.traceback,
        step=end.step,
        mistake=_mistake(message, end.traceback) if reason == "Exception" else "",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
