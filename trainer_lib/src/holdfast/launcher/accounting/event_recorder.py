"""Records the events of a launcher in its accounts and in its timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from holdfast.core.protocol import MEMORY_TIER
from holdfast.launcher.accounting.goodput import GoodputAccounts, Recovery
from holdfast.launcher.accounting.timeline import Timeline
from holdfast.launcher.host.termination_log import redact
from holdfast.launcher.membership.messages import World
from holdfast.launcher.membership.state import State
from holdfast.telemetry.rank_time import Clock

_MAX_MESSAGE: Final = 500
_FRESH_SECONDS: Final = 5.0
_GUARDS: Final = {
    "skipped": ("skipped", ("step", "lowered")),
    "spike": ("spike", ("step", "quantity", "value", "usual")),
    "rolledBack": ("rollback", ("step", "samples")),
    "badSamples": ("unreadable", ("step", "number", "samples")),
    "outOfMemory": ("oom", ("step", "rank", "microBatch")),
}
"""The message of a guard → the kind of its entry, and the fields."""


class EventRecorder:
    """Receives the messages of the ranks and the transitions of the state machine."""

    def __init__(self, clock: Clock, timeline: Timeline | None = None) -> None:
        self._clock = clock
        self._timeline = timeline
        self._first: int | None = None  # the process of local rank 0
        self._workers: int | None = None
        self._saved: tuple[object, ...] = ()
        self._told: tuple[object, ...] = ()
        self._differing: tuple[int, ...] = ()
        self._made_at = float("-inf")
        self._stale = True
        self._document: dict[str, Any] | None = None
        self.accounts = GoodputAccounts(clock)

    def heard(self, pid: int, kind: str, body: Mapping[str, Any]) -> None:
        """Record a message of a rank. Raises KeyError, TypeError or ValueError if the message is not valid."""
        match kind:
            case "standby":
                self.accounts.standby(pid)
            case "hello":
                self._first = pid if int(body["localRank"]) == 0 else self._first
                self.accounts.hello(pid, int(body["localRank"]))
            case "account":
                self.accounts.account(pid, body)
            case "restored":
                self.accounts.restored(int(body["step"]))
                self._restored(body)
            case "step":
                self._stepped(pid, body)
            case "checkpoint":
                self._committed(body)
            case "diverged":
                self._diverged(body)
            case "slowRanks":
                self._write("slow", ranks=list(body["ranks"]))
            case _ if kind in _GUARDS and (pid == self._first or kind == "outOfMemory"):  # others: all send the same
                entry, names = _GUARDS[kind]
                self._write(entry, **{name: body[name] for name in names})
            case _:
                return
        self._stale = self._stale or kind != "step"

    def ended(self, pid: int, *, hung: bool) -> None:
        """Record the end of a rank process. `hung`: this launcher ended the process because it hung."""
        self.accounts.ended(pid, hung=hung)
        self._stale = True

    def follow(self, before: State, after: State) -> None:
        """Record what changed in a transition."""
        if after.phase is not before.phase:
            self.accounts.phase(after.phase)
        if after.failed != before.failed and after.failure is not None and after.failed is not None:
            self._failed(after)
        if after.world is not before.world and after.world is not None:
            self._entered(after.world)

    def document(self) -> dict[str, Any] | None:
        """Return `accounting` of the status. It is created again after a report, or after `_FRESH_SECONDS`."""
        if self._stale or self._clock() - self._made_at >= _FRESH_SECONDS:
            self._document, self._made_at, self._stale = self.accounts.to_json(), self._clock(), False
        return self._document

    def begin(self, **fields: Any) -> None:
        self._write("start", **fields)

    def close(self, code: int, reason: str) -> None:
        self._write("end", code=code, reason=reason)

    def _failed(self, state: State) -> None:
        failure, attempt_id = state.failure, state.failed
        if failure is None or attempt_id is None:
            return
        self.accounts.failed(str(failure.cause), failure.step)
        self._stale = True
        self._write(
            "failure",
            **attempt_id.to_json(),
            cause=str(failure.cause),
            reason=failure.reason,
            message=redact(failure.message)[:_MAX_MESSAGE],
            pod=failure.pod,
            rank=failure.rank,
            step=failure.step,
        )

    def _entered(self, world: World) -> None:
        workers = len(world.members)
        known, self._workers = self._workers, workers
        change = "start" if known is None else "grow" if workers > known else "shrink" if workers < known else "same"
        self._told, self._differing = (), ()
        self._write("world", **world.attempt_id.to_json(), workers=workers, change=change)

    def _stepped(self, pid: int, body: Mapping[str, Any]) -> None:
        step, loss = int(body["step"]), float(body["loss"])
        recovery = self.accounts.stepped(pid, step, body.get("at"))
        if recovery is not None:
            self._recovered(recovery, step)
        if self._timeline is not None:
            self._timeline.sample(
                step,
                loss=loss if math.isfinite(loss) else None,
                worldSize=body.get("worldSize"),
                lr=body.get("lr"),
                samples=body["samples"],
                seconds=body["seconds"],
            )

    def _recovered(self, recovery: Recovery, step: int) -> None:
        self._stale = True
        phases = {name: round(seconds, 6) for name, seconds in recovery.seconds.items()}
        self._write("recovery", cause=recovery.cause, step=step, phases=phases)

    def _committed(self, body: Mapping[str, Any]) -> None:
        """Write one line per checkpoint for all ranks. Checkpoints in memory are too frequent and are skipped."""
        saved = (int(body["step"]), str(body["tier"]), str(body["result"]))
        if saved != self._saved and saved[1:] != (MEMORY_TIER, "Committed"):
            self._saved = saved
            step, tier, result = saved
            why = {"cause": str(body["cause"])} if "cause" in body else {}
            self._write("checkpoint", step=step, tier=tier, result=result, seconds=float(body["seconds"]), **why)

    def _diverged(self, body: Mapping[str, Any]) -> None:
        """Write one line per comparison for all ranks."""
        found = (int(body["step"]), *map(int, body["ranks"]))
        if found != self._differing:
            self._differing = found
            step, *ranks = found
            tensor, repaired = redact(str(body["tensor"]))[:_MAX_MESSAGE], bool(body["majority"])
            self._write("divergence", step=step, ranks=ranks, tensor=tensor, repaired=repaired)

    def _restored(self, body: Mapping[str, Any]) -> None:
        """Write one line per restore for all ranks. State from another rank's memory is not a restore."""
        stores, lost = (
            [str(url) for url in body.get("stores", ())],
            [str(one["path"]) for one in body.get("lost", ())],
        )
        told = (int(body["step"]), *stores, *lost)
        if (stores or lost) and told != self._told:
            self._told = told
            inexact = {"inexact": str(body["inexact"])} if body.get("inexact") else {}
            self._write("restore", step=told[0], stores=stores, lost=lost, **inexact)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._timeline is not None:
            self._timeline.write(kind, **fields)
