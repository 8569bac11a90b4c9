"""One of four ranks: DTensors sharded along any dimensions of any meshes, and pipeline stages, saved by one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast import StateError, checkpoint


def feed_forward(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5))


def in_two_dimensions(net: torch.nn.Sequential, mesh: DeviceMesh) -> torch.nn.Sequential:
    """Apply tensor parallelism, and FSDP2 over it."""
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"]).set_force_sum_reduction_for_comms(True)  # gloo does not support the mean
    return net


def trained(net: torch.nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return optimizer


def whole(thing: object) -> object:
    return thing.full_tensor() if isinstance(thing, DTensor) else thing


def tensors(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    """Return all tensors of a state, complete. Every rank must call it."""
    yield from ((name, whole(one)) for name, one in net.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        yield from ((f"{number}.{name}", whole(one)) for name, one in sorted(state.items()))


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert isinstance(value, torch.Tensor)
        assert torch.equal(value, other[name]), name  # type: ignore[arg-type]


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except StateError as error:
        return str(error)
    return ""


def tensor_parallel(folder: Path, group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = in_two_dimensions(feed_forward(1), mesh)
    optimizer = trained(net)
    saved = dict(tensors(net, optimizer))
    if RANK == 0:
        torch.save(saved, folder / "whole.pt")
    checkpoint.save(folder / "tier", step=1, group=group, model=net, optimizer=optimizer)

    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    other = in_two_dimensions(feed_forward(2), turned)
    its = trained(other, 1)
    checkpoint.load(folder / "tier", group=group, model=other, optimizer=its)
    assert_same(dict(tensors(other, its)), saved)

    rows = fully_shard(feed_forward(3), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("data",)))
    its = torch.optim.AdamW(rows.parameters(), foreach=False)
    checkpoint.load(folder / "tier", group=group, model=rows, optimizer=its)
    assert_same(dict(tensors(rows, its)), saved)
    checkpoint.save(folder / "again", step=1, group=group, model=rows, optimizer=its)
    plain = feed_forward(4)
    its = torch.optim.AdamW(plain.parameters(), foreach=False)
    checkpoint.load(folder / "again", step=1, model=plain, optimizer=its)
    assert_same(dict(tensors(plain, its)), saved)


def odd_cuts(folder: Path, group: dist.ProcessGroup) -> None:
    """Uneven and empty shards on meshes of several shapes, in addition to scalars and replicated tensors."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("up", "across"))

    def made(value: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        def cut(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Placement) -> torch.Tensor:
            return distribute_tensor(value(*shape), mesh, placements)

        return {
            "columns": cut((3, 7), line, Shard(1)),
            "few columns": cut((5, 2), line, Shard(1)),
            "few rows": cut((3, 2), line, Shard(0)),
            "both": cut((5, 3, 2), square, Shard(0), Shard(1)),
            "twice": cut((9, 2), square, Shard(0), Shard(0)),
            "once": cut((4, 6), square, Replicate(), Shard(1)),
            "bytes": distribute_tensor(value(4, 3).to(torch.uint8), square, [Shard(1), Shard(0)]),
            "plain": value(3, 3),
            "one": value(),
            "none": value(0, 4),
            "none of many": cut((0, 4), line, Shard(0)),
        }

    torch.manual_seed(5)
    state = made(lambda *shape: torch.randn(shape) * 9)
    box = torch.nn.Module()
    for name, one in state.items():
        box.register_buffer(name.replace(" ", "_"), one)
    checkpoint.save(folder / "odd", step=1, group=group, box=box)
    other = torch.nn.Module()
    for name, one in made(lambda *shape: torch.zeros(shape)).items():
        other.register_buffer(name.replace(" ", "_"), one)
    checkpoint.load(folder / "odd", group=group, box=other)
    for name, one in other.named_buffers():
        assert torch.equal(whole(one), whole(box.get_buffer(name))), name  # type: ignore[arg-type]
    everything = {name: whole(one) for name, one in box.named_buffers()}
    if RANK == 0:
        torch.save(everything, folder / "odd.pt")


class Tied(torch.nn.Module):
    """Five rows over four ranks: the last rank has no row of the tied weights, or of those that only look tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.other = torch.nn.Embedding(5, 4), torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def tied(folder: Path, group: dist.ProcessGroup) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    model, again = Tied(1), Tied(2)
    for one in (model, again):
        fully_shard(one, mesh=line)
    checkpoint.save(folder / "tied", step=1, group=group, model=model)
    checkpoint.load(folder / "tied", group=group, model=again)
    saved = {name: whole(one) for name, one in model.state_dict().items()}
    assert_same({name: whole(one) for name, one in again.state_dict().items()}, saved)
    if RANK == 0:
        torch.save(saved, folder / "tied.pt")


def stages(folder: Path, group: dist.ProcessGroup) -> None:
    """Two stages on two ranks each, and each stage with an optimizer."""
    stage = RANK // 2
    net = torch.nn.Linear(4, 4 + stage)
    torch.manual_seed(7 + stage)
    torch.nn.init.normal_(net.weight)
    own = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    own.step()
    mine = {f"stage{stage}": net, f"optimizer{stage}": own}
    checkpoint.save(folder / "stages", step=1, group=group, **mine)
    other = torch.nn.Linear(4, 4 + stage)
    its = torch.optim.AdamW(other.parameters())
    checkpoint.load(folder / "stages", group=group, **{f"stage{stage}": other, f"optimizer{stage}": its})
    assert_same(dict(tensors(other, its)), dict(tensors(net, own)))
    swapped = torch.nn.Linear(4, 5 - stage)
    checkpoint.load(folder / "stages", group=group, **{f"stage{1 - stage}": swapped})

    told = refusal(lambda: checkpoint.save(folder / "bad", step=1, group=group, model=net))
    assert "model/weight is F32 of shape (5, 4) on rank 2, and F32 of shape (4, 4) on other ranks" in told, told
    apart = net if stage else torch.nn.Sequential(net)
    told = refusal(lambda: checkpoint.save(folder / "bad", step=1, group=group, model=apart))
    assert "model has other tensors on rank 2 than on rank 0" in told, told


def sums(folder: Path, group: dist.ProcessGroup) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    box = torch.nn.Module()
    box.register_buffer("sum", DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False))
    told = refusal(lambda: checkpoint.save(folder / "bad", step=2, group=group, box=box))
    assert "box/sum is placed as" in told, told
    assert "full_tensor()" in told, told


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 4), rank=RANK, world_size=4)
    group = dist.group.WORLD
    assert group is not None
    for part in (tensor_parallel, odd_cuts, tied, stages, sums):
        part(folder, group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    main(Path(sys.argv[1]))
    # In rare cases, an interpreter is aborted at exit (SIGABRT), probably by threads of gloo that still hold tensors
    # (pytorch#179291).
    os._exit(0)
