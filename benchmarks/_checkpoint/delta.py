"""What a delta saves where most of a state stays as it is: its bytes and its time, under those of a full commit."""

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
    """A model of which little is trained with Adam: adapters of a low rank beside each layer, or the last layers."""

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
        """Each number that is trained becomes another one, and each of its optimizer's."""
        for one in (*self._trained, *self._moments):
            one.add_(1.0)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """All of it."""
        return self._tensors

    def load_state_dict(self, state: Any, /) -> None:
        """Nothing is loaded here."""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(one.nbytes for one in self._tensors.values())

    @property
    def changing(self) -> int:
        """Of those that a step changes."""
        return sum(one.nbytes for one in (*self._trained, *self._moments))


def rows(folder: Path, nbytes: int, rounds: int) -> list[bench.Measurement]:
    """For adapters, and for the last layers."""
    kinds = {f"adapters of rank {RANK}": Partly(nbytes, adapters=True)}
    kinds |= {f"the last {last} of {LAYERS} layers": Partly(nbytes, last=last) for last in LAST_LAYERS}
    return [row for what, state in kinds.items() for row in of_kind(folder, what, state, rounds)]


def of_kind(folder: Path, what: str, state: Partly, rounds: int) -> Iterator[bench.Measurement]:
    """Full ones and deltas in turn; the first two are the warm-up. The bar is for what changes less than a tenth."""
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
    """Bytes that were written, and seconds until they were durable."""
    state.step()
    ended: list[SaveResult] = []
    seconds = ours.save(ended.append)
    return ended[0].nbytes, seconds


def over(full: Sequence[tuple[float, float]], delta: Sequence[tuple[float, float]], which: int) -> list[float]:
    """Ratios within each round but the first."""
    return bench.ratios([one[which] for one in full[1:]], [one[which] for one in delta[1:]])
