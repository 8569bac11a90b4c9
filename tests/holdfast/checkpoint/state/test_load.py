"""Each kind of state is restored to the bit, also on the meta device and into shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from live_states import Tied, Values, net, same, state_of, train

from holdfast import StateError, checkpoint
from holdfast.checkpoint.state.dtensor import local
from holdfast.checkpoint.state.flatten import flatten
from holdfast.checkpoint.state.load import load_into
from holdfast.telemetry.activity import Meter
from holdfast.training.distributed.fsdp import Sharding


def whole(seed: int) -> dict[str, Any]:
    """The complete state of a training run in bfloat16 with an average of the weights."""
    model = net(torch.bfloat16, seed)
    optimizer = WithMasters(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(1))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50),
        "scaler": scaler,
        "ema": average,
        "data": Values({"epoch": seed, "tokens": 10**12 + seed, "sampler": [seed, (seed, 2.5)]}),
    }


class WithMasters(torch.optim.Optimizer):
    """SGD on fp32 masters of bf16 weights, with a moment in fp32."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"master": parameter.detach().float(), "nested": {"moment": torch.zeros(3)}, "t": 0}
                state["master"] -= group["lr"] * parameter.grad.float()
                state["nested"]["moment"] += 1 / 3
                state["t"] += 1
                parameter.data.copy_(state["master"])


def test_everything_that_a_run_has_comes_back_to_the_bit(tmp_path: Path) -> None:
    one, other = whole(1), whole(2)
    for objects, steps in ((one, 4), (other, 1)):
        for _ in range(steps):
            train(objects["model"], objects["optimizer"], 1)
            objects["scheduler"].step()
            objects["ema"].update_parameters(objects["model"])
    one["scaler"].update(3.0)
    checkpoint.save(tmp_path, step=4, **one)

    checkpoint.load(tmp_path, **other)

    for name in one:
        assert same(other[name].state_dict(), one[name].state_dict()), name
    masters = [entry["master"] for entry in other["optimizer"].state.values()]
    assert {master.dtype for master in masters} == {torch.float32}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)


def scheduled() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    ]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3]),
    }


def test_a_schedule_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """MultiStepLR keeps its milestones in a Counter and reads its elements only at the milestone."""

    def rates(objects: dict[str, Any], steps: int) -> list[float]:
        made = []
        for _ in range(steps):
            train(objects["model"], objects["optimizer"], 1)
            objects["scheduler"].step()
            made += objects["scheduler"].get_last_lr()
        return made

    undisturbed, resumed = scheduled(), scheduled()
    rates(undisturbed, 2)
    checkpoint.save(tmp_path, step=2, **undisturbed)
    expected = rates(undisturbed, 6)
    checkpoint.load(tmp_path, **resumed)
    assert rates(resumed, 6) == expected
    assert sorted(set(expected)) == pytest.approx([0.001, 0.01, 0.1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, based on epochs and on a schedule without a step
def test_a_schedule_may_be_set_to_an_epoch_after_a_load(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    checkpoint.save(tmp_path, step=1, scheduler=scheduler)
    checkpoint.load(tmp_path, scheduler=scheduler)
    scheduler.step(3)
    assert scheduler.get_last_lr() == [0.1]


def test_what_was_one_tensor_under_two_names_stays_one(tmp_path: Path) -> None:
    shared = torch.randn(3)
    checkpoint.save(tmp_path, step=1, box=Values({"a": shared, "b": [shared], "c": shared.clone()}))
    box = Values(None)
    checkpoint.load(tmp_path, box=box)
    assert box.state["a"] is box.state["b"][0]
    assert box.state["c"] is not box.state["a"]


def test_meta_model_gets_memory_stays_tied_keeps_its_optimizer(tmp_path: Path) -> None:
    model = Tied()
    checkpoint.save(tmp_path, step=1, model=model)
    with torch.device("meta"):
        other = Tied()
    optimizer = torch.optim.SGD(other.parameters())
    other.norm.to_empty(device="cpu").reset_parameters()
    kept = other.norm.weight

    checkpoint.load(tmp_path, model=other)

    assert other.norm.weight is kept
    assert other.head.weight is other.embed.weight is optimizer.param_groups[0]["params"][0]
    assert other.embed.weight.device.type == "cpu"
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_of_tied_weights_one_name_is_enough(tmp_path: Path, device: str, kept: str) -> None:
    model = Tied()
    state = model.state_dict()
    given = {name: state[name] for name in state if name == kept or name.startswith("norm")}
    checkpoint.save(tmp_path, step=1, model=Values(given))
    with torch.device(device):
        other = Tied()
    checkpoint.load(tmp_path, model=other)
    assert other.head.weight is other.embed.weight
    assert same(dict(other.state_dict()), dict(state))


def test_two_saved_tensors_do_not_become_one_tied_tensor(tmp_path: Path) -> None:
    """Otherwise, one of them would be lost."""
    apart, live = Tied(), Tied()
    apart.head.weight = torch.nn.Parameter(torch.ones(7, 3))
    checkpoint.save(tmp_path, step=1, model=apart)
    before = state_of({"model": live})
    with pytest.raises(StateError, match=r"one tensor here, but several .* \(1\): embed\.weight and head\.weight"):
        checkpoint.load(tmp_path, model=live)
    assert same(state_of({"model": live}), before)
    apart.head.weight = torch.nn.Parameter(apart.embed.weight.detach().clone())
    checkpoint.save(tmp_path, step=2, model=apart)
    checkpoint.load(tmp_path, model=live)
    assert torch.equal(live.head.weight, apart.embed.weight)


def test_of_weights_that_are_not_tied_each_name_is_needed(tmp_path: Path) -> None:
    model = Tied()
    checkpoint.save(tmp_path, step=1, model=Values({n: v for n, v in model.state_dict().items() if n[0] != "h"}))
    model.head.weight = torch.nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(StateError, match=r"missing in the checkpoint \(1\): head\.weight"):
        checkpoint.load(tmp_path, model=model)


def test_tensor_left_on_meta_is_named_and_nothing_gets_memory(tmp_path: Path) -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(2, 2)
            self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    checkpoint.save(tmp_path, step=1, model=Rotary())
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(StateError, match=r"on the meta device, but not in the checkpoint \(1\): frequencies"):
        checkpoint.load(tmp_path, model=model)
    assert model.out.weight.is_meta


# Sharded by torch


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process is rank 1 of 2 without a second process, which suffices to shard, but not to gather."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_whole_commit_loads_into_shards(tmp_path: Path, second_of_two: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = net(seed=9)
    fully_shard(other, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    its = torch.optim.AdamW(other.parameters())

    checkpoint.load(tmp_path, step=1, model=other, optimizer=its)

    for (name, whole), part in zip(model.named_parameters(), other.parameters(), strict=True):
        rows = whole.chunk(2)[1] if len(whole) > 1 else whole[:0]
        assert torch.equal(part.to_local(), rows), name  # type: ignore[attr-defined]
        moments = its.state[part]["exp_avg"]
        assert moments.placements == part.placements  # type: ignore[attr-defined]
        assert torch.equal(moments.to_local(), optimizer.state[whole]["exp_avg"][4 if len(whole) > 1 else 1 :])
    with pytest.raises(StateError, match=r"has parts on other ranks: pass their group to save"):
        checkpoint.save(tmp_path, step=2, model=other)


def test_a_whole_commit_loads_into_a_jobs_shards() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    flat = flatten({"model": model, "optimizer": optimizer})
    other, sharding = net(seed=9), Sharding(2, torch.device("cpu"), Meter())
    sharding.add(other, {})
    its = torch.optim.AdamW(other.parameters())
    tensors = {name: tensor.clone() for name, tensor in flat.tensors.items()}

    load_into(
        {"model": other, "optimizer": its},
        flat.tree,
        tensors.__getitem__,
        sharding.part,
        on_meta=lambda name: tensors[name].to("meta"),
    )

    for whole, part in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(part), whole.chunk(2)[0])
        assert torch.equal(local(its.state[part]["exp_avg"]), optimizer.state[whole]["exp_avg"].chunk(2)[0])
