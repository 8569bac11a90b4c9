"""The usual way: torchrun, DDP, and a checkpoint after every step (`BENCH_EVERY`)."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import Trace, batch, loss_of, prepare


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, optimizer = prepare()
    file = Path(os.environ["BENCH_FOLDER"]) / "checkpoint"
    step = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(plain)
    trace = Trace(rank)
    every, tag = int(os.environ["BENCH_EVERY"]), f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{world}"
    while step < int(os.environ["BENCH_STEPS"]):
        trace.begin()
        optimizer.zero_grad()
        loss_of(model, batch(step, rank, world)).backward()
        optimizer.step()
        step += 1
        trace.made(step, tag)
        if rank == 0 and step % every == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            beside = file.with_suffix(".new")
            torch.save(state, beside)
            beside.rename(file)


if __name__ == "__main__":
    main()
