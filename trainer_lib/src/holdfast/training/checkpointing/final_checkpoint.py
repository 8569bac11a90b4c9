"""Whether a script that fails does so on every rank: then nobody keeps the last step in memory, and it is committed.

A rank that fails alone has nothing to save: its peers keep the state, and recovery must not wait for it. So all that
fail say so in the attempt's store and look for each other for a moment. One word, written once by whoever is first,
decides for all: that all were there, or that someone gave up waiting. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from holdfast.training.distributed.key_value_store import KeyValueStore

# Less than launchers wait for what others have to say before they end an attempt (`Rules.settle`).
LOOK_SECONDS: Final = 0.25
_EVERY: Final = 0.01
_ALL: Final = "all"
_VERDICT: Final = "verdict"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a rank that fails leaves behind. `whole`: its state is that of the step, nothing of the next one in it.
    `saves`: how many it has begun in the attempt."""

    step: int
    whole: bool
    saves: int = 0


def together(
    store: KeyValueStore, own: Left, *, rank: int, size: int, hurried: Callable[[], bool] = lambda: False
) -> tuple[Left, ...]:
    """What each rank leaves, the same on all; nothing unless every rank fails. `hurried`: somebody waits for it."""
    store.set(str(rank), json.dumps(vars(own)))
    keys = [str(each) for each in range(size)]
    deadline = time.monotonic() + LOOK_SECONDS
    while not (there := store.check(keys)) and time.monotonic() < deadline and not hurried():
        time.sleep(_EVERY)
    if store.compare_set(_VERDICT, "", _ALL if there else "some").decode() != _ALL:
        return ()
    return tuple(Left(**json.loads(store.get(key))) for key in keys)


def alike(left: Sequence[Left]) -> bool:
    """Whether all failed, after the same saves: who waits for one that others never began waits in vain."""
    return len({one.saves for one in left}) == 1


def can_be_saved(left: Sequence[Left]) -> bool:
    """Whether they are one state, of one step."""
    return all(one.whole for one in left) and len({one.step for one in left}) == 1


def broken_off(objects: Mapping[str, Any], trace: TracebackType | None) -> bool:
    """Whether the exception came out of a managed object that was at work on itself: an average half updated, say.

    The model is at work all the time, and its forward pass changes nothing that is not taken back.
    """
    others = {id(thing) for name, thing in objects.items() if name != "model"}
    while trace is not None:
        frame = trace.tb_frame
        passes = frame.f_code.co_name in {"forward", "_call_impl", "_wrapped_call_impl"}
        if id(frame.f_locals.get("self")) in others and not passes:
            return True
        trace = trace.tb_next
    return False
