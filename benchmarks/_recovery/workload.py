"""The training that all contenders share, and the only instrument of measurement.

Each script writes a line when a step is trained, and the observer reads nothing else. A line is one `write` to a file
that is opened for appending, so lines of several processes never mix. Its clock is the machine's.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 1024, 256, 4, 4, 64
PER_RANK = 4  # samples per rank of a full world in a step
SAMPLES = 1 << 16
FOREVER = 3600.0


class Model(nn.Module):
    """A transformer of 3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.layers(x, mask=mask, is_causal=True))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def prepare() -> tuple[Model, torch.optim.Optimizer]:
    """Return model and optimizer, the same in each process, with one thread each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def sample(index: int) -> torch.Tensor:
    """Return one sample, which depends only on its number."""
    return torch.randint(0, VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """Return this rank's samples of the step, for a script without a loader."""
    first = (step * world + rank) * PER_RANK
    return torch.stack([sample((first + number) % SAMPLES) for number in range(PER_RANK)])


class Trace:
    """Records the start and end of each step, and executes the observer's orders."""

    def __init__(self, rank: int) -> None:
        self._folder = Path(os.environ["BENCH_FOLDER"])
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self._folder / "trace", flags, 0o644)
        self._began = 0
        self.rank = rank

    def begin(self, audit: Callable[[], bool] = lambda: True, mismatch: Callable[[], None] = lambda: None) -> None:
        """Record that a step begins. A rank with an order fails here, as if in its loss function."""
        self._began = time.monotonic_ns()
        order = self._folder / f"order-{self.rank}"
        if order.exists():
            kind = order.read_text()
            order.unlink()
            self._write(kind, int(audit()) if kind == "audit" else 0, "-")
            _obey(kind)
            if kind == "mismatch":
                mismatch()
                self._write("freed", 0, "-")

    def made(self, step: int, world: str) -> None:
        """Record that the step is trained in this world."""
        self._write("step", step, world)

    def _write(self, what: str, step: int, world: str) -> None:
        line = f"{time.monotonic_ns()} {what} {self._began} {self.rank} {os.getpid()} {step} {world}\n"
        os.write(self._file, line.encode())


def _obey(kind: str) -> None:
    if kind == "sleep":
        time.sleep(FOREVER)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(int(FOREVER))  # unlike CDLL it keeps the interpreter's lock
