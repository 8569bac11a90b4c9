"""Averaging of gradients over the ranks of a world, overlapped with backward.

Gradients are already weighted by samples. Their sum over all micro-batches of all ranks is therefore the mean over
the global batch, for any division of it. In the backward of the last micro-batch, each gradient is copied into its
place in a flat bucket. Full buckets are sent in one fixed order, the same on every rank.

No error is raised through backward: the first one is kept, nothing more is sent, and `finish` raises it. Only an
attempt that is over ends backward at once, if this is requested: the step is lost, and peers wait for this rank.
Complete averages stay until `clear`, even if the group changes, for a rank that does not know whether its step was
completed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from holdfast.checkpoint.state.dtensor import like, local
from holdfast.core.errors import UsageError
from holdfast.training.distributed.process_group import Group, Pending

BUCKET_BYTES: Final = 25 << 20
# The first bucket is small, so that a transfer starts early in backward.
FIRST_BUCKET_BYTES: Final = 1 << 20
# Every gradient begins at a cache line.
ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One bucket: its parameters, and the offset of each in the flat tensor."""

    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]
    starts: tuple[int, ...]
    length: int


class Reducer:
    """Sums the gradients of the parameters that require one, over the ranks of the attached group.

    A parameter that was trainable at the beginning may be frozen and unfrozen later. While frozen, it counts as
    zeros.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        every = tuple(dict.fromkeys(parameters))  # a shared parameter counts once
        self.parameters = tuple(parameter for parameter in every if parameter.requires_grad)
        check_devices([parameter.device for parameter in self.parameters])
        self._frozen = tuple(parameter for parameter in every if not parameter.requires_grad)
        self._known = frozenset(id(parameter) for parameter in every)
        self._kinds = self._kinds_now()
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._leaves_backward = False
        self._plan_buckets()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self._lock = threading.Lock()  # backward has a thread for each device
        self._group = self._everyone = Group.single_rank(torch.device("cpu"))
        self._averaged = False
        self._norms: list[torch.Tensor] = []
        self._forget()

    def attach(self, group: Group, peers: Group | None = None) -> None:
        """Use this attempt's group from now on. Complete averages stay; anything else is discarded.

        For a sharded model, `peers` are the ranks with the same shard. Other ranks have other gradients.
        """
        self._group, self._everyone = group if peers is None else peers, group
        if self._averaged:
            return
        if [local(parameter).shape for parameter in self.parameters] != self._shapes:
            self._plan_buckets()
        self._forget()

    def close(self) -> None:
        """Remove the hooks from backward."""
        for hook in self._hooks:
            hook.remove()

    # One step

    def arm(self, *, last: bool) -> None:
        """Prepare the backward of a micro-batch. During that of the last one, the averages are sent."""
        self._check_unchanged()
        self._prepare()
        self._armed = last

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Return a context in which backward raises `PeerLostError` when the attempt ends.

        The script's own backward does not.
        """
        self._leaves_backward = True
        try:
            yield
        finally:
            self._leaves_backward = False

    def finish(self, ballot: Sequence[float]) -> list[float]:
        """Average the remaining gradients, and compute the ballot's maximum.

        A parameter without a gradient counts as zeros. If this raises `PeerLostError`, this rank is not prepared.
        """
        self._armed = False
        if self._error is not None:
            raise self._error
        self._prepare()
        self._launch_rest()
        numbers = torch.tensor(ballot, dtype=torch.float64, device="cpu")
        self._flights.append(self._everyone.launch_max(numbers))
        for bucket, flight in enumerate(self._flights):
            flight.wait()
            if bucket < len(self._flats):
                # During the transfer of the next bucket: with 29 M parameters, the norms take 2 % of a step.
                self._norms.append(_norm(self._flats[bucket]))
        self._flights.clear()
        self._averaged = True
        agreed: list[float] = numbers.tolist()
        return agreed

    def touched(self) -> list[bool]:
        """Return which parameters have a gradient on this rank."""
        return [
            touched or parameter.grad is not None
            for touched, parameter in zip(self._touched, self.parameters, strict=True)
        ]

    def adopt(self, touched: Sequence[bool]) -> None:
        """Set the averages as the gradients; None where no rank had a gradient, so that optimizers skip the
        parameter.
        """
        for parameter, view, kept in zip(self.parameters, self._views, touched, strict=True):
            parameter.grad = like(parameter, view) if kept else None

    def norms(self, *, recompute: bool = False, of_groups: bool = False) -> list[float]:
        """Return the norm of all averages on this rank. With `of_groups`, those of the optimizer's parameter groups
        follow.

        They are the same on every rank with the same averages. `recompute`: compute the norms of the buckets again,
        because the averages were changed.
        """
        buckets = [_norm(flat) for flat in self._flats] if recompute else self._norms
        groups = self._groups() if of_groups else []
        members = [index for group in groups for index in group]
        found = iter(_read([*buckets, *_each_norm([self._views[index] for index in members])]))
        parts = [list(itertools.islice(found, count)) for count in (len(buckets), *map(len, groups))]
        return [float(torch.tensor(part, dtype=torch.float64, device="cpu").norm()) for part in parts]

    def scale(self, factor: float) -> None:
        for flat in self._flats:
            flat.mul_(factor)
        self._norms = [norm * abs(factor) for norm in self._norms]

    def clip(self, limit: float, norm: float) -> None:
        """Scale the averages so that their norm, currently `norm`, is at most `limit`."""
        if norm > limit:
            self.scale(limit / norm)

    def clear(self) -> None:
        """Clear gradients and averages after a step, when no collective is running."""
        self._averaged = False
        self._begin()

    def discard(self) -> None:
        """Clear gradients after a failure, and use new buckets, because a collective may still write into the old
        ones.
        """
        self._averaged = False
        self._forget()

    # Internal

    def _plan_buckets(self) -> None:
        self._shapes = [local(parameter).shape for parameter in self.parameters]
        self._plans = _plans(self.parameters, self._bucket_bytes)
        self._bucket_of = _bucket_of(self._plans, len(self.parameters))

    def _forget(self) -> None:
        self._flats: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._begin()

    def _begin(self) -> None:
        self._armed = False
        self._error: Exception | None = None
        self._flights: list[Pending] = []
        self._norms = []
        self._copied = [False] * len(self.parameters)
        self._touched = [False] * len(self.parameters)
        self._missing = [len(plan.members) for plan in self._plans]
        self._next = 0
        for parameter in self.parameters:
            parameter.grad = None

    def _prepare(self) -> None:
        if self._flats or not self._plans:
            return
        self._flats = [torch.zeros(plan.length, dtype=plan.dtype, device=plan.device) for plan in self._plans]
        views: dict[int, torch.Tensor] = {}
        for plan, flat in zip(self._plans, self._flats, strict=True):
            for index, start in zip(plan.members, plan.starts, strict=True):
                views[index] = _view(flat, start, local(self.parameters[index]))
        self._views = [views[index] for index in range(len(self.parameters))]

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        """Handle a new gradient. An error that is raised here would propagate through backward."""
        if self._leaves_backward:
            self._everyone.cancel.check()
        if not self._armed or self._error is not None:
            return
        try:
            with self._lock:
                self._take(index, parameter)
                self._launch_full()
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Copy the gradient into the bucket and free it, so that the next one reuses its memory (a tenth of a step's
        time).
        """
        bucket, gradient = self._bucket_of[index], None if parameter.grad is None else local(parameter.grad)
        if bucket < self._next:
            raise UsageError(
                "a parameter got its gradient twice in one backward, as checkpoint(use_reentrant=True) does: "
                "pass use_reentrant=False"
            )
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError("a gradient is sparse, and cannot be averaged: set sparse=False on the embedding")
        self._put(index, gradient)
        parameter.grad = None
        if not self._copied[index]:
            self._copied[index] = True
            self._missing[bucket] -= 1

    def _put(self, index: int, gradient: torch.Tensor | None) -> None:
        view = self._views[index]
        if gradient is None:
            view.zero_()
        elif self._copied[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._touched[index] |= gradient is not None

    def _launch_full(self) -> None:
        while self._next < len(self._plans) and self._missing[self._next] == 0:
            self._flights.append(self._group.launch_sum(self._flats[self._next]))
            self._next += 1

    def _launch_rest(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if not self._copied[index]:
                self._take(index, parameter)
        self._launch_full()

    def _check_unchanged(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter requires a gradient now, but did not when job.manage() was called: "
                "unfreeze it before that call, and freeze it afterwards until it is needed"
            )
        if self._kinds_now() != self._kinds:
            raise UsageError("a parameter changed its dtype or device during the run: convert it before job.manage()")
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        if any(id(parameter) not in self._known for group in groups for parameter in group["params"]):
            raise UsageError("the optimizer got a parameter during the run: add all parameters before job.manage()")

    def _groups(self) -> list[list[int]]:
        """Return the trained parameters of each parameter group of the optimizer, by index."""
        indices = {parameter: index for index, parameter in enumerate(self.parameters)}
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [[indices[one] for one in group["params"] if one in indices] for group in groups]

    def _kinds_now(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(parameter.dtype, parameter.device) for parameter in self.parameters]


def check_devices(devices: Iterable[torch.device]) -> None:
    """Raise `UsageError` for parameters on the meta device or on several accelerators. The CPU is always valid."""
    others = {device for device in devices if device.type != "cpu"}
    if any(device.type == "meta" for device in others):
        raise UsageError("a parameter is on the meta device: initialize its weights before job.manage()")
    if len(others) > 1:
        names = ", ".join(sorted(map(str, others)))
        raise UsageError(f"parameters are on {names}: keep the parameters of a rank on job.device or the CPU")


def _plans(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> tuple[_Plan, ...]:
    """Return buckets in the reverse order of parameters, as backward produces gradients.

    Each has one type and a bounded size.
    """
    open_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        bucket = open_.setdefault(key, [])
        bucket.append(index)
        limit = bucket_bytes if filled else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(local(parameters[one]).nbytes for one in bucket) >= limit:
            filled.append(open_.pop(key))
    return tuple(_plan(parameters, members) for members in (*filled, *open_.values()))


def _plan(parameters: Sequence[torch.nn.Parameter], members: Sequence[int]) -> _Plan:
    first = parameters[members[0]]
    real = first.dtype.to_real()
    line = ALIGNMENT_BYTES // real.itemsize
    starts, end = [], 0
    for index in members:
        starts.append(end)
        numbers = local(parameters[index]).numel() * (2 if first.dtype.is_complex else 1)
        end += -(-numbers // line) * line
    return _Plan(dtype=real, device=first.device, members=tuple(members), starts=tuple(starts), length=end)


def _bucket_of(plans: Sequence[_Plan], count: int) -> list[int]:
    found = {index: number for number, plan in enumerate(plans) for index in plan.members}
    return [found[index] for index in range(count)]


def _view(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's part of its bucket, with the parameter's shape and memory order."""
    if parameter.is_complex():
        part = flat[start : start + 2 * parameter.numel()]
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    if _channels_last(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def _channels_last(parameter: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return parameter.dim() in formats and parameter.is_contiguous(memory_format=formats[parameter.dim()])


def _norm(flat: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=_wide(flat.dtype))
    return norm.double()


def _each_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor. Those of one kind take one call, because each call on a GPU has a price."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    norms: dict[int, torch.Tensor] = {}
    for (dtype, _), members in kinds.items():
        found = torch._foreach_norm([tensors[index] for index in members], dtype=_wide(dtype))
        norms.update(zip(members, found, strict=True))
    return [norms[index] for index in range(len(tensors))]


def _read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of tensors of one element, with one synchronisation for each device."""
    values = [0.0] * len(numbers)
    for device in {number.device for number in numbers}:
        places = [place for place, number in enumerate(numbers) if number.device == device]
        read = torch.stack([numbers[place].double() for place in places]).tolist()
        for place, value in zip(places, read, strict=True):
            values[place] = value
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which squares can be summed."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
