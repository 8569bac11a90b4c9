"""States of the random number generators of one rank, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Python's, numpy's, torch's and every CUDA device's generator."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": {"version": version, "state": list(internal), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": _pack(np.asarray(keys, dtype="<u4").tobytes()),
            "position": int(position),
            "hasGauss": int(has_gauss),
            "cachedGaussian": float(cached),
        },
        "torch": _pack(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_pack(state.numpy().tobytes()) for state in _cuda_states()],
    }


def apply(states: dict[str, Any]) -> None:
    """Set the generators to what was captured. Devices that are not there are left out."""
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["state"]), python["gauss"]))
    keys = np.frombuffer(base64.b64decode(numpy["keys"]), dtype="<u4")
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["hasGauss"], numpy["cachedGaussian"]))
    torch.set_rng_state(_unpack(states["torch"]))
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_unpack(state), device)


def seed(value: int) -> None:
    """Seed all generators: for a rank that was not there when the checkpoint was made."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


def _cuda_states() -> list[torch.Tensor]:
    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
