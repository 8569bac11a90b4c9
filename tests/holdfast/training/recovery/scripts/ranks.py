"""Donors and receivers without a launcher. For each order on stdin, a forked child runs one of them.

One process has imported torch for all, so that a world costs milliseconds. The key `over` of the store replaces
launchers: the test sets it when a rank dies, and a rank sets it when it fails. Then the attempt is over for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import xxhash
from torch.distributed import PrefixStore, TCPStore

from holdfast.checkpoint.state.flatten import Flat, flatten_values
from holdfast.checkpoint.state.unflatten import unflatten
from holdfast.core.errors import HoldfastError
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group
from holdfast.training.recovery import state_transfer

CPU = torch.device("cpu")
PATIENCE = 240.0
SIDE = {"position": {"cursor": 640}, "counters": {"skipped": 2}}


class Faulty:
    """A group whose owner dies, or whose network flips a bit, at one launch."""

    def __init__(
        self, group: Group, at: int, act: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> None:
        self.rank, self._group, self._at, self._act = group.rank, group, at, act
        self.launches = 0

    def launch_send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Any:
        return self._group.launch_send(self._struck(tensors), to, tag)

    def launch_receive(self, tensors: Sequence[torch.Tensor], frm: int, tag: int = 0) -> Any:
        return self._group.launch_receive(self._struck(tensors), frm, tag)

    def _struck(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.launches == self._at:
            tensors = self._act(tensors)
        self.launches += 1
        return tensors


def say(order: dict[str, Any], **what: Any) -> None:
    os.write(1, (json.dumps({"prefix": order["prefix"], "rank": order["rank"], **what}) + "\n").encode())


def client(order: dict[str, Any]) -> PrefixStore:
    """Return a client. A rank that waits does nothing else."""
    patience = timedelta(seconds=PATIENCE)
    return PrefixStore(order["prefix"], TCPStore("127.0.0.1", order["port"], is_master=False, timeout=patience))


def die(order: dict[str, Any]) -> NoReturn:
    say(order, dies=True)
    os.kill(os.getpid(), signal.SIGKILL)


def flip(tensors: Sequence[torch.Tensor], which: int) -> Sequence[torch.Tensor]:
    """Flip a bit in transit. The data of the sender stays unchanged."""
    flipped = [tensor.clone() for tensor in tensors]
    flipped[which][flipped[which].numel() // 2] ^= 1
    return flipped


def state(kind: str, *, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(300, 7)
    values = {
        "model": {"weight": weight, "tied": weight, "turned": torch.randn(64, 32).t(), "none": torch.empty(0, 3)},
        "numbers": {"half": torch.randn(5).bfloat16(), "complex": torch.randn(3, dtype=torch.complex64)},
        "flags": (torch.tensor([True, False]), torch.tensor(7), 1e-3, None, "text", float("nan")),
    }
    if kind == "large":
        values["big"] = [torch.arange(3 << 20, dtype=torch.float32).add_(seed + i) for i in range(3)]
        values["turned"] = torch.arange(3 << 20, dtype=torch.float32).add_(seed).view(3 << 10, 1 << 10).t()
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
    """Run one rank. No rank exits before all have reported, so that no closed connection disturbs the others."""
    rank, donors, to = order["rank"], order["donors"], order["to"]
    store = client(order)
    cancel = CancelToken()
    threading.Thread(target=lambda: (store.wait(["over"]), cancel.set("a test says so")), daemon=True).start()
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
        cancel=cancel,
        timeout=PATIENCE,
    )
    fault = order["fault"] if order["fault"] and order["fault"]["rank"] == rank else {"at": -1, "act": "die"}
    acts = {"die": lambda _: die(order), "flip first": partial(flip, which=0), "flip last": partial(flip, which=-1)}
    channel = Faulty(group, fault["at"], acts[fault["act"]])
    try:
        if rank in donors:
            state_transfer.send(channel, to, donors, mine, {**SIDE, "from": rank})
        else:
            room = state_transfer.ReceiveBuffers()
            room.prepare((tensor.dtype, tuple(tensor.shape)) for tensor in mine.tensors.values())
            tree, tensors, side = state_transfer.receive(channel, donors, room)
            unflatten(tree, tensors.__getitem__)
            said.update(got=digest(Flat(tree=tree, tensors=tensors)), side=side, owned=owned(tensors))
    except HoldfastError as error:
        said.update(error=type(error).__name__, message=str(error))
        client(order).set("over", "")
    say(order, **said, after=digest(mine), launches=channel.launches)
    client(order).wait(["end"])
    group.abandon()


def owned(tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether no two tensors share memory."""
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
