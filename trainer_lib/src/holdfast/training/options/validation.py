"""Validation of the arguments of `manage`, `batches`, `step` and `phase`. An error states what to change.

The averaging rejects what depends on gradients: sparse ones, parameters that are unfrozen, a dtype or device that
changes. The checkpoint rejects what cannot be saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from holdfast.core.errors import UsageError
from holdfast.telemetry.activity import Activity

_log = logging.getLogger("holdfast.job")

NAMED: Final = 3
"""The number of parameters that a message names."""


# manage


def check_managed(objects: Mapping[str, Any], saved: Sequence[torch.Tensor] = ()) -> None:
    """Check that the objects of `manage` fit together.

    `saved` has the tensors of the managed state without the optimizer's.
    """
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
    _check_kinds(objects)
    for name, module in modules.items():
        _check_module(name, module)
    optimizer = objects.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(optimizer, _named(modules), saved)
        _check_scheduler(objects.get("scheduler"), optimizer, objects.get("scaler"))
        _check_averages(modules, optimizer)


def _check_kinds(objects: Mapping[str, Any]) -> None:
    model, optimizer, scheduler = objects.get("model"), objects.get("optimizer"), objects.get("scheduler")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is of type {type(model).__name__}: expected a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is of type {type(optimizer).__name__}, which job.step cannot step: "
            "expected a torch.optim.Optimizer (pass the inner one of a wrapper)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the model inside its step, where no rank can be replaced: use another optimizer"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"scheduler is of type {type(scheduler).__name__}, which has no step(): pass a scheduler with step()"
        )


def _check_module(name: str, module: torch.nn.Module) -> None:
    for path, part in module.named_modules(prefix=name):
        if isinstance(part, DistributedDataParallel):
            raise UsageError(
                f"{path} is a DistributedDataParallel, but Holdfast averages gradients itself: pass its .module"
            )
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise UsageError(f"{path} makes sparse gradients, which cannot be averaged: set sparse=False")
    for path, parameter in module.named_parameters(prefix=name):
        if is_lazy(parameter):
            raise UsageError(f"{path} has no shape yet: run one batch through the model before job.manage()")
        if parameter.is_meta:
            raise UsageError(f"{path} is on the meta device: initialize its weights before job.manage()")


def _check_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter], saved: Sequence[torch.Tensor]
) -> None:
    stepped = list(_stepped(optimizer))
    if not any(parameter.requires_grad for _, parameter in stepped):
        raise UsageError("no parameter of the optimizer requires a gradient, so nothing would be trained")
    known = {id(parameter) for parameter in named.values()}
    places = {tensor.data_ptr() for tensor in saved if tensor.numel()}
    unmanaged = [
        f"{where} of shape {tuple(parameter.shape)}"
        for where, parameter in stepped
        if id(parameter) not in known and parameter.data_ptr() not in places
    ]
    if unmanaged:
        raise UsageError(
            f"the optimizer trains {_some(unmanaged)}, which belongs to no managed model and would not be saved: "
            "pass its module to job.manage(), under any name"
        )
    trained = {id(parameter) for _, parameter in stepped}
    idle = [name for name, one in named.items() if one.requires_grad and id(one) not in trained]
    if idle:
        _log.warning(
            "%s: these require a gradient, but the optimizer does not have them, so they do not change; "
            "call requires_grad_(False) on them before job.manage() to save their averaging",
            _some(idle),
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    of = getattr(scheduler, "optimizer", None)
    if isinstance(of, torch.optim.Optimizer) and of is not optimizer:
        raise UsageError(
            "the scheduler belongs to another optimizer: create it with the optimizer that you pass to job.manage()"
        )
    missing = [name for name in ("scale", "unscale_", "step", "update", "get_scale") if not hasattr(scaler, name)]
    if scaler is not None and missing:
        raise UsageError(f"scaler is of type {type(scaler).__name__}, without {missing[0]}(): expected a GradScaler")


def _check_averages(modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_optimizer_step_post_hooks", None):
        return
    for name, module in modules.items():
        if isinstance(module, torch.optim.swa_utils.AveragedModel):
            _log.warning(
                "%s is an AveragedModel, and the optimizer has no step post hook. If the script updates the averages "
                "after job.step(), each restore loses one update: call optimizer.register_step_post_hook(lambda *_: "
                "%s.update_parameters(model)) before job.manage() instead",
                name,
                name,
            )


def _named(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {path: one for name, module in modules.items() for path, one in module.named_parameters(prefix=name)}


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {place} of its group {number}", parameter


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# batches and step


def check_batches(dataset: Any, *, global_batch: Any, micro_batch: Any, collate: Any = None) -> None:
    """Check the arguments of `job.batches` that define the samples."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UsageError(
            "job.batches needs a map-style dataset, with __len__ and __getitem__; for another one, write the "
            "loop yourself, and pass its state to job.manage()"
        )
    try:
        samples = len(dataset)
    except TypeError as error:  # a wrapper of a dataset without a length raises it
        raise UsageError(
            f"the length of the dataset is not known ({error}): add __len__, or write the loop yourself, "
            "and pass its state to job.manage()"
        ) from error
    if samples < 1:
        raise UsageError("the dataset of job.batches is empty: expected at least one sample")
    check_whole("global_batch_size", global_batch, least=1)
    check_whole("micro_batch_size", micro_batch, least=1)
    if micro_batch > global_batch:
        raise UsageError(f"micro_batch_size {micro_batch} is not between 1 and global_batch_size {global_batch}")
    if collate is not None and not callable(collate):
        raise UsageError(f"collate is of type {type(collate).__name__}: expected a function of a list of samples")


def check_run(*, max_steps: Any, seed: Any) -> None:
    """Check the arguments of `job.batches` that define the number of steps and the order."""
    check_whole("max_steps", max_steps, least=0)
    check_whole("seed", seed, least=0)


def check_whole(field: str, value: Any, *, least: int) -> None:
    """Raise `UsageError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{field} is {value!r}: expected an integer of at least {least}")


def check_loss(loss: Any) -> None:
    """Check the argument of `job.step`: one real number with a graph for backward."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"job.step received a {type(loss).__name__}: pass the loss itself, a tensor (not loss.item())"
        )
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {tuple(loss.shape)}: pass the mean over the micro-batch, loss.mean()")
    if loss.is_complex():
        raise UsageError("the loss is complex: pass a real number, such as loss.abs().mean()")
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter that requires a gradient: "
            "compute it outside torch.no_grad() and detach(), with the model that you passed to job.manage()"
        )


# During training


class Structure:
    """The parameters of the managed modules at `manage`, which averaging and the optimizer use.

    Inspecting a parameter costs half a microsecond, so `check` does so only at every `EVERY`th step.
    """

    EVERY: Final = 16

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._known = _named(self._modules)
        self._shapes = [parameter.shape for parameter in self._known.values()]
        self._remember()

    def check(self, step: int) -> None:
        """Raise `UsageError` if a parameter was added, removed or replaced since `manage`."""
        if step % self.EVERY == 0:
            self.check_now()

    def check_now(self) -> None:
        """Check at any step, before a checkpoint is written."""
        if self._ids_now() != self._ids:
            difference = self._difference()
            if difference is not None:
                raise UsageError(difference)
            self._remember()  # a part without parameters may be added or removed
        if [parameter.shape for parameter in self._known.values()] != self._shapes:
            raise UsageError(
                "a parameter changed its shape during the run: build the complete model before job.manage()"
            )

    def _remember(self) -> None:
        # Iterating `parameters()` costs three times as much as reading these dictionaries, which always have the
        # current entries.
        parts = [part for module in self._modules.values() for part in module.modules()]
        self._dicts: list[Mapping[str, object]] = [own for part in parts for own in (part._parameters, part._modules)]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return [id(thing) for own in self._dicts for thing in own.values()]

    def _difference(self) -> str | None:
        now, known = _named(self._modules), self._known
        added = [name for name in now if name not in known]
        gone = [name for name in known if name not in now]
        other = [name for name in now if name in known and now[name] is not known[name]]
        changes = [(added, "new"), (gone, "gone"), (other, "replaced by another tensor")]
        found = "; ".join(f"{_some(names)}: {what}" for names, what in changes if names)
        if not found:
            return None
        return (
            f"the model's parameters changed after job.manage() ({found}), but the optimizer still has the old "
            "ones: build the complete model before job.manage(), and set new values with torch.no_grad() and copy_()"
        )


def activity_of(name: str) -> Activity:
    """Return the activity of `job.phase`."""
    try:
        return Activity(name)
    except ValueError:
        known = ", ".join(repr(str(activity)) for activity in Activity)
        raise UsageError(f"phase {name!r} is not valid: expected one of {known}") from None
