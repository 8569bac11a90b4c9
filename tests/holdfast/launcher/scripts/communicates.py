"""A model that averages over the ranks in its forward pass. At step 20, rank 1 kills itself once while rank 0
waits."""

import os
import pathlib
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast

folder = pathlib.Path(os.environ["TEST_DIR"])
once = folder / "once"
torch.set_num_threads(1)
torch.manual_seed(0)
job = holdfast.init()
groups: dict[tuple[int, int], dist.ProcessGroupGloo] = {}


def total(tensor: torch.Tensor) -> torch.Tensor:
    attempt_id = (job.generation, job.attempt)
    if attempt_id not in groups:
        groups.clear()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(f"forward/{attempt_id}", dist.TCPStore(host, port, is_master=False))
        groups[attempt_id] = dist.ProcessGroupGloo(store, job.rank, job.world_size, timedelta(seconds=60))
    if job.rank == 1 and job.committed_step == 20 and not once.exists():
        once.touch()
        time.sleep(0.3)  # for the other ranks, which then wait in the collective
        os.kill(os.getpid(), signal.SIGKILL)
    summed = tensor.detach().clone()
    try:
        groups[attempt_id].allreduce([summed]).wait()
    except RuntimeError as error:
        (folder / f"broken-{os.getpid()}").write_text(str(error))
        raise
    return summed


class Centred(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 0.01 * total(x.mean()) / job.world_size


def tell(result: holdfast.StepResult) -> None:
    with (folder / f"results-{os.getpid()}").open("a") as out:
        out.write(f"{result.reason} {result.step}\n")


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch[:, :1]) - batch[:, 1:]).square().mean()


model = Centred(1, 1)
holdfast.Trainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
    loss=loss,
    dataset=[torch.tensor([x / 16.0, 3 * x / 16.0 + 1]) for x in range(64)],
    global_batch_size=12,
    micro_batch_size=4,
    max_steps=40,
    on_step=tell,
    job=job,
).fit()
assert job.audit().ok
