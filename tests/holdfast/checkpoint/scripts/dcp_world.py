"""One rank of three: two ranks save through torch.distributed.checkpoint, then all ranks load, then one rank alone.

Two save with cached plans as well, and three try to load while one of them does not see the newest checkpoint.

Usage: `dcp_world.py rank folder`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.folder import catalog

COLUMNS = torch.arange(40.0).reshape(5, 8)


def trained(mesh, *, seed):
    """Return a model and its optimizer after one step, sharded over the mesh if there is one."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer, mesh, *, filled):
    """Return the state to save, or the buffers to load it into."""
    weights, moments = get_state_dict(model, optimizer)
    columns = COLUMNS if filled else torch.zeros_like(COLUMNS)
    row = columns[:1].clone()
    return {
        "model": weights,
        "optimizer": moments,
        "columns": columns if mesh is None else distribute_tensor(columns, mesh, [Shard(1)]),
        "row": row if mesh is None else distribute_tensor(row, mesh, [Shard(0)]),
        "epoch": 3 if filled else 0,
        "note": {"name": "run" if filled else "", "lr": 0.5},
    }


def whole(state):
    """Return every value by its path, with complete tensors."""
    if isinstance(state, dict):
        return {f"{k}/{path}": v for k, one in state.items() for path, v in whole(one).items()}
    if isinstance(state, list):
        return {f"{i}/{path}": v for i, one in enumerate(state) for path, v in whole(one).items()}
    if isinstance(state, DTensor):
        return {"": state.full_tensor().clone()}
    return {"": state.clone() if isinstance(state, torch.Tensor) else state}


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(v, right[k]) if isinstance(v, torch.Tensor) else v == right[k] for k, v in left.items()
    )


def save(mesh, folder):
    state = state_of(*trained(mesh, seed=7), mesh, filled=True)
    group = mesh.get_group()
    dcp.save(state, storage_writer=StorageWriter(folder, step=1), process_group=group)
    dcp.async_save(state, storage_writer=StorageWriter(folder, step=2), process_group=group).result()
    found = whole(state)
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/expected.pt")


def save_with_cached_plans(mesh, folder):
    """Save five times with different values. Each checkpoint must have its own values."""
    rank, group, writer = dist.get_rank(), mesh.get_group(), StorageWriter(folder)
    for step in range(1, 6):
        rows = distribute_tensor(COLUMNS * step, mesh, [Shard(0)])
        state = {"rows": rows, f"own{rank}": COLUMNS + step, "shared": COLUMNS - step, "step": step}
        if step == 5:
            state["late"] = torch.ones(rank + 1)  # plans change
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        how = {"planner": planner, "process_group": group, "checkpoint_id": f"step-{step}", "storage_writer": writer}
        if step == 3:
            dcp.async_save(state, **how).result()
        else:
            dcp.save(state, **how)


def load_unlike(folder):
    """The second rank does not find the newest checkpoint, so that no rank loads any."""
    found = catalog.list_commits
    if dist.get_rank() == 1:
        catalog.list_commits = lambda root: [name for name in found(root) if name.step == 1]
    state = {"row": torch.zeros(1, 8)}
    try:
        dcp.load(state, storage_reader=StorageReader(folder))
        print("loaded")
    except CheckpointException as error:
        print("refused:", error, "untouched" if not state["row"].any() else "touched")
    catalog.list_commits = found
    try:
        dcp.load(state, storage_reader=StorageReader(folder), no_dist=True)
        print("loaded")
    except CheckpointException as error:
        print("alone:", error, "untouched" if not state["row"].any() else "touched")


def load(mesh, folder):
    model, optimizer = trained(mesh, seed=8)
    state = state_of(model, optimizer, mesh, filled=False)
    dcp.load(state, storage_reader=StorageReader(folder, step=None if mesh else 2), no_dist=mesh is None)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = whole(
        state_of(model, optimizer, mesh, filled=False) | {k: state[k] for k in ("columns", "row", "epoch", "note")}
    )
    assert same(found, torch.load(f"{folder}/expected.pt", weights_only=True)), found


def main():
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    if rank < 2:
        save(two, folder)
        save_with_cached_plans(two, f"{folder}/cached")
    dist.barrier()
    load_unlike(folder)
    load(three, folder)
    dist.barrier()
    if rank == 0:
        load(None, folder)
        print("the same at two, three and one")
    dist.barrier()
    dist.destroy_process_group()


main()
# In rare cases, an interpreter is aborted at exit (SIGABRT), probably by threads of gloo that still hold tensors
# (pytorch#179291).
sys.stdout.flush()
os._exit(0)
