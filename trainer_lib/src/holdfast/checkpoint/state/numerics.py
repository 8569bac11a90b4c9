"""The environment that the bits of a result depend on. Every checkpoint records it."""

from __future__ import annotations

import platform
from typing import Any

import torch


def fingerprint() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpuCapability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
