"""One of two ranks that save tensors of a few bytes into memory: what is left is the metadata.

Started by `checkpoint.py`. Rank 0 prints, a line each, seconds of Holdfast's save and of DCP's.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.planning import Planner
from holdfast.checkpoint.state import flatten_values
from holdfast.checkpoint.writer import Snapshot, commit, stage
from holdfast.collectives import Over, store_client
from holdfast.exchanging import StoreClient, StoreExchange
from holdfast.worlds import Pair

TENSORS = 628


def main() -> None:
    """All rounds."""
    rank, port, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("dcp", store), rank=rank, world_size=2)
    client = StoreClient(lambda: store_client("127.0.0.1", port, "ours", 60), Over())
    tensors = {f"layers.{n}.weight": torch.zeros(4) for n in range(TENSORS)}
    flat = flatten_values({"model": tensors})
    arena, planner = Arena(), Planner()
    chance = random.Random(1)  # noqa: S311 - an order, the same on both ranks

    def ours(number: int) -> None:
        name = CommitName(step=number, pair=Pair(1, 1))
        snapshot = Snapshot(
            name=name, specs=flat.specs, read=flat.read, fill=flat.fill, state={}, data=None, alone={}, numerics={}
        )
        exchange = StoreExchange(client, rank=rank, size=2, number=number)
        staged = stage(snapshot, arena, planner, rank=rank, size=2)
        if not commit(folder / "ours", staged, exchange).committed:
            raise SystemExit("a save failed")

    def theirs(number: int) -> None:
        dcp.save(dict(tensors), checkpoint_id=folder / f"dcp-{number}")

    for number in range(rounds + 1):
        told = {}
        for name, save in chance.sample([("ours", ours), ("dcp", theirs)], 2):
            dist.barrier()
            began = time.perf_counter()
            save(number)
            told[name] = time.perf_counter() - began
        if number and rank == 0:
            print(json.dumps(told), flush=True)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
