"""Donors and newcomers without a launcher. For each order on stdin a child is forked that plays one of them.

One process has imported torch for all, so that a world costs milliseconds. The store's key `over` plays launchers:
the test sets it when a rank dies, and a rank when it fails; then everyone's attempt is over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch.distributed import PrefixStore, TCPStore

from holdfast import transfer
from holdfast.checkpoint.state import Flat, flatten_values, unflatten
from holdfast.collectives import Group, Over
from holdfast.errors import HoldfastError

CPU = torch.device("cpu")
PATIENCE = 240.0
SIDE = {"position": {"cursor": 640}, "counters": {"skipped": 2}}


class Faulty:
    """A group whose owner dies, or whose wire flips a bit, at one message."""

    def __init__(self, group: Group, at: int, act: Callable[[torch.Tensor], None]) -> None:
        self.rank, self._group, self._at, self._act = group.rank, group, at, act
        self.messages = 0

    def launch_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Any:
        self._strike(tensor)
        return self._group.launch_send(tensor, to, tag)

    def launch_receive(self, tensor: torch.Tensor, frm: int, tag: int = 0) -> Any:
        self._strike(tensor)
        return self._group.launch_receive(tensor, frm, tag)

    def _strike(self, tensor: torch.Tensor) -> None:
        if self.messages == self._at:
            self._act(tensor)
        self.messages += 1


def say(order: dict[str, Any], **what: Any) -> None:
    os.write(1, (json.dumps({"prefix": order["prefix"], "rank": order["rank"], **what}) + "\n").encode())


def client(order: dict[str, Any]) -> PrefixStore:
    """One that waits does nothing else."""
    patience = timedelta(seconds=PATIENCE)
    return PrefixStore(order["prefix"], TCPStore("127.0.0.1", order["port"], is_master=False, timeout=patience))


def die(order: dict[str, Any]) -> None:
    say(order, dies=True)
    os.kill(os.getpid(), signal.SIGKILL)


def flip(tensor: torch.Tensor) -> None:
    tensor[tensor.numel() // 2] ^= 1


def state(kind: str, *, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(300, 7)
    values = {
        "model": {"weight": weight, "tied": weight, "turned": torch.randn(64, 32).t(), "none": torch.empty(0, 3)},
        "numbers": {"half": torch.randn(5).bfloat16(), "complex": torch.randn(3, dtype=torch.complex64)},
        "flags": (torch.tensor([True, False]), torch.tensor(7), 1e-3, None, "text", float("nan")),
    }
    if kind == "large":
        values["big"] = [torch.arange(3 << 20, dtype=torch.float32).add_(seed + i) for i in range(4)]
    if kind == "other layout":
        values["big"] = [torch.zeros(6 << 20) for _ in range(2)]
    return values


def digest(flat: Flat) -> str:
    whole = xxhash.xxh3_128(json.dumps(flat.tree))
    for name, tensor in sorted(flat.tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
        whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def play(order: dict[str, Any]) -> None:
    """Nobody leaves before all have spoken: a connection that ends must not be what another hears of."""
    rank, donors, to = order["rank"], order["donors"], order["to"]
    store = client(order)
    over = Over()
    threading.Thread(target=lambda: (store.wait(["over"]), over.set("a test says so")), daemon=True).start()
    mine = flatten_values(state(order["kinds"][rank], seed=0 if rank in donors else 1 + rank))
    before = digest(mine)
    said: dict[str, Any] = {"before": before}
    group = Group.connect(
        host="127.0.0.1",
        port=order["port"],
        prefix=order["prefix"] + "/gloo",
        rank=rank,
        size=len(donors) + len(to),
        device=CPU,
        over=over,
        timeout=PATIENCE,
    )
    fault = order["fault"] if order["fault"] and order["fault"]["rank"] == rank else {"at": -1, "act": "die"}
    channel = Faulty(group, fault["at"], flip if fault["act"] == "flip" else lambda _: die(order))
    try:
        if rank in donors:
            transfer.give(channel, to, donors, mine, {**SIDE, "from": rank})
        else:
            tree, tensors, side = transfer.receive(channel, donors)
            unflatten(tree, tensors.__getitem__)
            said.update(got=digest(Flat(tree=tree, tensors=tensors)), side=side, owned=owned(tensors))
    except HoldfastError as error:
        said.update(error=type(error).__name__, message=str(error))
        client(order).set("over", "")
    say(order, **said, after=digest(mine), messages=channel.messages)
    client(order).wait(["end"])
    group.abandon()


def owned(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether no two of them share memory."""
    starts = [tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()]
    return len(set(starts)) == len(starts)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            play(order)
            os._exit(0)


if __name__ == "__main__":
    main()
