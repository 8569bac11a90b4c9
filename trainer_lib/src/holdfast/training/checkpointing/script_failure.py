"""The last step of a failing script. It is saved if every rank fails, because no rank keeps it in memory then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Timer
from types import TracebackType
from typing import Final

from holdfast.core.errors import HoldfastError
from holdfast.training.checkpointing import final_checkpoint
from holdfast.training.checkpointing.final_checkpoint import FailingRank
from holdfast.training.checkpointing.hooks import CheckpointHooks
from holdfast.training.distributed.blocking_call import unless_cancelled
from holdfast.training.distributed.process_group import store_client
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.recovery.team import Team
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
# The limit for jobs without another one: launchers wait for `checkpoint.deadlineSeconds`.
_LAST_CHECKPOINT_SECONDS: Final = 60.0
_CHANGED: Final = (
    "step %d is not saved: the script changed the weights after that step, outside of the optimizer. The model may "
    "hold averaged weights. Training resumes from the checkpoint before it"
)


@dataclass(frozen=True, kw_only=True)
class ScriptFailure:
    """The actions of a rank between the script's exception and its exit."""

    agent: LauncherConnection
    hooks: CheckpointHooks
    state: TrainState
    stepper: Stepper
    team: Team

    def save(self, trace: TracebackType | None) -> None:
        """Make the last step durable if every rank failed after it.

        The launcher knows that this rank has failed, and waits while there is something to save.
        """
        cancel = self.team.cancel
        over = Timer(_LAST_CHECKPOINT_SECONDS, cancel.set, ["the last step could not be saved in time"])
        over.daemon = True
        try:
            self.agent.stay()
            cancel.check()  # the script may have failed on the way into the next attempt
            over.start()
            own = FailingRank(step=self.state.step, complete=self._complete(trace), saves=self.hooks.begun)
            left = self._gathered(own)
            if final_checkpoint.alike(left) and (self.hooks.busy or self.hooks.behind):
                self.agent.send("lastCommit", step=self.state.step)
                self._save(left)
        except HoldfastError as error:
            _log.warning("step %d may not be durable: %s", self.state.step, error)
        finally:
            over.cancel()
            self.agent.go()

    def _complete(self, trace: TracebackType | None) -> bool:
        """Return whether the state is exactly that of the last step."""
        step = self.state.step
        if self.state.diverged:
            return False
        try:
            complete = self.stepper.rewind() and not final_checkpoint.raised_in_update(self.state.objects, trace)
            changed = complete and self.stepper.weights.changed()
        except RuntimeError as error:  # a failed device is the usual reason for an exception
            _log.warning("step %d is not saved: the state cannot be read: %s", step, error)
            return False
        if changed:
            _log.warning(_CHANGED, step)
        return complete and not changed

    def _gathered(self, own: FailingRank) -> tuple[FailingRank, ...]:
        place, size = self.team.place, self.team.group.size
        if size == 1:
            return (own,)

        def look() -> tuple[FailingRank, ...]:
            seconds = _LAST_CHECKPOINT_SECONDS
            store = store_client(place.host, place.port or 0, f"{place.name}/failing", seconds)
            return final_checkpoint.together(store, own, rank=place.rank, size=size, hurried=self.agent.hurried)

        found: tuple[FailingRank, ...] = unless_cancelled(look, self.team.cancel)
        return found

    def _save(self, left: Sequence[FailingRank]) -> None:
        """Save the last step, and keep the checkpoint before it, because the script may fail again
        from this state.
        """
        hooks = self.hooks
        hooks.wait()
        if not final_checkpoint.can_be_saved(left):
            _log.warning("step %d is not saved: the state after it is not complete on every rank", left[0].step)
        elif hooks.behind:
            _log.info("every rank failed: step %d is saved before they leave", self.state.step)
            hooks.begin(spare=True)
            hooks.wait()
