"""The number of processes of a worker: ``processesPerWorker``, or one per complete GPU of its trainer. Pure.

The kubelet gives a container the devices in its limits. The number is therefore known before a pod is created, and is
the same for all workers. It is never counted on a node, because workers with different numbers cannot form a world.
"""

from __future__ import annotations

from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.quantities import quantity
from holdfast_operator.errors import UnreadableError

_FIX = "set processesPerWorker"


def processes(value: Any, trainer: Json, path: str) -> int:
    """Return the number of processes; ``value`` is that of the spec or None. Raises ``UnreadableError``."""
    if value is None:
        return _one_a_gpu(trainer.get("resources") or {}, path)
    known = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= c.MAX_PROCESSES
    if not known:
        raise UnreadableError(f"{path} must be an integer from 1 to {c.MAX_PROCESSES}, not {value!r}")
    return int(value)


def _one_a_gpu(resources: Json, path: str) -> int:
    limits: Json = resources.get("limits") or {}
    whole = {name: limits[name] for name in c.WHOLE_GPUS if name in limits}
    if whole:
        return _at_most(sum(_count(name, number, path) for name, number in whole.items()), path)
    parts = [f"{limits[name]} {name}" for name in limits if name.startswith(c.GPU_RESOURCES)]
    if parts:
        raise UnreadableError(
            f"{path} is absent, and the trainer's limits have {', '.join(parts)}, which are parts of GPUs: {_FIX}"
        )
    if resources.get("claims"):
        raise UnreadableError(
            f"{path} is absent, and the trainer's devices are claims (resources.claims) without a number: {_FIX}"
        )
    return 1


def _at_most(count: int, path: str) -> int:
    if count > c.MAX_PROCESSES:
        raise UnreadableError(
            f"{path} is absent, and the trainer's limits have {count} GPUs: a worker has at most {c.MAX_PROCESSES}"
            f" processes; {_FIX}, or request fewer GPUs"
        )
    return max(1, count)


def _count(name: str, asked: Any, path: str) -> int:
    number = quantity(asked)
    if str(asked) != "0" and (number != number.to_integral_value() or not 1 <= number <= c.MAX_PROCESSES):
        raise UnreadableError(
            f"{path} is absent, and the trainer's limits have {asked!r} {name}: expected an integer"
            f" from 0 to {c.MAX_PROCESSES}; fix the limit, or {_FIX}"
        )
    return int(number)
