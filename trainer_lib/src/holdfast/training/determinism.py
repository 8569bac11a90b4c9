"""`holdfast.init(deterministic=True)`: PyTorch uses only algorithms whose results do not vary."""

from __future__ import annotations

import os
from typing import Final

import torch

from holdfast.core.errors import UsageError

_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE: Final = (":4096:8", ":16:8")


def enable() -> None:
    """Use only deterministic algorithms. Raise `UsageError` if cuBLAS does not."""
    found = os.environ.get(_WORKSPACE)
    if found is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"CUDA is initialised already, so cuBLAS may not read {_WORKSPACE} any more: call"
            f" holdfast.init(deterministic=True) before the script uses CUDA, or start it with"
            f" {_WORKSPACE}={_REPEATABLE[0]}"
        )
    if found not in (None, *_REPEATABLE):
        raise UsageError(f"{_WORKSPACE} is {found!r}: for deterministic=True, expected {' or '.join(_REPEATABLE)}")
    os.environ[_WORKSPACE] = found or _REPEATABLE[0]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
