"""Fit a line through points, slowly enough for faults. Once, at step 60, the environment sets what rank 1 does:

`ASLEEP`: it falls asleep. `STRAYS`: it has just killed rank 0, so that its attempt is over. `MISMATCH`: it waits for
data that rank 0 never sends. `SWALLOWS`: it passes an invalid loss to `job.step`, and catches the exception.
`RAISES`: every rank raises, and the disk takes longer than launchers wait for ranks that leave. With `LOADS_SLOWLY`,
ranks that receive a state take long to load it; with `LOADS_LATE`, until there is a file `load`. While there is a
file `hold-saves`, no save ends. With `COMPARES=0`, ranks do not compare their replicas: that reads the state as a
save does.
"""

import contextlib
import os
import pathlib
import signal
import time

import torch

import holdfast
from holdfast.checkpoint import manager
from holdfast.core.errors import PeerLostError
from holdfast.training.step.stepper import Stepper

folder = pathlib.Path(os.environ["TEST_DIR"])
once = folder / "once"
groups, attach = [], Stepper.attach


def remember(stepper, group, *arguments, **more) -> None:
    groups.append(group)
    attach(stepper, group, *arguments, **more)


Stepper.attach = remember


def hurt() -> None:
    once.write_text(str(time.time()))
    if os.environ.get("MISMATCH"):
        with job.phase("vote"), contextlib.suppress(PeerLostError):
            groups[-1].receive_(torch.empty(1), frm=0, tag=77)
    if os.environ.get("STRAYS"):
        os.kill(int((folder / "pid-0").read_text()), signal.SIGKILL)
    if os.environ.get("ASLEEP") or os.environ.get("STRAYS"):
        time.sleep(3600)


class Line(torch.nn.Linear):
    trains = False

    def state_dict(self, *args, **options):
        while self.trains and (folder / "hold-saves").exists():
            (folder / "held").touch()
            time.sleep(0.01)
        return super().state_dict(*args, **options)

    def load_state_dict(self, *args, **options):
        time.sleep(float(os.environ.get("LOADS_SLOWLY", "0")))
        while "LOADS_LATE" in os.environ and not (folder / "load").exists():
            time.sleep(0.01)
        return super().load_state_dict(*args, **options)


def fail() -> None:
    mark = folder / f"raised-{job.rank}"
    if not mark.exists():
        mark.write_text("")
        commit = manager.commit
        # Slow enough that the other ranks raise meanwhile.
        manager.commit = lambda *arguments, **more: (time.sleep(3), commit(*arguments, **more))[1]
        raise ValueError("a bad batch")


torch.set_num_threads(1)
torch.manual_seed(0)
job = holdfast.init(guards=holdfast.Guards(replica_check_steps=int(os.environ.get("COMPARES", "200"))))
model = Line(1, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
(folder / f"pid-{job.rank}").write_text(str(os.getpid()))
points = [torch.tensor([x / 16.0, 3 * x / 16.0 + 1]) for x in range(64)]
hurts = bool({"ASLEEP", "STRAYS", "MISMATCH"} & set(os.environ))
for batch in job.batches(points, global_batch_size=12, micro_batch_size=4, max_steps=100_000, seed=0):
    if hurts and job.rank == 1 and job.committed_step == 60 and not once.exists():
        hurt()
    if "RAISES" in os.environ and job.committed_step == 60:
        fail()
    squares = (model(batch[:, :1]) - batch[:, 1:]) ** 2
    if "SWALLOWS" in os.environ and job.rank == 1 and job.committed_step == 60 and not once.exists():
        once.write_text(str(time.time()))
        with contextlib.suppress(holdfast.UsageError):
            job.step(squares)
        continue
    result = job.step(squares.mean())
    model.trains = True
    time.sleep(0.01)
