"""Live objects ↔ named tensors and a JSON tree. No pickle: what cannot be said in these is refused by name.

In the tree, `{"$tensor": name}` stands for a tensor, `{"$rows": [name, shape]}` for one of which each rank of a
replica has rows, and `$map`, `$counter`, `$tuple`, `$float`, `$bytes`, `$array` for what JSON lacks. A tensor's
name is its path in the tree, so it means the same on every rank and in every release.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.format.manifest import LARGEST, TensorRecord
from holdfast.checkpoint.format.mapping_order import MAP, MARK, in_order, parts, text_bytes, too_much
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES, METADATA, Piece, TensorSpec
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.io.huge_pages import address_of
from holdfast.checkpoint.io.memcpy import Move, copiers, move
from holdfast.checkpoint.ranks.merge import tensors_in
from holdfast.checkpoint.state.dtensor import is_sharded, is_whole, local
from holdfast.checkpoint.state.module_names import parameter_names, saved_names, saved_state
from holdfast.checkpoint.state.optimizer_state import labelled, rehearse
from holdfast.core.errors import StateError

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_TORCH: Final = {name: dtype for dtype, name in _DTYPES.items()}
Rows = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
# So deep is no state: one that holds itself has no end. Python and JSON read that deep without a thought.
_DEEPEST: Final = 100
# Python reads no more of an integer in JSON than 4,300 digits.
_INTEGER_BITS: Final = 8192
# Of an object's tensors so many are looked at, and so much of each: it is done while training waits.
_SAMPLED_TENSORS: Final = 32
_SAMPLED_BYTES: Final = 2048
_MEND: Final = "keep only tensors, numbers, strings, lists and dicts in its state_dict()"


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be managed."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state back."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A state taken apart: a JSON tree, and the tensors that it names."""

    tree: Any
    tensors: Mapping[str, torch.Tensor]
    sharded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of those of which only rows are here, the shape of the whole."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """And they themselves, which know how they are cut."""

    @property
    def specs(self) -> list[TensorSpec]:
        """The whole tensors: what is needed to share them out over the ranks."""
        return [
            TensorSpec(name=name, dtype=_DTYPES[tensor.dtype], shape=self.sharded.get(name, tuple(tensor.shape)))
            for name, tensor in self.tensors.items()
        ]

    @property
    def here(self) -> list[TensorSpec]:
        """What this rank has of them."""
        return [
            TensorSpec(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def read(self, piece: Piece) -> Buffer:
        """The bytes of a piece. Of a sharded tensor, a piece is all that is here."""
        flat = self._piece(piece).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data

    def fill(self, places: Sequence[tuple[Piece, memoryview]]) -> None:
        """Copy pieces to where they belong, without a copy between; from devices all at once."""
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
        """A digest of the first and last bytes of the first of these tensors, but for rows of a sharded one."""
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
    """Whether its bytes lie in this process's memory as they are saved."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether they lie wherever they are as they would be saved."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flatten(objects: Mapping[str, Stateful]) -> Flat:
    """Take the state of each object apart; StateError names what cannot be saved and how to mend it."""
    encoder = _Encoder()
    named = parameter_names(objects)
    tree = {}
    for name, thing in objects.items():
        encoder.sorted_to = _sorted_to(thing)
        tree[check_name(name)] = encoder.encode(_state_of(thing, named), (name,))
    return Flat(tree=tree, tensors=encoder.tensors, sharded=encoder.sharded, parts=encoder.parts)


def check_stateful(objects: Mapping[str, Any]) -> None:
    """StateError for what is no object with a state, such as a state itself."""
    for name, thing in objects.items():
        if not isinstance(thing, Stateful):
            raise StateError(
                f"{name!r} is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(): give "
                f"the object itself, as in {name}=model and not {name}=model.state_dict()"
            )


def _sorted_to(thing: Stateful) -> int:
    """How deep its mappings need no order of their own: of a module the names, of an optimizer all."""
    return (isinstance(thing, torch.optim.Optimizer) and _DEEPEST) or (isinstance(thing, torch.nn.Module) and 1) or 0


def _state_of(thing: Stateful, named: Mapping[int, str]) -> Any:
    """What is saved of an object: a module's under the names that it has without its wrappers."""
    if isinstance(thing, torch.nn.Module):
        return saved_state(thing)
    state = thing.state_dict()
    return labelled(thing, state, named) if isinstance(thing, torch.optim.Optimizer) else state


def trained(objects: Mapping[str, Stateful], flat: Flat) -> frozenset[str]:
    """The names of the tensors that are parameters of modules and are trained: all that may be inexact. Not buffers,
    and nothing of an optimizer, whose numbers have other sizes and other uses."""
    found: set[Any] = set()
    for name, thing in objects.items():
        if isinstance(thing, torch.nn.Module):
            own = [path for path, one in thing.named_parameters(remove_duplicate=False) if one.requires_grad]
            found |= {_named(flat.tree[name].get(path)) for path in saved_names(thing, own).values()}
    return frozenset(flat.tensors.keys() & found)


def sampled(objects: Mapping[str, Stateful], flat: Flat) -> dict[str, str]:
    """By object, a digest of a few bytes of its tensors, to be compared between ranks. Not of modules and optimizers:
    the steps keep those alike."""
    return {
        name: flat.sample(tensors_in(flat.tree[name]))
        for name, thing in objects.items()
        if not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
    }


def _named(leaf: Any) -> Any:
    """The tensor that a leaf of a tree names, if it names one."""
    match leaf:
        case {"$tensor": str(name)} | {"$rows": [str(name), _]}:
            return name
    return None


def check_savable(objects: Mapping[str, Stateful]) -> None:
    """StateError for what cannot be saved, also for what an optimizer's first step will add to its state."""
    flat = flatten(objects)
    if text_bytes(flat.tree) > LARGEST:
        raise StateError(
            f"no checkpoint can hold this: MANIFEST.json would have more than {LARGEST} bytes. "
            f"{too_much(parts(flat.tree))} in its state_dict()"
        )
    for name, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            flatten_values({name: rehearse(thing)})


def flatten_values(values: Mapping[str, Any], *, ordered: bool = False) -> Flat:
    """The same for plain values (a state dict, a tensor, a number); mappings keep their order if `ordered`."""
    encoder = _Encoder(sorted_to=0 if ordered else _DEEPEST)
    tree = {check_name(name): encoder.encode(value, (name,)) for name, value in values.items()}
    return Flat(tree=tree, tensors=encoder.tensors)


@dataclass
class _Encoder:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    sorted_to: int = 0
    """Mappings on paths of so many parts are said with their keys sorted."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise StateError(f"{'.'.join(path[:5])}… is more than {_DEEPEST} deep: does it hold itself? {_MEND}")
        if isinstance(value, torch.Tensor):
            return self._reference(value, path)
        if value is None or (isinstance(value, bool) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, str) and not isinstance(value, enum.Enum):
            return _text(value, path)
        if isinstance(value, np.ndarray):
            return {"$array": self._tensor(_from_numpy(value, path), path)}
        if isinstance(value, np.generic):
            return self.encode(_plain_number(value, path), path)
        if isinstance(value, enum.Enum):
            raise _refused(path, value)
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
                return _integer(value, path)
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
        raise _refused(path, value)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if not isinstance(key, (str, int, float, bool, tuple, type(None))) or isinstance(key, enum.Enum):
                raise _refused(path, key, "a key of ")
            _text(str(key), path)
        items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith(MARK) for key, _ in items) and (
            len(path) <= self.sorted_to or in_order(value)
        ):
            return dict(items)
        return {MAP: [[self.encode(key, (*path, "key")), item] for key, item in items]}

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...], *, part: bool = False) -> str:
        check_tensor(tensor, path)
        lazily = (tensor.is_conj(), tensor.is_neg())  # of one memory, other numbers
        identity = (_place(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), lazily)
        # Tied weights are saved once. Of a part without elements that must be told as well: other ranks have some.
        if (tensor.numel() or part) and identity in self._seen:
            return self._seen[identity]
        name = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
        while name in self.tensors or name == METADATA:  # keys 1 and "1" of one mapping; what no tensor can be called
            name += "'"
        self._seen[identity] = name
        self.tensors[name] = tensor.detach()
        return name


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its numbers lie. What has none is at no address, but has a memory of its own all the same."""
    if tensor.numel():
        return tensor.data_ptr(), 0
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def check_name(name: str) -> str:
    """What an object is called; StateError for what no file can have as a name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StateError(f"the name {name!r} is no Unicode text: give the object another one") from None
    return name


def _refused(path: tuple[str, ...], value: Any, what: str = "") -> StateError:
    return StateError(
        f"{what}{'.'.join(path)} is of type {type(value).__name__}, which cannot be saved without pickle: {_MEND}"
    )


def _plain_number(value: np.generic, path: tuple[str, ...]) -> Any:
    """A NumPy scalar as Python has it. A date would become a number, and a long double another one."""
    plain = isinstance(value, (np.integer, np.floating, np.bool_, np.str_, np.bytes_))
    if not plain or isinstance(value, (np.timedelta64, np.longdouble)):
        raise StateError(
            f"{'.'.join(path)} is of NumPy's type {type(value).__name__}, which cannot be saved without pickle: have "
            "str(value) in its state_dict(), and make it from that in load_state_dict()"
        )
    return value.item()


def _text(value: str, path: tuple[str, ...]) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise StateError(
            f"{'.'.join(path)} has {value!r}, which is no Unicode text: have bytes in its state_dict()"
        ) from None
    return str(value)


def _integer(value: int, path: tuple[str, ...]) -> int:
    if value.bit_length() > _INTEGER_BITS:
        raise StateError(
            f"{'.'.join(path)} is an integer of {value.bit_length()} bits, more than JSON is read with: "
            "have bytes in its state_dict()"
        )
    return int(value)


def check_tensor(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    """StateError for a tensor that cannot be saved as it is."""
    if is_lazy(tensor):
        raise StateError(
            f"{'.'.join(path)} has no shape yet: run a batch through its module before its state_dict() is asked for"
        )
    if not _has_memory(tensor):
        raise StateError(
            f"{'.'.join(path)} is a {type(tensor).__name__}, which is made of other tensors and has no memory of its "
            "own: have a plain tensor (such as its dequantize()), or the tensors that it is made of, in its "
            "state_dict(), or leave its module out of what is saved"
        )
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise StateError(f"{'.'.join(path)} is not a dense tensor in memory, and only those can be saved: {_MEND}")
    if tensor.dtype not in _DTYPES:
        raise StateError(
            f"{'.'.join(path)} is of dtype {tensor.dtype}, which is none of those that are saved "
            f"({', '.join(sorted(_TORCH))}): keep {_view(tensor.dtype)} in its place, which is as exact, "
            "in a module's buffer or in a state_dict()"
        )


def _view(dtype: torch.dtype) -> str:
    """How a tensor of a dtype that is not saved is seen as one that is, with all of its bits."""
    return "torch.view_as_real(tensor)" if dtype.is_complex else "tensor.view(torch.uint8)"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in a memory of its own: a wrapper of other tensors has none, and its address is 0."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_nested:
        return True
    if is_traceable_wrapper_subclass(tensor):
        return False
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _from_numpy(value: np.ndarray[Any, Any], path: tuple[str, ...]) -> torch.Tensor:
    if isinstance(value, np.ma.MaskedArray):
        raise StateError(
            f"{'.'.join(path)} is a NumPy array with a mask, which would be lost: have its data and its mask in the "
            "state_dict(), an array each"
        )
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):  # a dtype that torch has not; the bytes of another machine
        tensor = None
    if tensor is None or tensor.dtype not in _DTYPES:
        raise StateError(
            f"{'.'.join(path)} is a NumPy array of dtype {value.dtype}, which is none of those that are saved "
            f"({', '.join(sorted(_TORCH))}): have {_numpy_view(value.dtype)} in its state_dict()"
        )
    return tensor


def _numpy_view(dtype: np.dtype[Any]) -> str:
    """What has all that such an array has, and can be saved."""
    if not dtype.isnative:
        return 'array.astype(array.dtype.newbyteorder("="))'
    views = {"M": 'array.view("int64")', "m": 'array.view("int64")', "c": 'array.view("float64")'}
    if dtype.itemsize <= np.dtype(np.complex128).itemsize and dtype.kind in views:
        return f"{views[dtype.kind]}, and its dtype as a string,"
    return "array.tolist(), of what can be saved,"


def all_of_it(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A sharded tensor as it is: the whole of it."""
    return tensor


def unflatten(tree: Any, tensor: Callable[[str], torch.Tensor], rows: Rows = all_of_it) -> Any:
    """The inverse of `flatten` for one tree; `rows` makes a sharded tensor of one that `tensor` gave."""
    if isinstance(tree, list):
        return [unflatten(item, tensor, rows) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, value),) = tree.items()
        if mark.startswith(MARK):
            return _unmark(mark, value, tensor, rows)
    return {key: unflatten(item, tensor, rows) for key, item in tree.items()}


def _unmark(mark: str, value: Any, tensor: Callable[[str], torch.Tensor], rows: Rows) -> Any:
    match mark:
        case "$rows":
            return rows(tensor(value[0]), value[1])
        case "$tensor":
            return tensor(value)
        case "$array":
            array = tensor(value)
            return array if array.is_meta else array.numpy()
        case "$tuple":
            return tuple(unflatten(item, tensor, rows) for item in value)
        case "$counter":
            return Counter(unflatten(value, tensor))
        case "$map":
            return {unflatten(key, tensor): unflatten(item, tensor, rows) for key, item in value}
        case "$float":
            return float(value)
        case "$bytes":
            return base64.b64decode(value)
    raise StateError(f"a checkpoint holds a value marked {mark!r}, which this release does not know")


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by safetensors' name."""
    return _TORCH[name]


def empty(spec: TensorSpec) -> torch.Tensor:
    """A tensor of its own memory, for bytes to come."""
    return torch.empty(spec.shape, dtype=_TORCH[spec.dtype], device="cpu")


def blank(record: TensorRecord | TensorSpec) -> torch.Tensor:
    """A tensor of this kind and shape without memory: to see whether it fits before anything is read."""
    return torch.empty(record.shape, dtype=_TORCH[record.dtype], device="meta")


def rows_in(tree: Any) -> Iterator[tuple[str, int]]:
    """The sharded tensors that a tree names, and how many rows each has."""
    if isinstance(tree, dict) and list(tree) == ["$rows"]:
        name, shape = tree["$rows"]
        yield name, shape[0]
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from rows_in(item)


def adopt(record: TensorRecord, data: memoryview) -> torch.Tensor:
    """A tensor over memory that is its own from now on: all of it, or as many of its rows as there are bytes. What
    was saved in boxes is put together, all of it."""
    dtype = _TORCH[record.dtype]
    if not record.in_rows and data.nbytes:
        return _of_boxes(record, data, dtype)
    row = ITEM_BYTES[record.dtype] * math.prod(record.shape[1:])
    shape = (data.nbytes // row if row else record.shape[0], *record.shape[1:]) if record.shape else ()
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _of_boxes(record: TensorRecord, data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    whole, at = torch.empty(record.shape, dtype=dtype, device="cpu"), 0
    for chunk in record.chunks:
        box = torch.frombuffer(data[at : at + chunk.nbytes], dtype=torch.uint8).view(dtype).reshape(chunk.shape)
        place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.start, chunk.shape, strict=True))
        whole[place] = box
        at += chunk.nbytes
    return whole
