"""Ranks without a launcher: for each order on stdin, a forked child runs a case and reports the result.

One process has imported torch for all of them, so that a world costs milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group, store_client
from holdfast.training.step.gradient_reducer import Reducer

LARGE = 1 << 24  # numbers; more than sockets hold
CPU = torch.device("cpu")
PATIENCE = 240.0


class Rank:
    """One rank of a case. The last rank is the one that fails."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank: int = order["rank"]
        self.size: int = order["size"]
        self.port: int = order["port"]
        self.prefix: str = order["prefix"]
        self.fault: str = order.get("fault", "")
        self.cancel = CancelToken()
        self.group: Group
        self._store = store_client("127.0.0.1", self.port, f"{self.prefix}/words", PATIENCE)

    @property
    def victim(self) -> bool:
        return bool(self.fault) and self.rank == self.size - 1

    def say(self, **what: Any) -> None:
        line = json.dumps({"prefix": self.prefix, "rank": self.rank, **what}) + "\n"
        os.write(1, line.encode())

    def connect(self, prefix: str, size: int) -> Group:
        return Group.connect(
            host="127.0.0.1",
            port=self.port,
            prefix=prefix,
            rank=self.rank,
            size=size,
            device=CPU,
            cancel=self.cancel,
            timeout=PATIENCE,
        )

    def together(self, where: str, size: int) -> None:
        """Wait until this number of ranks is here, so that an exit of one rank does not disturb waits of the
        others."""
        self._store.set(f"{where}/{self.rank}", "")
        self._store.wait([f"{where}/{rank}" for rank in range(size)])

    def meet(self) -> None:
        self.group = self.connect(self.prefix, self.size)

    def suffer(self) -> None:
        """Run the fault of the failing rank. If the peer stays silent, the agents report it to the others."""
        if self.victim:
            self.say(suffers=os.getpid())
            if self.fault == "asleep":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "killed" else signal.SIGSTOP)
        if self.fault != "killed":
            threading.Timer(0.1, self.cancel.set, ("a peer is silent",)).start()

    def survive(self) -> None:
        """Run the next attempt among the remaining ranks."""
        self.together("left", self.size - 1)
        self.group.abandon()
        self.meet_again()

    def meet_again(self) -> None:
        self.cancel = CancelToken()
        self.group = self.connect(f"{self.prefix}/next", self.size - 1)
        total = torch.tensor([self.rank + 1.0])
        self.group.sum_(total)
        self.say(total=float(total))
        self.together("met", self.size - 1)


def losing(operation: Callable[[Rank], object]) -> Callable[[Rank], None]:
    """Lose a peer at this operation. The survivors report how they detected it, and continue."""

    def play(rank: Rank) -> None:
        rank.meet()
        rank.group.barrier()
        rank.together("begun", rank.size)
        rank.suffer()
        try:
            operation(rank)
        except HoldfastError as error:
            rank.say(raised=type(error).__name__, message=str(error))
        else:
            rank.say(raised=None)
        rank.survive()

    return play


def nobody_comes(rank: Rank) -> None:
    """The failing rank never meets the others."""
    rank.suffer()
    try:
        rank.meet()
    except HoldfastError as error:
        rank.say(raised=type(error).__name__, message=str(error))
    rank.meet_again()


def backward_and_finish(rank: Rank) -> None:
    """Backward raises nothing, and `finish` raises the error."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    reducer = Reducer(model.parameters(), bucket_bytes=16_000)
    reducer.attach(rank.group)
    reducer.arm(last=True)
    model(torch.randn(8, 64)).sum().backward()
    rank.say(after="backward")
    reducer.finish([0.0])


def exchange(rank: Rank) -> None:
    """Report the result of each collective without a loss."""
    rank.meet()
    group = rank.group
    maximum = torch.tensor([float(rank.rank)])
    group.agree_(maximum)
    numbers = torch.full((3,), float(rank.rank))
    group.broadcast_(numbers, 1)
    odd = [torch.zeros(2, 3).t(), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.complex64)]
    odd += [torch.zeros((), dtype=torch.int16), torch.zeros(0), torch.zeros(3, requires_grad=True)]
    for tensor in odd:
        tensor.detach().fill_(rank.rank)
        group.broadcast_(tensor, 1)
    passed = torch.full((5,), float(rank.rank))
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    sending = group.launch_send([passed.clone()], after, 7)
    group.receive_(passed, before, 7)
    sending.wait()
    rank.say(
        gathered=group.gather({"rank": rank.rank, "text": "x" * rank.rank}),
        shared=[group.share(rank.rank), group.share(rank.rank, 1)],
        maximum=float(maximum),
        broadcast=numbers.tolist(),
        passed=passed.tolist(),
        odd=all(bool((tensor == 1).all()) for tensor in odd),
    )
    rank.together("heard", rank.size)
    group.close()


def weighted(rank: Rank) -> None:
    """Average eight samples in uneven micro-batches, with a layer that only rank 0 uses in one of them."""
    rank.meet()
    torch.manual_seed(0)
    body, extra, never = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(2, 2)
    reducer = Reducer([*body.parameters(), *extra.parameters(), *never.parameters()], bucket_bytes=64)
    reducer.attach(rank.group)
    samples = torch.arange(48.0).reshape(8, 6) / 48
    shares = [[samples[:3], samples[3:5]], [samples[5:]], []][rank.rank]
    for number, share in enumerate(shares):
        reducer.arm(last=share is shares[-1])
        hidden = body(share)
        if rank.rank == 0 and number == 0:
            hidden = extra(hidden)
        (hidden.pow(2).mean(dim=1).sum() / len(samples)).backward()
    touched = reducer.touched()
    agreed = reducer.finish([float(flag) for flag in touched])
    reducer.adopt([flag > 0 for flag in agreed])
    rank.say(
        touched=touched,
        agreed=agreed,
        gradients=[None if p.grad is None else p.grad.tolist() for p in reducer.parameters],
    )
    rank.together("averaged", rank.size)
    rank.group.close()


CASES: dict[str, Callable[[Rank], None]] = {
    "meet": nobody_comes,
    "sum": losing(lambda rank: rank.group.sum_(torch.ones(LARGE))),
    "agree": losing(lambda rank: rank.group.agree_(torch.ones(3, dtype=torch.float64))),
    "broadcast": losing(lambda rank: rank.group.broadcast_(torch.ones(LARGE), rank.size - 1)),
    "gather": losing(lambda rank: rank.group.gather("something")),
    "share": losing(lambda rank: rank.group.share("something", rank.size - 1)),
    "send": losing(lambda rank: rank.group.send(torch.ones(LARGE), rank.size - 1)),
    "receive": losing(lambda rank: rank.group.receive_(torch.ones(LARGE), rank.size - 1)),
    "barrier": losing(lambda rank: rank.group.barrier()),
    "backward": losing(backward_and_finish),
    "exchange": exchange,
    "weighted": weighted,
}


def main() -> None:
    """Run until stdin ends. A child exits without its parent's cleanup."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            rank = Rank(order)
            CASES[order["case"]](rank)
            rank.say(end=True)
            os._exit(0)


if __name__ == "__main__":
    main()
