"""Trains a small transformer that is sharded over replicas of two ranks, and notes all it does.

Its gradients are rounded to multiples of 2^-14 before anything adds them up, and learning rate and momentum are
powers of two. So no sum depends on how many ranks there are or on their order, and each step has one right result to
the last bit: that of the same script in a world of one, where nothing is sharded. Notes are those of
`drills/_train.py`; `weights` is a shard's number with a digest of its weights and momentum, or what the job's own
audit says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

import holdfast

SHARDS = 2
ROWS, BATCH, MICRO_BATCH = 480, 8, 2
SYMBOLS, LENGTH, WIDTH = 32, 8, 16
AUDIT_EVERY = 20
GRAIN = 2.0**14
POD = os.environ["HOLDFAST_POD_NAME"]


class Rounded(torch.autograd.Function):
    """The same tensor, with a gradient that adds up exactly."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.round(gradient * GRAIN) / GRAIN


class Exact(nn.Module):
    """A module, all of whose parameters have rounded gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = {name: Rounded.apply(parameter) for name, parameter in self.module.named_parameters()}
        return functional_call(self.module, rounded, (x,))


def network() -> nn.Sequential:
    block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*map(Exact, (nn.Embedding(SYMBOLS, WIDTH), block, nn.Linear(WIDTH, SYMBOLS))))


def digests(shards: Iterable[int], model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Of each shard that is here."""
    tensors = [one for p in model.parameters() for one in (p.detach(), optimizer.state[p]["momentum_buffer"])]
    for shard in shards:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            rows = tensor.to_local() if hasattr(tensor, "to_local") else tensor.chunk(SHARDS)[shard]
            digest.update(rows.contiguous().numpy().tobytes())
        yield f"{shard}:{digest.hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--whole", action="store_true", help="in a world of one: nothing is sharded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = holdfast.init()
    model = network().to(torch.float64)
    if not args.whole:
        for layer in (*model, model):
            job.fully_shard(layer, size=SHARDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    job.manage(model=model, optimizer=optimizer)
    numbers = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.arange(ROWS)[:, None], torch.randint(SYMBOLS, (ROWS, LENGTH), generator=numbers)], dim=1)
    with (Path(__file__).parent / f"notes-{POD}.{os.getpid()}.jsonl").open("a") as file:

        def note(do: str, step: int, attempt_id: tuple[int, int], **more: Any) -> None:
            line = {"at": time.time(), "do": do, "pod": POD, "attempt_id": attempt_id, "step": step, **more}
            file.write(json.dumps(line) + "\n")
            file.flush()

        sizes = {"global_batch_size": BATCH, "micro_batch_size": MICRO_BATCH, "max_steps": args.max_steps}
        for batch in job.batches(rows, **sizes):
            attempt_id, symbols = (job.generation, job.attempt), batch[:, 1:]
            note("take", job.committed_step + 1, attempt_id, samples=batch[:, 0].tolist())
            logits = model(symbols)
            result = job.step(nn.functional.cross_entropy(logits.flatten(0, 1), symbols.roll(1, 1).flatten()))
            # Who stood by while the others went on has their state when it comes back, and not that of its last step.
            if result.loss is not None and result.committed and result.step == job.committed_step:
                for digest in digests(range(SHARDS) if args.whole else (job.shard,), model, optimizer):
                    note("commit", result.step, attempt_id, weights=digest)
                if result.step % AUDIT_EVERY == 0:
                    note("audit", result.step, attempt_id, weights=str(job.audit()))
                time.sleep(args.pace)


main()
