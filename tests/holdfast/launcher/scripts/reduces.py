"""A typical script for torchrun."""

import os
import pathlib

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
folder = pathlib.Path(os.environ["TEST_DIR"])
(folder / f"sum-{dist.get_rank()}").write_text(f"{total.item():.0f} of {dist.get_world_size()}")
dist.destroy_process_group()
