"""Decide whether a script failed on every rank. In this case no rank keeps the last step in memory. No torch.

The last step is then saved. If only some ranks fail, there is nothing to save: their peers keep the state, and
recovery must not wait. All failing ranks therefore report to the attempt's store and wait for each other for a
moment. The first rank writes one decision for all: either all ranks failed, or a rank stopped waiting.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from holdfast.training.distributed.key_value_store import KeyValueStore

# Less than the time for which launchers wait for other reports before they end an attempt (`Rules.settle`).
LOOK_SECONDS: Final = 0.25
_EVERY: Final = 0.01
_ALL: Final = "all"
_VERDICT: Final = "verdict"


@dataclass(frozen=True, kw_only=True)
class FailingRank:
    """The state of a failing rank.

    `complete`: the state is exactly that of the step, without parts of the next one. `saves`: the number of saves
    that the rank has begun in the attempt.
    """

    step: int
    complete: bool
    saves: int = 0


def together(
    store: KeyValueStore, own: FailingRank, *, rank: int, size: int, hurried: Callable[[], bool] = lambda: False
) -> tuple[FailingRank, ...]:
    """Return the state of each rank, the same on all ranks; empty unless every rank failed.

    `hurried`: returns True if the launcher is waiting.
    """
    store.set(str(rank), json.dumps(vars(own)))
    keys = [str(each) for each in range(size)]
    deadline = time.monotonic() + LOOK_SECONDS
    while not (there := store.check(keys)) and time.monotonic() < deadline and not hurried():
        time.sleep(_EVERY)
    if store.compare_set(_VERDICT, "", _ALL if there else "some").decode() != _ALL:
        return ()
    return tuple(FailingRank(**json.loads(store.get(key))) for key in keys)


def alike(left: Sequence[FailingRank]) -> bool:
    """Return whether all ranks failed after the same saves.

    Otherwise some would wait for a save that others never began.
    """
    return len({one.saves for one in left}) == 1


def can_be_saved(left: Sequence[FailingRank]) -> bool:
    """Return whether all ranks have the same state of one step."""
    return all(one.complete for one in left) and len({one.step for one in left}) == 1


def raised_in_update(objects: Mapping[str, Any], trace: TracebackType | None) -> bool:
    """Return whether the exception came from a managed object that was changing itself, such as a half-updated
    average.

    The model is excluded, because its forward pass changes nothing that is not reverted.
    """
    others = {id(thing) for name, thing in objects.items() if name != "model"}
    while trace is not None:
        frame = trace.tb_frame
        passes = frame.f_code.co_name in {"forward", "_call_impl", "_wrapped_call_impl"}
        if id(frame.f_locals.get("self")) in others and not passes:
            return True
        trace = trace.tb_next
    return False
