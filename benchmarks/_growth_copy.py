"""The limit of a growth: a plain gloo broadcast of as many bytes as the state has, between two processes.

For each line on stdin, rank 0 prints the seconds of one broadcast. The memory at both ends is already allocated.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from _steady.workload import SHAPES, parameters

# The weights and both moments of AdamW.
STATE_BYTES = 3 * 4


def main() -> None:
    torch.set_num_threads(1)
    os.nice(5)  # as ranks do
    dist.init_process_group("gloo")
    state = torch.ones(STATE_BYTES * parameters(SHAPES[os.environ["BENCH_SIZE"]]), dtype=torch.uint8)
    go = torch.ones(1)
    while True:
        if dist.get_rank() == 0 and not sys.stdin.readline():
            go.zero_()
        dist.broadcast(go, 0)
        if not go:
            return
        dist.barrier()
        started = time.monotonic()
        dist.broadcast(state, 0)
        dist.barrier()
        if dist.get_rank() == 0:
            print(time.monotonic() - started, flush=True)


if __name__ == "__main__":
    main()
