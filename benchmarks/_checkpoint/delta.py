"""The bytes and time of a delta checkpoint, relative to a full one, if most of a state does not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _bench as bench
import torch

from _checkpoint.contenders import Ours
from holdfast.checkpoint.saving.snapshot import SaveResult

LAYERS, WIDTH, RANK = 157, 1024, 8
LAST_LAYERS = (2, 4)
TEN_TIMES = 10.0


class Partly:
    """A model of which Adam trains a small part: low-rank adapters next to each layer, or the last layers."""

    def __init__(self, nbytes: int, *, adapters: bool = False, last: int = 0) -> None:
        height = nbytes // (LAYERS * WIDTH * torch.bfloat16.itemsize)
        layers = [torch.randn(height, WIDTH).to(torch.bfloat16) for _ in range(LAYERS)]
        pairs = [(torch.randn(RANK, WIDTH), torch.randn(height, RANK)) for _ in range(LAYERS if adapters else 0)]
        self._trained = [one for pair in pairs for one in pair] or layers[-last:]
        moments = [torch.zeros(one.shape) for one in self._trained for _ in range(2)]
        named = enumerate([*layers, *(one for pair in pairs for one in pair), *moments])
        self._tensors = {f"{n}": one for n, one in named}
        self._moments = moments

    def step(self) -> None:
        """Change each trained number and each of its optimizer's."""
        for one in (*self._trained, *self._moments):
            one.add_(1.0)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return all of the state."""
        return self._tensors

    def load_state_dict(self, state: Any, /) -> None:
        """Load nothing."""

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(one.nbytes for one in self._tensors.values())

    @property
    def changing(self) -> int:
        """The size of the tensors that a step changes."""
        return sum(one.nbytes for one in (*self._trained, *self._moments))


def rows(folder: Path, nbytes: int, rounds: int) -> list[bench.Measurement]:
    """Return the rows for adapters and for the last layers."""
    kinds = {f"adapters of rank {RANK}": Partly(nbytes, adapters=True)}
    kinds |= {f"the last {last} of {LAYERS} layers": Partly(nbytes, last=last) for last in LAST_LAYERS}
    return [row for what, state in kinds.items() for row in of_kind(folder, what, state, rounds)]


def of_kind(folder: Path, what: str, state: Partly, rounds: int) -> Iterator[bench.Measurement]:
    """Save full checkpoints and deltas in turn, after a warm-up. The bar is for changes below a tenth."""
    ours, full, delta = Ours(folder / "deltas", state, full_every=2), [], []
    for _ in range(rounds + 1):
        full.append(save(ours, state))
        delta.append(save(ours, state))
    ours.forget()
    limit = state.nbytes / state.changing
    size = f"{state.nbytes / 1e9:.2g} GB of which {what} are trained"
    yield bench.measured(
        "checkpoint-12",
        f"bytes of a full checkpoint over a delta's: {size}",
        over(full, delta, 0),
        "x",
        target=f">= {TEN_TIMES:.0f}" if limit >= TEN_TIMES else "",
        limit=limit,
    )
    yield bench.measured("", f"time of a full checkpoint over a delta's: {size}", over(full, delta, 1), "x")


def save(ours: Ours, state: Partly) -> tuple[float, float]:
    """Return the bytes that were written, and the seconds until they were durable."""
    state.step()
    ended: list[SaveResult] = []
    seconds = ours.save(ended.append)
    return ended[0].nbytes, seconds


def over(full: Sequence[tuple[float, float]], delta: Sequence[tuple[float, float]], which: int) -> list[float]:
    """Return the ratios within each round but the first."""
    return bench.ratios([one[which] for one in full[1:]], [one[which] for one in delta[1:]])
