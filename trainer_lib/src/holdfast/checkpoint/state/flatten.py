"""Convert live objects to named tensors and a JSON tree. Without pickle: other values are rejected by name.

In the tree, `{"$tensor": name}` stands for a tensor, and `{"$rows": [name, shape]}` for a tensor that is sharded by
rows over a shard group. `$map`, `$counter`, `$tuple`, `$float`, `$bytes` and `$array` stand for values that JSON
lacks. A tensor's name is its path in the tree, so it is the same on every rank and in every release.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from holdfast.checkpoint.format.manifest import LARGEST
from holdfast.checkpoint.format.mapping_order import MAP, MARK, in_order, parts, text_bytes, too_much
from holdfast.checkpoint.format.shard_layout import METADATA, Piece, TensorSpec
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.io.huge_pages import address_of
from holdfast.checkpoint.io.memcpy import Move, copiers, move
from holdfast.checkpoint.ranks.merge import tensors_in
from holdfast.checkpoint.state.dtensor import is_sharded, is_whole, local
from holdfast.checkpoint.state.dtypes import DTYPES
from holdfast.checkpoint.state.module_names import parameter_names, saved_names, saved_state
from holdfast.checkpoint.state.optimizer_state import labelled, rehearse
from holdfast.checkpoint.state.savable import (
    ADVICE,
    check_name,
    check_tensor,
    checked_integer,
    checked_text,
    from_numpy,
    plain_number,
    refused,
)
from holdfast.core.errors import StateError

# Deeper trees are rejected, because an object that contains itself is endless. Python and JSON support this depth.
_DEEPEST: Final = 100

# The tensors per object, and the bytes per tensor, that are sampled. Training is paused meanwhile.
_SAMPLED_TENSORS: Final = 32
_SAMPLED_BYTES: Final = 2048


@runtime_checkable
class Stateful(Protocol):
    """Any object that can be saved and loaded."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Flat:
    """The parts of a state: a JSON tree, and the tensors that it names."""

    tree: Any
    tensors: Mapping[str, torch.Tensor]
    sharded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The global shapes of the tensors of which only rows are on this rank."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """These tensors themselves (DTensors), which know their sharding."""

    @property
    def specs(self) -> list[TensorSpec]:
        """The complete tensors, with which the ranks divide the work."""
        return [
            TensorSpec(name=name, dtype=DTYPES[tensor.dtype], shape=self.sharded.get(name, tuple(tensor.shape)))
            for name, tensor in self.tensors.items()
        ]

    @property
    def here(self) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def read(self, piece: Piece) -> Buffer:
        """Return the bytes of a piece. For a sharded tensor, the piece is this rank's part."""
        flat = self._piece(piece).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data

    def fill(self, places: Sequence[tuple[Piece, memoryview]]) -> None:
        """Copy pieces to their targets directly. Copies from devices run concurrently."""
        busy: set[torch.device] = set()
        moves: list[Move] = []
        for piece, target in places:
            source = self._piece(piece)
            if not target.nbytes:
                continue
            if _is_plain_memory(source) and source.nbytes == target.nbytes:
                moves.append(Move(address_of(target), source.data_ptr(), target.nbytes))
                continue
            torch.frombuffer(target, dtype=source.dtype).view(source.shape).copy_(source, non_blocking=True)
            if source.is_cuda:
                busy.add(source.device)
        move(moves, copiers(torch.get_num_threads()))
        for device in busy:
            torch.cuda.synchronize(device)

    def sample(self, names: Iterable[str]) -> str:
        """Return a digest of the first and last bytes of the first of these tensors, except for sharded ones."""
        digest = xxhash.xxh3_64()
        whole = (self.tensors[name] for name in names if name not in self.sharded)
        for tensor in islice(filter(_is_plain_bytes, whole), _SAMPLED_TENSORS):
            image = tensor.detach().reshape(-1).view(torch.uint8)
            digest.update(torch.cat([image[:_SAMPLED_BYTES], image[-_SAMPLED_BYTES:]]).cpu().numpy().data)
        return digest.hexdigest()

    def _piece(self, piece: Piece) -> torch.Tensor:
        tensor = self.tensors[piece.spec.name].detach()
        if piece.whole or piece.spec.name in self.sharded:
            return tensor
        return tensor.narrow(0, piece.start[0], piece.shape[0])


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes are in this process's memory in the form in which they are saved."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and _is_plain_bytes(tensor)


def _is_plain_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes, on any device, have the form in which they are saved."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flatten(objects: Mapping[str, Stateful]) -> Flat:
    """Convert the state of each object. A `StateError` names what cannot be saved, and how to fix it."""
    encoder = _Encoder()
    named = parameter_names(objects)
    tree = {}
    for name, obj in objects.items():
        encoder.sorted_to = _sorted_to(obj)
        tree[check_name(name)] = encoder.encode(_state_of(obj, named), (name,))
    return Flat(tree=tree, tensors=encoder.tensors, sharded=encoder.sharded, parts=encoder.parts)


def check_stateful(objects: Mapping[str, Any]) -> None:
    """Raise `StateError` for a value that is not an object with a state, such as a state dict itself."""
    for name, obj in objects.items():
        if not isinstance(obj, Stateful):
            raise StateError(
                f"{name!r} is of type {type(obj).__name__}, which has no state_dict() and "
                f"load_state_dict(): pass the object itself, for example {name}=model and not "
                f"{name}=model.state_dict()"
            )


def _sorted_to(obj: Stateful) -> int:
    """Return down to which depth mappings may be sorted: the names of a module, and everything of an optimizer."""
    return (isinstance(obj, torch.optim.Optimizer) and _DEEPEST) or (isinstance(obj, torch.nn.Module) and 1) or 0


def _state_of(obj: Stateful, named: Mapping[int, str]) -> Any:
    """Return the state to save for an object. A module's names omit its wrappers."""
    if isinstance(obj, torch.nn.Module):
        return saved_state(obj)
    state = obj.state_dict()
    return labelled(obj, state, named) if isinstance(obj, torch.optim.Optimizer) else state


def trained(objects: Mapping[str, Stateful], flat: Flat) -> frozenset[str]:
    """Return the names of the trained parameters of modules, which may be inexact.

    They exclude buffers, and everything of an optimizer, whose numbers have other magnitudes and other uses.
    """
    found: set[Any] = set()
    for name, obj in objects.items():
        if isinstance(obj, torch.nn.Module):
            own = [path for path, one in obj.named_parameters(remove_duplicate=False) if one.requires_grad]
            found |= {_named(flat.tree[name].get(path)) for path in saved_names(obj, own).values()}
    return frozenset(flat.tensors.keys() & found)


def sampled(objects: Mapping[str, Stateful], flat: Flat) -> dict[str, str]:
    """Return a digest of a few bytes of each object's tensors, to compare between ranks.

    Modules and optimizers are excluded, because the training steps keep them equal.
    """
    return {
        name: flat.sample(tensors_in(flat.tree[name]))
        for name, obj in objects.items()
        if not isinstance(obj, (torch.nn.Module, torch.optim.Optimizer))
    }


def _named(leaf: Any) -> Any:
    """Return the tensor that a leaf of a tree names; None if there is none."""
    match leaf:
        case {"$tensor": str(name)} | {"$rows": [str(name), _]}:
            return name
    return None


def check_savable(objects: Mapping[str, Stateful]) -> None:
    """Raise `StateError` for what cannot be saved, including what an optimizer's first step will add to its state."""
    flat = flatten(objects)
    if text_bytes(flat.tree) > LARGEST:
        raise StateError(
            f"a checkpoint cannot hold this: MANIFEST.json would have more than {LARGEST} bytes. "
            f"{too_much(parts(flat.tree))} in its state_dict()"
        )
    for name, obj in objects.items():
        if isinstance(obj, torch.optim.Optimizer):
            flatten_values({name: rehearse(obj)})


def flatten_values(values: Mapping[str, Any], *, ordered: bool = False) -> Flat:
    """Convert plain values (a state dict, a tensor, a number). Mappings keep their order if `ordered`."""
    encoder = _Encoder(sorted_to=0 if ordered else _DEEPEST)
    tree = {check_name(name): encoder.encode(value, (name,)) for name, value in values.items()}
    return Flat(tree=tree, tensors=encoder.tensors)


@dataclass
class _Encoder:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    sorted_to: int = 0
    """Mappings at paths of at most this length have sorted keys."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise StateError(
                f"{'.'.join(path[:5])}… is more than {_DEEPEST} levels deep: does it contain itself? {ADVICE}"
            )
        if isinstance(value, torch.Tensor):
            return self._reference(value, path)
        if value is None or (isinstance(value, bool) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, str) and not isinstance(value, enum.Enum):
            return checked_text(value, path)
        if isinstance(value, np.ndarray):
            return {"$array": self._tensor(from_numpy(value, path), path)}
        if isinstance(value, np.generic):
            return self.encode(plain_number(value, path), path)
        if isinstance(value, enum.Enum):
            raise refused(path, value)
        return self._plain(value, path)

    def _reference(self, value: torch.Tensor, path: tuple[str, ...]) -> Any:
        if not is_sharded(value):
            return {"$tensor": self._tensor(value, path)}
        whole = is_whole(value)
        name = self._tensor(local(value), path, part=not whole)
        if whole:
            return {"$tensor": name}
        self.sharded[name], self.parts[name] = tuple(value.shape), value
        return {"$rows": [name, list(value.shape)]}

    def _plain(self, value: Any, path: tuple[str, ...]) -> Any:
        match value:
            case int():
                return checked_integer(value, path)
            case float():
                return float(value) if math.isfinite(value) else {"$float": str(float(value))}
            case bytes() | bytearray():
                return {"$bytes": base64.b64encode(value).decode()}
            case tuple():
                return {"$tuple": [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]}
            case list():
                return [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            case Counter():
                return {"$counter": self._mapping(value, path)}
            case Mapping():
                return self._mapping(value, path)
        raise refused(path, value)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if not isinstance(key, (str, int, float, bool, tuple, type(None))) or isinstance(key, enum.Enum):
                raise refused(path, key, "a key of ")
            checked_text(str(key), path)
        items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith(MARK) for key, _ in items) and (
            len(path) <= self.sorted_to or in_order(value)
        ):
            return dict(items)
        return {MAP: [[self.encode(key, (*path, "key")), item] for key, item in items]}

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...], *, part: bool = False) -> str:
        check_tensor(tensor, path)
        lazily = (tensor.is_conj(), tensor.is_neg())  # lazy views of the same memory have different numbers
        identity = (_place(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), lazily)
        # Tied weights are saved once. This includes a part without elements, because other ranks have some.
        if (tensor.numel() or part) and identity in self._seen:
            return self._seen[identity]
        name = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
        while name in self.tensors or name == METADATA:  # keys 1 and "1" of one mapping, or a reserved name
            name += "'"
        self._seen[identity] = name
        self.tensors[name] = tensor.detach()
        return name


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the place of the tensor's numbers. An empty tensor has no address, but its own storage."""
    if tensor.numel():
        return tensor.data_ptr(), 0
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
