"""A small byte-level GPT, trained on text that every machine has: the source of Python's standard library.

By hand, in a world of one:      python train.py --max-steps 200
With a launcher, two processes:  holdfast run --nproc-per-node 2 -- python train.py --max-steps 200
On Kubernetes:                   kubectl apply -f job.yaml

There is no dropout, and the samples of a step do not depend on how many ranks there are, so runs at any world size,
disturbed or not, end at about the same loss. What Holdfast asks of a script is in `main`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import holdfast

BYTES = 256
SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo",
           "ensurepip", "lib2to3", "pydoc_data", "distutils"}  # fmt: skip


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    job = holdfast.init()
    train, held_out = corpus(args.corpus_bytes, args.context)
    model = GPT(args.d_model, args.layers, args.heads, args.context).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(args.warm_up, args.max_steps))
    job.manage(model=model, optimizer=optimizer, scheduler=scheduler, max_grad_norm=1.0)
    parameters = sum(p.numel() for p in model.parameters())
    job.log(parameters=parameters, train_bytes=len(train.text), held_out_bytes=len(held_out.text))

    pace = time.monotonic()
    for window in job.batches(
        train,
        global_batch_size=args.global_batch,
        micro_batch_size=args.micro_batch,
        max_steps=args.max_steps,
        seed=args.seed,
    ):
        fail_if_asked(args.inject, job.committed_step)
        result = job.step(model.loss(window))
        if result.committed:
            pace = keep_pace(pace, args.pace)
        if result.committed and result.step % 10 == 0:
            job.log(loss=round(bits(result.loss), 4), grad_norm=round(result.grad_norm, 4))
        if result.committed and args.evaluate_every and result.step % args.evaluate_every == 0:
            with job.phase("evaluation"):
                job.log(held_out=round(evaluate(model, held_out, windows=16), 4))

    if job.is_coordinator:
        with job.phase("evaluation"):
            loss = evaluate(model, held_out, windows=args.evaluation_windows)
        print(f"audit: {job.audit()}", flush=True)
        where = f"at step {job.committed_step}, text {train.fingerprint}"
        print(f"held-out bits per byte: {loss:.4f} {where}", flush=True)


def arguments() -> argparse.Namespace:
    """Sizes are such that a step of three ranks on two cores takes 0.1 to 0.2 s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=24, help="windows in a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=12, help="windows in one backward pass")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=int, default=50, help="steps until the full learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in this process")
    parser.add_argument("--corpus-bytes", type=int, default=4 << 20)
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps; 0 for only at the end")
    parser.add_argument("--evaluation-windows", type=int, default=256)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--inject", type=Path, help="a file that makes this script fail once, see fail_if_asked")
    return parser.parse_args()


def fail_if_asked(path: Path | None, step: int) -> None:
    """Raise when `path` holds {"raise_at_step": n} and step n is reached. Renaming it makes it fire exactly once."""
    if path is None or not path.exists():
        return
    try:
        if step + 1 < int(json.loads(path.read_text())["raise_at_step"]):
            return
        path.rename(path.with_suffix(".fired"))
    except FileNotFoundError:
        return  # another rank was first
    raise RuntimeError(f"asked to fail at step {step + 1}")


def keep_pace(last: float, seconds: float) -> float:
    """Sleep until `seconds` after `last`: a fast machine must not finish before a demonstration has."""
    time.sleep(max(0.0, last + seconds - time.monotonic()))
    return time.monotonic()


# Data


@dataclass
class Windows:
    """Overlapping windows of a text; one sample is `context` bytes and the byte after each."""

    text: torch.Tensor
    context: int
    fingerprint: str

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.context
        return self.text[begin : begin + self.context + 1]


def corpus(limit: int, context: int) -> tuple[Windows, Windows]:
    """Training and held-out text: whole files, one in twenty held out by the hash of its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    taken = 0
    for file in files:
        data = file.read_bytes()
        taken += len(data)
        if taken > limit:
            break
        name = file.relative_to(root).as_posix().encode()
        parts[hashlib.sha256(name).digest()[0] % 20 == 0].append(data)
    train, held_out = (b"".join(parts[held]) for held in (False, True))
    if min(len(train), len(held_out)) <= context:
        raise SystemExit(f"{limit} bytes of {root} leave no text to train on or to hold out: raise --corpus-bytes")
    return windows(train, context), windows(held_out, context)


def windows(text: bytes, context: int) -> Windows:
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Windows(tensor, context, hashlib.sha256(text).hexdigest()[:16])


# Model


class GPT(nn.Module):
    """A decoder with pre-normalisation, learned positions and tied embeddings."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)

    def loss(self, window: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        tokens = window.long()
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


def warm_up_then_cosine(warm_up: int, steps: int):
    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))

    return factor


@torch.no_grad()
def evaluate(model: GPT, held_out: Windows, *, windows: int) -> float:
    """Bits per byte over windows that are spread evenly over the held-out text."""
    count = min(windows, len(held_out))
    chosen = [held_out[index * len(held_out) // count] for index in range(count)]
    device = next(model.parameters()).device
    losses = [model.loss(torch.stack(chosen[at : at + 32]).to(device)) * len(chosen[at : at + 32])
              for at in range(0, count, 32)]  # fmt: skip
    return bits(float(sum(losses)) / count)


def bits(nats: float) -> float:
    return nats / math.log(2)


if __name__ == "__main__":
    main()
