"""The dtypes that can be saved, by their names in torch and in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from holdfast.checkpoint.format.records import TensorRecord
from holdfast.checkpoint.format.shard_layout import TensorSpec

DTYPES: Final[Mapping[torch.dtype, str]] = {
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
TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    return TORCH_DTYPES[name]


def empty(spec: TensorSpec) -> torch.Tensor:
    """Return a new tensor with uninitialised memory."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="cpu")


def on_meta(record: TensorRecord | TensorSpec) -> torch.Tensor:
    """Return a tensor of this dtype and shape on the meta device, to check whether it fits before
    anything is read.
    """
    return torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype], device="meta")
