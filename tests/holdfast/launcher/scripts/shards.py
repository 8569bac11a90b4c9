"""Train a model that is sharded over all ranks without replicas, in addition to weights that never change.

Each rank writes JSON lines to `TEST_DIR/states-PID`: the state that it `applied` with a step, the step for which
`job.step` has `returned`, and the state that it `found` when it entered a world. States are digests of all their
bits.
"""

import hashlib
import json
import os
import pathlib
import time

import torch

import holdfast

story = (pathlib.Path(os.environ["TEST_DIR"]) / f"states-{os.getpid()}").open("a")


class Frozen:
    def __init__(self):
        self.weights = torch.randn(512, 256)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights.copy_(state["weights"])


def bits(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().contiguous().numpy().tobytes()


def digest():
    whole = hashlib.sha256(bits(frozen.weights))
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for value in (parameter, *(state[name] for name in sorted(state))):
            whole.update(bits(value))
    return whole.hexdigest()


def note(kind, **more):
    attempt_id = (job.generation, job.attempt)
    line = {"kind": kind, "pair": attempt_id, "step": job.committed_step, "shard": job.shard, "pid": os.getpid()}
    story.write(json.dumps(line | more) + "\n")
    story.flush()


torch.set_num_threads(1)
torch.manual_seed(0)
job = holdfast.init()
size = job.world_size
frozen = Frozen()
model = torch.nn.Sequential(torch.nn.Linear(3, 37), torch.nn.Tanh(), torch.nn.Linear(37, 1))
for layer in (model[0], model[2]):
    job.fully_shard(layer, size=size)
job.fully_shard(model, size=size)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer.register_step_post_hook(lambda *_: note("applied", digest=digest()))
job.on_membership(lambda _: note("found", digest=digest()))
job.manage(model=model, optimizer=optimizer, frozen=frozen)
points = [torch.tensor([x / 8.0, x / 4.0 - 1, 1.0, x / 2.0]) for x in range(64)]
for batch in job.batches(points, global_batch_size=8, micro_batch_size=2, max_steps=100_000, seed=0):
    result = job.step(((model(batch[:, :3]) - batch[:, 3:]) ** 2).mean())
    if result.committed:
        note("returned")
    time.sleep(0.02)
