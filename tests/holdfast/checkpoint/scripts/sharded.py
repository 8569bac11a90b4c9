"""One of four ranks: FSDP2 over a mesh of two replicas of two ranks, saved together and loaded in other layouts."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.core.errors import UsageError


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


def shard(net: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    sharded = fully_shard(net, mesh=mesh)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo does not support the mean
    return sharded


def whole(thing: torch.Tensor) -> torch.Tensor:
    return thing.full_tensor() if hasattr(thing, "full_tensor") else thing


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(whole(a), whole(b)) for a, b in pairs)


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=RANK, world_size=4)
    group = dist.group.WORLD
    assert group is not None
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    net, tier = shard(model(1), replicated), folder / "tier"
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    torch.manual_seed(100 + RANK)
    checkpoint.save(tier, step=3, group=group, model=net, optimizer=optimizer)
    drawn = torch.rand(1)

    wider = shard(model(2), init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    its = torch.optim.AdamW(wider.parameters())
    checkpoint.load(tier, group=group, model=wider, optimizer=its)
    assert torch.equal(torch.rand(1), drawn), "this rank's own generator goes on"
    assert same(wider, net)
    train(net, optimizer, 2)
    train(wider, its, 2)
    assert same(wider, net), "moments came back too"

    bare = model(3)
    kept = copy.deepcopy(bare.state_dict())
    try:
        checkpoint.load(tier, model=bare)
        raise AssertionError("each rank looked for the newest checkpoint by itself")
    except UsageError:
        assert all(torch.equal(one, kept[name]) for name, one in bare.state_dict().items())
    checkpoint.load(tier, step=3, model=bare, optimizer=torch.optim.AdamW(bare.parameters()))
    again = shard(model(4), replicated)
    checkpoint.load(tier, group=group, model=again, optimizer=torch.optim.AdamW(again.parameters()))
    assert same(again, bare)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    main(Path(sys.argv[1]))
    # In rare cases, an interpreter is aborted at exit (SIGABRT), probably by threads of gloo that still hold tensors
    # (pytorch#179291).
    os._exit(0)
