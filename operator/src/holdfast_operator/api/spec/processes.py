"""How many processes a worker runs where its job says ``auto``: one for each whole GPU of its trainer. Pure.

The kubelet gives a container what its limits say, so the number is known before a pod is made, alike for all workers,
and the launchers are told it. It is never counted on a node: two workers that counted differently would be no world.
"""

from __future__ import annotations

from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import quantity
from holdfast_operator.errors import UnreadableError

_MEND = "give processesPerWorker a number"


def processes(value: Any, trainer: Json, path: str) -> int:
    """``processesPerWorker`` as a number. Raises ``UnreadableError``, which says what would help."""
    if value in c.AUTO_PROCESSES:
        return _one_a_gpu(trainer.get("resources") or {}, path)
    known = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= c.MAX_PROCESSES
    if not known:
        raise UnreadableError(f"{path} must be a whole number from 1 to {c.MAX_PROCESSES}, or auto, not {value!r}")
    return int(value)


def _one_a_gpu(resources: Json, path: str) -> int:
    limits: Json = resources.get("limits") or {}
    whole = {name: limits[name] for name in c.WHOLE_GPUS if name in limits}
    if whole:
        return _at_most(sum(_count(name, number, path) for name, number in whole.items()), path)
    parts = [f"{limits[name]} {name}" for name in limits if name.startswith(c.GPU_RESOURCES)]
    if parts:
        raise UnreadableError(
            f"{path} is auto, which counts whole GPUs; the trainer's limits ask for {', '.join(parts)}: {_MEND}"
        )
    if resources.get("claims"):
        raise UnreadableError(
            f"{path} is auto, and the trainer's devices are claims (resources.claims), which tell no number: {_MEND}"
        )
    return 1


def _at_most(count: int, path: str) -> int:
    if count > c.MAX_PROCESSES:
        raise UnreadableError(
            f"{path} is auto, and the trainer's limits ask for {count} GPUs: a worker has at most {c.MAX_PROCESSES}"
            f" processes; {_MEND}, or ask for fewer"
        )
    return max(1, count)


def _count(name: str, asked: Any, path: str) -> int:
    number = quantity(asked)
    if str(asked) != "0" and (number != number.to_integral_value() or not 1 <= number <= c.MAX_PROCESSES):
        raise UnreadableError(
            f"{path} is auto, and the trainer's limits ask for {asked!r} {name}, which is no whole number"
            f" from 0 to {c.MAX_PROCESSES}: mend the limit, or {_MEND}"
        )
    return int(number)
