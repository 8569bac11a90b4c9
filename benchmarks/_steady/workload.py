"""The training that all contestants share: a small language model on synthetic tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the size of its step."""

    vocabulary: int
    width: int
    layers: int
    context: int
    samples: int
    heads: int = 4


SHAPES = {
    "3.7 M": Shape(vocabulary=1024, width=256, layers=4, context=64, samples=4),
    "29 M": Shape(vocabulary=4096, width=512, layers=8, context=64, samples=4),
    "29 M, 1 sample": Shape(vocabulary=4096, width=512, layers=8, context=64, samples=1),
}


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width,
            shape.heads,
            4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens."""
        hidden = self.embed(tokens) + self.position.weight
        logits: torch.Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def build(shape: Shape) -> tuple[Model, torch.optim.Optimizer]:
    """Return model and optimizer, equal in every process and for every contestant."""
    torch.manual_seed(0)
    model = Model(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def parameters(shape: Shape) -> int:
    """Return the number of trained parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(shape).parameters())


class Samples:
    """The dataset; each sample depends only on its number."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self._shape.vocabulary, (self._shape.context + 1,), generator=generator)


def batch(shape: Shape, step: int, rank: int) -> torch.Tensor:
    """Return one rank's samples of a step."""
    first = (2 * step + rank) * shape.samples
    samples = Samples(shape)
    return torch.stack([samples[(first + number) % len(samples)] for number in range(shape.samples)])


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
