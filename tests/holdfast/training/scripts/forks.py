"""A helper that has loaded torch and forks rank processes, which is cheaper than new interpreters.

Each line of its input requests one process: {"script", "words", "environ", "log"}. The helper prints {"pid"}, and
after the end of the process {"pid", "code"}. A forked process behaves like one that was started with `python SCRIPT
WORDS…`, including its exit.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
from pathlib import Path
from typing import Any

import torch._dynamo  # what the first optimizer of a process imports
import torch.distributed.fsdp  # noqa: F401

import holdfast.training.job  # noqa: F401

Order = dict[str, Any]


def main() -> None:
    order = serve()
    if order is not None:
        become(order)


def serve() -> Order | None:
    """Return in forked processes with their order, and in the helper when the input ends."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked soundly"
    orders = sys.stdin
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    running: dict[int, int] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == orders.fileno():
                line = orders.buffer.raw.readline()  # type: ignore[attr-defined]  # nothing may stay in a buffer
                if not line:
                    return None
                pid = os.fork()
                if pid == 0:
                    forget([descriptor, *running])
                    return dict(json.loads(line))
                ended = os.pidfd_open(pid)
                running[ended] = pid
                poll.register(ended, select.POLLIN)
                say(pid=pid)
            else:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = running.pop(descriptor)
                say(pid=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def forget(descriptors: list[int]) -> None:
    """Reset what a new interpreter would not have inherited."""
    for descriptor in descriptors:
        os.close(descriptor)
    os.open(os.devnull, os.O_RDONLY)  # is 0, the lowest free one


def become(order: Order) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(order["environ"])
    sys.argv[:] = [order["script"], *order["words"]]
    sys.path[0] = str(Path(order["script"]).parent)
    runpy.run_path(order["script"], run_name="__main__")


def say(**what: int) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())  # at once: ranks share their output


if __name__ == "__main__":
    main()
