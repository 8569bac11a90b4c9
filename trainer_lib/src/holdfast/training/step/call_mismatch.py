"""Detect ranks that are in different calls of the job: a step, `job.save()`, or the end of the script.

These calls are collective, so ranks in different calls wait for each other. Every rank numbers its calls in an
attempt. After a long wait, a rank writes its call with its number into the attempt's store. A rank that finds another
call there raises an error. Short waits exchange nothing. Nothing is checked between calls either. A sharded model
also makes ranks wait in forward and backward, even in an evaluation, and the next call is not known there. A separate
thread accesses the store, because all ranks may be waiting for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from holdfast.core.errors import UsageError
from holdfast.core.interpreter import start_thread
from holdfast.training.distributed.key_value_store import KeyValueStore

_log = logging.getLogger("holdfast.job")

# The seconds of a long wait. A lost peer is detected earlier, and a slow one costs only a message.
LONG_SECONDS: Final = 2.0


class Call(StrEnum):
    STEP = "step"
    SAVE = "save"
    END = "end"
    COMPARE = "compare"


@dataclass(frozen=True, kw_only=True)
class ReportedCall:
    """The call that one rank reports."""

    rank: int
    call: Call
    step: int

    def to_json(self) -> str:
        return json.dumps({"rank": self.rank, "call": self.call, "step": self.step})

    @classmethod
    def from_json(cls, text: bytes) -> ReportedCall:
        value = json.loads(text)
        return cls(rank=int(value["rank"]), call=Call(value["call"]), step=int(value["step"]))

    def __str__(self) -> str:
        match self.call:
            case Call.STEP:
                return f"rank {self.rank} continues to step {self.step + 1}"
            case Call.SAVE:
                return f"rank {self.rank} calls job.save() after step {self.step}"
            case Call.COMPARE:
                return f"rank {self.rank} compares the replicas after step {self.step}"
            case Call.END:
                return f"rank {self.rank} ended after step {self.step}"


@dataclass
class Calls:
    """The calls of one rank in one attempt."""

    rank: int
    step: Callable[[], int]
    connect: Callable[[], KeyValueStore]
    _number: int = 0
    _call: Call | None = None  # None between calls
    _requested: int | None = None
    _answers: list[bytes] = field(default_factory=list)
    _store: KeyValueStore | None = None

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Mark this rank as being in this call until the context ends."""
        self._call = call
        try:
            yield
        finally:
            self._number += 1
            self._call = None

    def waited(self, seconds: float) -> None:
        """Check regularly during a wait. Raise `UsageError` if another rank waits in another call."""
        if self._call is None or seconds < LONG_SECONDS:
            return
        own = ReportedCall(rank=self.rank, call=self._call, step=self.step())
        if self._requested != self._number:
            self._requested, self._answers = self._number, []
            start_thread(self._request, str(self._number), own.to_json(), self._answers, name="holdfast-mismatch")
        elif self._answers:
            first = ReportedCall.from_json(self._answers.pop())
            if first.call is not own.call:
                raise UsageError(f"{own}, and {first}: {_advice({own.call, first.call})}")

    def _request(self, key: str, own: str, answers: list[bytes]) -> None:
        try:
            self._store = self._store or self.connect()
            answers.append(self._store.compare_set(key, "", own))
        except RuntimeError:
            _log.debug("the attempt's store does not answer", exc_info=True)


def _advice(calls: set[Call]) -> str:
    if Call.SAVE in calls:
        return "a checkpoint needs all ranks: call job.save() on every rank at the same step"
    return (
        "all ranks must make the same steps: call job.step(loss, samples=0) on a rank whose data ends early, "
        "or let job.batches() distribute the data"
    )
