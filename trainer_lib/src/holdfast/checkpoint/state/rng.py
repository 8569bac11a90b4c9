"""The states of one rank's random number generators, as JSON."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.core.errors import StateError


@dataclass(frozen=True, kw_only=True)
class States:
    """The states of all generators."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def current(cls) -> States:
        """Return the states of Python, numpy, torch and every CUDA device, without initialising CUDA."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=True),
            cpu=torch.get_rng_state(),
            cuda=tuple(generator.get_state() for generator in _cuda_generators()),
        )

    def to_json(self) -> dict[str, Any]:
        version, internal, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "state": list(internal), "gauss": gauss},
            "numpy": {
                "kind": kind,
                "keys": _pack(np.asarray(keys, dtype="<u4").tobytes()),
                "position": int(position),
                "hasGauss": int(has_gauss),
                "cachedGaussian": float(cached),
            },
            "torch": _pack(self.cpu.numpy().tobytes()),
            "cuda": [_pack(state.numpy().tobytes()) for state in self.cuda],
        }

    def apply(self) -> None:
        """Set the generators. Devices that do not exist are skipped."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if torch.cuda.is_available():
            for device, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)


def capture() -> dict[str, Any]:
    """Return the states of all generators, in the form of the per-rank state."""
    return States.current().to_json()


def of(per_rank: Any) -> Any:
    """Return the captured states in a rank's per-rank state."""
    return per_rank.get("rng") if isinstance(per_rank, dict) else None


def read(captured: Any) -> States:
    """Parse captured states, and try them on other generators. Raise `StateError` if they are not valid."""
    try:
        python, numpy = captured["python"], captured["numpy"]
        keys = np.frombuffer(base64.b64decode(numpy["keys"], validate=True), dtype="<u4")
        states = States(
            python=(python["version"], tuple(python["state"]), python["gauss"]),
            numpy=(numpy["kind"], keys, numpy["position"], numpy["hasGauss"], numpy["cachedGaussian"]),
            cpu=_unpack(captured["torch"]),
            cuda=tuple(map(_unpack, captured["cuda"])),
        )
        random.Random().setstate(states.python)  # noqa: S311  (not for secrets)
        np.random.RandomState().set_state(states.numpy)
        torch.Generator().set_state(states.cpu)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise StateError(
            f"the saved states of the random generators are not valid ({error!r}): use an older checkpoint"
        ) from error
    return states


def digests() -> tuple[int, int, int, int]:
    """Return a number for each state: of Python, numpy, torch and the current CUDA device."""
    states = States.current()
    cpu = _digest(states.cpu)
    cuda = _digest(states.cuda[torch.cuda.current_device()]) if states.cuda else cpu
    return _digest(states.python), _digest(states.numpy), cpu, cuda


def seed(*, python: int, numpy: int, cpu: int, cuda: int) -> None:
    """Seed all generators. `torch.manual_seed` takes 89 µs, the method of its CPU generator 2 µs."""
    random.seed(python)
    np.random.seed(numpy & 0xFFFFFFFF)
    torch.default_generator.manual_seed(cpu)
    for generator in _cuda_generators():
        generator.manual_seed(cuda)


def _cuda_generators() -> tuple[torch.Generator, ...]:
    """Return the generators of all CUDA devices, without initialising CUDA."""
    return tuple(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def _digest(state: Any) -> int:
    """Return 53 bits, which every JSON reader reads exactly."""
    if isinstance(state, torch.Tensor):
        data = state.numpy().tobytes()
    else:
        data = repr([part.tobytes() if isinstance(part, np.ndarray) else part for part in state]).encode()
    return xxhash.xxh3_64_intdigest(data) >> 11


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
