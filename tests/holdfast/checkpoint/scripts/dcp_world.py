"""One rank of a world that saves or loads through torch.distributed.checkpoint: `dcp_world.py save|load folder`."""

import sys

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.checkpoint.dcp import StorageReader, StorageWriter


def model_and_optimizer():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state):
    """Every tensor gathered, by its path."""
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


def columns(mesh, fill):
    whole_one = torch.arange(5 * 8, dtype=torch.float32).reshape(5, 8) if fill else torch.zeros(5, 8)
    return distribute_tensor(whole_one, mesh, [Shard(1)])


def main():
    verb, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    if verb == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    mine = {"model": weights, "optimizer": moments, "columns": columns(mesh, verb == "save")}
    mine |= {"epoch": 3 if verb == "save" else 0, "note": {"name": "run" if verb == "save" else "", "lr": 0.5}}
    if verb == "save":
        dcp.save(mine, storage_writer=StorageWriter(folder, step=1))
        dcp.async_save(mine, storage_writer=StorageWriter(folder, step=2)).result()
    else:
        dcp.load(mine, storage_reader=StorageReader(folder))
        set_state_dict(model, optimizer, model_state_dict=mine["model"], optim_state_dict=mine["optimizer"])
        assert (mine["epoch"], mine["note"]) == (3, {"name": "run", "lr": 0.5}), mine
        assert torch.equal(mine["columns"].full_tensor(), torch.arange(40.0).reshape(5, 8)), mine["columns"]
    found = whole({"model": mine["model"], "optimizer": mine["optimizer"]})
    if dist.get_rank() == 0:
        if verb == "save":
            torch.save(found, f"{folder}/expected.pt")
        else:
            assert same(found, torch.load(f"{folder}/expected.pt", weights_only=True)), found
            print("same")
    dist.destroy_process_group()


main()
