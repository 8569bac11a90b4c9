"""Two ranks save tensors of a few bytes into memory, so that the time is that of the metadata."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.state.flatten import flatten_values
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import store_client
from holdfast.training.distributed.store_exchange import StoreClient, StoreExchange
from holdfast_testbed.ports import free_port

TENSORS = 628
SECONDS = 120

Told = dict[str, float]


def saves(rounds: int) -> list[Told]:
    """Return the seconds of Holdfast's save and of DCP's, per round. The ranks are forked from this process, which
    has loaded torch and must not have computed yet."""
    fork = multiprocessing.get_context("fork")
    told = fork.SimpleQueue()
    port = free_port()
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - memory, not a temporary file
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        where = (port, rounds, Path(folder) / "commits", told.put)
        ranks = [fork.Process(target=one_rank, args=(rank, *where), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS)
        ended = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
    if ended != [0, 0]:
        raise SystemExit(f"the ranks that save metadata ended with {ended}")
    return list(told.get())


def one_rank(rank: int, port: int, rounds: int, folder: Path, tell: Callable[[list[Told]], None]) -> None:
    """Run all rounds of one rank; rank 0 reports the results."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("dcp", store), rank=rank, world_size=2)
    client = StoreClient(lambda: store_client("127.0.0.1", port, "ours", 60), CancelToken())
    tensors = {f"layers.{n}.weight": torch.zeros(4) for n in range(TENSORS)}
    flat = flatten_values({"model": tensors})
    arena, planner = Arena(), Planner()
    chance = random.Random(1)  # noqa: S311 - an order, the same on both ranks

    def ours(number: int) -> None:
        name = CheckpointName(step=number, attempt_id=AttemptId(1, 1))
        snapshot = Snapshot(
            name=name, specs=flat.specs, read=flat.read, fill=flat.fill, state={}, data=None, per_rank={}, numerics={}
        )
        exchange = StoreExchange(client, rank=rank, size=2, number=number)
        staged = stage(snapshot, arena, planner, rank=rank, size=2)
        if not commit(FolderStore(folder / "ours"), staged, exchange).committed:
            raise SystemExit("a save failed")

    def theirs(number: int) -> None:
        dcp.save(dict(tensors), checkpoint_id=folder / f"dcp-{number}")

    kept: list[Told] = []
    for number in range(rounds + 1):
        told: Told = {}
        for name, save in chance.sample([("ours", ours), ("dcp", theirs)], 2):
            dist.barrier()
            began = time.perf_counter()
            save(number)
            told[name] = time.perf_counter() - began
        if number:
            kept.append(told)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    if rank == 0:
        tell(kept)
    dist.destroy_process_group()
