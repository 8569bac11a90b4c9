"""The environment that the bits of a result depend on. Every checkpoint records it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/sys/module/nvidia/version")


def fingerprint() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpuCapability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **(gpu_versions() if cuda else {}),
    }


@functools.cache
def gpu_versions() -> dict[str, str]:
    """Return the versions of a GPU's libraries and driver, without those that are unknown."""
    found: dict[str, Any] = {"cuda": torch.version.cuda}
    with suppress(RuntimeError):  # not compatible with the GPU
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with suppress(OSError):
        found["driver"] = _DRIVER.read_text().strip()
    return {name: str(version) for name, version in found.items() if version}


def changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the fields that differ, with both values; "" if none does, or if nothing was saved."""
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)] if saved else []
    return "; ".join(f"{name} was {saved.get(name, 'absent')}, is {current.get(name, 'absent')}" for name in names)
