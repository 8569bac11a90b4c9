"""Which values can be saved. Other values are rejected by name, with what to save instead."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.state.dtypes import DTYPES, TORCH_DTYPES
from holdfast.core.errors import StateError

# Python parses integers in JSON of at most 4,300 digits.
_INTEGER_BITS: Final = 8192

ADVICE: Final = "keep only tensors, numbers, strings, lists and dicts in its state_dict()"


def check_name(name: str) -> str:
    """Return an object's name. Raise `StateError` if a file cannot contain it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise StateError(f"the name {name!r} is not Unicode text: rename the object") from None
    return name


def refused(path: tuple[str, ...], value: Any, what: str = "") -> StateError:
    """Return the error for a value that has no form without pickle."""
    return StateError(
        f"{what}{'.'.join(path)} is of type {type(value).__name__}, which cannot be saved without pickle: {ADVICE}"
    )


def plain_number(value: np.generic, path: tuple[str, ...]) -> Any:
    """Return a NumPy scalar as a Python value.

    Raise `StateError` for types that Python would change: dates become numbers, and long doubles lose digits.
    """
    plain = isinstance(value, (np.integer, np.floating, np.bool_, np.str_, np.bytes_))
    if not plain or isinstance(value, (np.timedelta64, np.longdouble)):
        raise StateError(
            f"{'.'.join(path)} has NumPy's type {type(value).__name__}, which cannot be saved without "
            "pickle: store str(value) in its state_dict(), and convert it back in load_state_dict()"
        )
    return value.item()


def checked_text(value: str, path: tuple[str, ...]) -> str:
    """Return the text. Raise `StateError` if it is not valid Unicode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise StateError(
            f"{'.'.join(path)} has {value!r}, which is not Unicode text: store bytes in its state_dict()"
        ) from None
    return str(value)


def checked_integer(value: int, path: tuple[str, ...]) -> int:
    """Return the integer. Raise `StateError` if JSON parsers cannot read it."""
    if value.bit_length() > _INTEGER_BITS:
        raise StateError(
            f"{'.'.join(path)} is an integer of {value.bit_length()} bits, more than JSON can be read with: "
            "store bytes in its state_dict()"
        )
    return int(value)


def check_tensor(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    """Raise `StateError` for a tensor that cannot be saved as it is."""
    if is_lazy(tensor):
        raise StateError(
            f"{'.'.join(path)} has no shape yet: run a batch through its module before you call its state_dict()"
        )
    if not _has_memory(tensor):
        raise StateError(
            f"{'.'.join(path)} is a {type(tensor).__name__}, which consists of other tensors and has no "
            "memory of its own: store a plain tensor (such as its dequantize()), or the tensors that it "
            "consists of, in its state_dict(), or do not save its module"
        )
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise StateError(
            f"{'.'.join(path)} is not a dense tensor in memory, and only dense tensors can be saved: {ADVICE}"
        )
    if tensor.dtype not in DTYPES:
        raise StateError(
            f"{'.'.join(path)} has dtype {tensor.dtype}, which cannot be saved (supported: "
            f"{', '.join(sorted(TORCH_DTYPES))}): store {_view(tensor.dtype)} instead, which is as exact, "
            "in a module's buffer or in a state_dict()"
        )


def _view(dtype: torch.dtype) -> str:
    """Return the expression that views an unsupported dtype as a supported one, with all of its bits."""
    return "torch.view_as_real(tensor)" if dtype.is_complex else "tensor.view(torch.uint8)"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has its own memory. A wrapper of other tensors has none, and its address is 0."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_nested:
        return True
    if is_traceable_wrapper_subclass(tensor):
        return False
    try:
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def from_numpy(value: np.ndarray[Any, Any], path: tuple[str, ...]) -> torch.Tensor:
    """Return the array as a tensor. Raise `StateError` if it cannot be saved."""
    if isinstance(value, np.ma.MaskedArray):
        raise StateError(
            f"{'.'.join(path)} is a NumPy array with a mask, which would be lost: store its data and its "
            "mask as separate arrays in the state_dict()"
        )
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):  # a dtype that torch lacks, or another byte order
        tensor = None
    if tensor is None or tensor.dtype not in DTYPES:
        raise StateError(
            f"{'.'.join(path)} is a NumPy array of dtype {value.dtype}, which cannot be saved (supported: "
            f"{', '.join(sorted(TORCH_DTYPES))}): store {_numpy_view(value.dtype)} in its state_dict()"
        )
    return tensor


def _numpy_view(dtype: np.dtype[Any]) -> str:
    """Return the expression for a savable value with all data of such an array."""
    if not dtype.isnative:
        return 'array.astype(array.dtype.newbyteorder("="))'
    views = {"M": 'array.view("int64")', "m": 'array.view("int64")', "c": 'array.view("float64")'}
    if dtype.itemsize <= np.dtype(np.complex128).itemsize and dtype.kind in views:
        return f"{views[dtype.kind]}, and its dtype as a string,"
    return "array.tolist(), if its items can be saved,"
