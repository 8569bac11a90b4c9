"""Load saved state into live objects. Everything is validated before anything is modified.

Invariant: if a load is rejected, every object is unchanged. One message lists everything that does not fit, by
object.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from holdfast.checkpoint.format.mapping_order import mapping
from holdfast.checkpoint.ranks.merge import tensors_in
from holdfast.checkpoint.state import optimizer_state, replaced_settings
from holdfast.checkpoint.state.flatten import Stateful
from holdfast.checkpoint.state.materialize import materialise, placed
from holdfast.checkpoint.state.module_names import common_prefixes, own_names, parameter_names, state_names
from holdfast.checkpoint.state.unflatten import Rows, all_of_it, unflatten
from holdfast.core.errors import HoldfastError, StateError
from holdfast.core.interpreter import uncollected

_log = logging.getLogger("holdfast.checkpoint")

SHOWN: Final = 10
"""The number of names of each kind that a message shows."""

Tensors = Callable[[str], torch.Tensor]
_EXTRA: Final = "_extra_state"
_ADVICE: Final = "create the objects as they were when the checkpoint was saved, or use an empty checkpoint folder"


def load_into(
    objects: Mapping[str, Stateful],
    tree: Mapping[str, Any],
    tensor: Tensors,
    rows: Rows = all_of_it,
    *,
    on_meta: Tensors,
    partly: bool = False,
) -> list[str]:
    """Load each object's state. If anything does not fit, raise `StateError` and change nothing.

    Return the settings of the script that the checkpoint replaces.

    `tensor` returns a tensor by its name; `on_meta` returns the same without data. With `partly`, the tree may have
    more than these objects.
    """
    _check_objects(objects, tree, partly=partly)
    _check_fit(objects, tree, tensor, on_meta)
    other = [line for name, obj in objects.items() for line in _replaced(name, obj, tree[name], on_meta)]
    modules = [obj for obj in objects.values() if isinstance(obj, torch.nn.Module)]
    undo = [materialise(module) for module in modules]
    name = ""
    try:
        for name in sorted(objects, key=lambda name: _load_order(objects[name])):
            obj = objects[name]
            undo.append(_remember(obj))
            _load(obj, _state(tree[name], tensor, rows), rows)
    except Exception as error:  # any error of the script's own code when a state does not fit
        for back in reversed(undo):
            back()
        if isinstance(error, (HoldfastError, MemoryError)):
            raise
        raise _misfit(name, error) from error
    return other


def _replaced(name: str, obj: Any, tree: Any, on_meta: Tensors) -> list[str]:
    if not isinstance(obj, replaced_settings.KINDS):
        return []
    try:
        return list(replaced_settings.replaced(name, obj, unflatten(tree, on_meta, _rows_on_meta)))
    except Exception as error:  # noqa: BLE001  (the load rejects a state that does not fit)
        _log.debug("the settings of %s cannot be compared: %s", name, error)
        return []


def log_replaced_settings(other: Sequence[str]) -> None:
    """Log which settings of the script the checkpoint replaces."""
    if other:
        _log.warning(
            "settings of the checkpoint replace those of the script. To train with the script's settings, "
            "set them after load() or job.manage(): %s",
            "; ".join(other),
        )


def _state(tree: Any, tensor: Tensors, rows: Rows) -> Any:
    with uncollected():
        return unflatten(tree, cached(tensor), rows)


def _load_order(obj: Any) -> int:
    """Return the load order: the script's own objects first, because only they can check a state,
    and then the rest.
    """
    return (isinstance(obj, torch.optim.Optimizer) and 1) or (isinstance(obj, torch.nn.Module) and 2) or 0


def _load(obj: Any, state: Any, rows: Rows) -> None:
    if isinstance(obj, torch.nn.Module):
        names, live = own_names(obj, state), obj.state_dict()
        own = {names[name]: value for name, value in state.items()}
        own |= {name: own[given] for name, given in _tied(obj, own).items() if name in live}
        obj.load_state_dict({name: placed(value, live.get(name), rows) for name, value in own.items()})
    elif isinstance(obj, torch.optim.Optimizer):
        optimizer_state.load(obj, state, lambda value, parameter: placed(value, parameter, rows))
    else:
        obj.load_state_dict(state)


def cached(tensor: Tensors) -> Tensors:
    """Return a function that loads each name only once, so that tied tensors stay one tensor."""
    known: dict[str, torch.Tensor] = {}

    def give(name: str) -> torch.Tensor:
        if name not in known:
            known[name] = tensor(name)
        return known[name]

    return give


def _is_torchs(obj: Any) -> bool:
    return isinstance(obj, (torch.nn.Module, torch.optim.Optimizer))


def _misfit(name: str, error: Exception) -> StateError:
    return StateError(f"the saved state of {name!r} does not fit the object that was passed ({error!r}): {_ADVICE}")


def _remember(obj: Stateful) -> Callable[[], None]:
    """Return a function that restores the object's current state.

    A module needs none: once its state fits, its load does not fail.
    """
    if isinstance(obj, torch.nn.Module):
        return lambda: None
    if isinstance(obj, torch.optim.Optimizer):
        own = dict(vars(obj))  # a load replaces the state, and does not modify it
        return lambda: vars(obj).update(own)
    try:
        before = copy.deepcopy(obj.state_dict())
    except Exception as error:  # noqa: BLE001  (the script's own code; an object without a state needs no restore)
        _log.debug("%s has no state before it is loaded: %s", type(obj).__name__, error)
        return lambda: None

    def back() -> None:
        try:
            obj.load_state_dict(before)
        except Exception as error:  # noqa: BLE001  (as above; the other objects must still be restored)
            _log.warning("the earlier state of %s could not be restored: %s", type(obj).__name__, error)

    return back


# Before anything is changed


def _check_objects(objects: Mapping[str, Stateful], tree: Mapping[str, Any], *, partly: bool) -> None:
    missing = sorted(objects.keys() - tree.keys())
    if missing and not tree:
        raise StateError(
            f"the checkpoint holds no objects, and {missing} were requested, so nothing was loaded. If "
            "torch.distributed.checkpoint saved it, read it with dcp.load(state, "
            "storage_reader=holdfast.checkpoint.dcp.StorageReader(folder))"
        )
    if partly and missing:
        raise StateError(
            f"the checkpoint holds {sorted(tree)}, but load() received {missing}: pass the names that were saved"
        )
    if not partly and set(objects) != set(tree):
        raise StateError(
            f"the checkpoint holds {sorted(tree)}, but manage() received {sorted(objects)}: pass the same "
            "objects with the same names, or use an empty checkpoint folder"
        )


def _check_fit(objects: Mapping[str, Stateful], tree: Mapping[str, Any], tensor: Tensors, on_meta: Tensors) -> None:
    named = parameter_names(objects)
    problems = []
    for name, obj in objects.items():
        if _is_torchs(obj):
            problems += [f"{name}: {line}" for line in _misfits(name, obj, tree[name], on_meta, named)]
        if isinstance(obj, torch.nn.Module):
            untied = _listed("one tensor here, but several in the checkpoint", list(_untied(obj, tree[name], tensor)))
            problems += [f"{name}: {line}" for line in untied]
    if problems:
        lines = "\n  ".join(problems)
        raise StateError(f"the checkpoint does not fit, and nothing was loaded from it:\n  {lines}\n{_ADVICE}")


def _misfits(name: str, obj: Any, tree: Any, on_meta: Tensors, named: Mapping[int, str]) -> list[str]:
    try:
        saved = unflatten(tree, on_meta, _rows_on_meta)
        if isinstance(obj, torch.nn.Module):
            return list(_module_misfits(obj, saved))
        return list(_optimizer_misfits(obj, saved, named))
    except (HoldfastError, MemoryError):
        raise
    except Exception as error:
        raise _misfit(name, error) from error


def _rows_on_meta(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")


def _module_misfits(module: torch.nn.Module, saved: Mapping[str, Any]) -> Iterator[str]:
    live = module.state_dict()
    own = own_names(module, saved)
    here = {own[name]: name for name in saved}  # messages use the names in the checkpoint
    if not _renames(module):
        known = here.keys() | _tied(module, here)
        yield from _listed("missing in the checkpoint", [name for name in live if name not in known])
        yield from _listed("unexpected in the checkpoint", [here[name] for name in here if name not in live])
        if not live.keys() <= known:
            yield from _prefixed(module, saved, live)
    yield from _listed("on the meta device, but not in the checkpoint", sorted(_unfilled(module, here)))
    pairs = [(name, saved[name], live[own[name]]) for name in saved if own[name] in live]
    pairs = [(name, one, other) for name, one, other in pairs if not name.endswith(_EXTRA)]
    both = [(name, one, other) for name, one, other in pairs if _tensors(one, other) == 2]
    yield from _listed("a tensor on one side only", [name for name, one, other in pairs if _tensors(one, other) == 1])
    for what, read in (("size mismatch", _shape), ("dtype mismatch", _dtype)):
        differ = [(name, read(one), read(other)) for name, one, other in both if read(one) != read(other)]
        yield from _listed(what, [f"{name} {one} in the checkpoint and {other} here" for name, one, other in differ])


def _prefixed(module: torch.nn.Module, saved: Collection[str], live: Mapping[str, Any]) -> Iterator[str]:
    """Yield advice if only a wrapper's prefix on all names prevents a fit."""
    for prefix in common_prefixes(saved):
        bare = own_names(module, {name.removeprefix(prefix): None for name in saved})
        if live.keys() == {*bare.values()}:
            yield (
                f"all names in the checkpoint begin with {prefix!r}, and without this prefix they fit: if "
                "the checkpoint was converted from a file, convert the file again with --strip-prefix "
                f"{prefix}"
            )


def _every(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a module, each under every name in its state."""
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = state_names(module, [name for name, _ in every])
    return [(names[name], one) for name, one in every]


def _untied(module: torch.nn.Module, tree: Any, tensor: Tensors) -> Iterator[str]:
    """Yield the names of tied tensors whose data differ in the checkpoint: all but one would be lost."""
    saved = mapping(tree) or {}
    own = own_names(module, saved)
    here = {own[name]: name for name in saved}
    tied: dict[int, dict[str, str]] = {}
    for name, one in _every(module):
        for kept in tensors_in(saved[here[name]]) if name in here else ():
            tied.setdefault(id(one), {})[kept] = here[name]
    for names in tied.values():
        first, *others = names
        if any(not _same(tensor(first), tensor(other)) for other in others):
            yield " and ".join(names.values())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tied(module: torch.nn.Module, given: Container[str]) -> dict[str, str]:
    """Return the missing names of tensors that are given under another name: safetensors files have tied weights
    once.
    """
    every = _every(module)
    filled = {id(one): name for name, one in every if name in given}
    return {name: filled[id(one)] for name, one in every if name not in given and id(one) in filled}


def _unfilled(module: torch.nn.Module, given: Container[str]) -> Iterator[str]:
    """Return the meta tensors that would stay without data. No checkpoint has buffers that are not persistent."""
    every = _every(module)
    filled = {id(one) for name, one in every if name in given}
    return (name for name, one in every if one.is_meta and id(one) not in filled)


def _renames(module: torch.nn.Module) -> bool:
    """Return whether a part of the script's own code translates names, so that only it can check them."""
    return any(
        not type(part).__module__.startswith("torch.")
        and (
            part._load_state_dict_pre_hooks
            or type(part)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
            or type(part).load_state_dict is not torch.nn.Module.load_state_dict
        )
        for part in module.modules()
    )


def _optimizer_misfits(optimizer: torch.optim.Optimizer, saved: Any, named: Mapping[int, str]) -> Iterator[str]:
    if not optimizer_state.is_state(saved):
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            yield "no optimizer state in the checkpoint"
        return  # the class has its own form of state
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here != there:
        yield f"groups of {there} parameters in the checkpoint, and of {here} here"
        return
    names = saved.get(optimizer_state.NAMES)
    if names is not None:
        moved = list(_moved(_flat(names), _flat(optimizer_state.names_in(optimizer, named))))
        yield from _listed("other parameters in the checkpoint, or a different order", moved)
    kind, other = optimizer_state.kind(optimizer), saved.get(optimizer_state.KIND)
    if kind is not None and other is not None and kind != other:
        yield f"kind {other} in the checkpoint, and kind {kind} here"
        return
    unset = optimizer_state.unset(optimizer, saved["param_groups"])
    yield from _listed(f"not a state of {type(optimizer).__name__}, because its groups lack settings", unset)
    places = [id(one) for group in optimizer.param_groups for one in group["params"]]
    differ = [
        f"{key} of {named.get(id(one), f'parameter {places.index(id(one))}')} {_shape(value)} in the checkpoint, "
        f"of a parameter {_shape(one)} here"
        for one, key, value in optimizer_state.misshaped(optimizer, saved)
    ]
    yield from _listed("size mismatch", differ)


def _moved(there: Sequence[str | None], here: Sequence[str | None]) -> Iterator[str]:
    """Yield the parameters that certainly differ.

    A parameter without a name may be any that is named on only one side. An optimizer that is loaded without its
    module has no names at all.
    """
    both = {*there} & {*here} - {None}
    for one, other in zip(there, here, strict=True):
        certain = (one is not None and other is not None) or one in both or other in both
        if one != other and certain:
            yield f"{one or 'one of no module'} in the checkpoint, and {other or 'one of no module'} here"


def _flat(names: Iterable[Iterable[str | None]]) -> list[str | None]:
    return [name for group in names for name in group]


def _tensors(one: Any, other: Any) -> int:
    return isinstance(one, torch.Tensor) + isinstance(other, torch.Tensor)


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{what} ({len(names)}): {', '.join(names[:SHOWN])}{more}"
