"""A script that knows nothing of Holdfast: DistributedDataParallel under torchrun, with a checkpoint of its own."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent
SAVED, DONE = FOLDER / "saved.pt", FOLDER / "done"


def main() -> None:
    """Train until somebody says that it is enough; note each step with who made it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if SAVED.exists():
        saved = torch.load(SAVED, weights_only=True)
        step = saved["step"]
        model.module.load_state_dict(saved["model"])
    enough = torch.zeros(1)
    while not enough:
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            save(model.module, step)
            enough.fill_(DONE.exists())
        dist.broadcast(enough, 0)
        time.sleep(0.05)
    dist.destroy_process_group()


def save(model: torch.nn.Module, step: int) -> None:
    """The state, then a line about it."""
    torch.save({"step": step, "model": model.state_dict()}, SAVED.with_suffix(".tmp"))
    SAVED.with_suffix(".tmp").rename(SAVED)
    with (FOLDER / "steps").open("a") as notes:
        notes.write(f"{os.environ['TORCHELASTIC_RUN_ID']} {step} {dist.get_world_size()}\n")


if __name__ == "__main__":
    main()
