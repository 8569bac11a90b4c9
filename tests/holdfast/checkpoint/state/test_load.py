"""Each kind of state comes back to the bit, whatever it was wrapped in; what does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

from holdfast import CheckpointError, StateError, checkpoint
from holdfast.checkpoint.state.dtensor import local
from holdfast.checkpoint.state.flatten import check_savable, flatten
from holdfast.checkpoint.state.load import load_into
from holdfast.checkpoint.state.optimizer_state import foreseen
from holdfast.telemetry.activity import Meter
from holdfast.training.distributed.fsdp import Sharding
from holdfast.training.step.train_state import _Side

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.BatchNorm1d(8)), torch.nn.Linear(8, 1)
    ).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Bit by bit, dtypes and types included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, for DistributedDataParallel."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager")


def compiled_within(model: torch.nn.Module) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Sequential)
    model[1] = torch.compile(model[1], backend="eager")
    return model


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def all_of_them(model: torch.nn.Module) -> torch.nn.Module:
    return ddp(compiled(compiled_within(model)))


def recomputed(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert isinstance(model, torch.nn.Sequential)
    model[2] = checkpoint_wrapper(model[2])
    return model


def compiled_last(model: torch.nn.Module) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Sequential)
    model[2] = torch.compile(model[2], backend="eager")
    return model


def compiled_within_recomputed(model: torch.nn.Module) -> torch.nn.Module:
    return ddp(compiled(recomputed(compiled_last(model))))


def recomputed_within_compiled(model: torch.nn.Module) -> torch.nn.Module:
    return compiled_last(recomputed(model))


def bare(model: torch.nn.Module) -> torch.nn.Module:
    return model


def test_averages_of_a_compiled_model_load_into_those_of_a_bare_one(tmp_path: Path) -> None:
    averages, other = AveragedModel(compiled(net())), AveragedModel(net(seed=9))
    averages.update_parameters(net(seed=3))
    checkpoint.save(tmp_path, step=1, ema=averages)
    checkpoint.load(tmp_path, ema=other)
    assert int(other.n_averaged) == 1
    for one, same in zip(averages.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        compiled_within,
        ddp,
        all_of_them,
        recomputed,
        compiled_within_recomputed,
        recomputed_within_compiled,
    ],
)
def test_wrappers_leave_no_word_in_the_names_and_a_commit_loads_with_and_without_them(
    tmp_path: Path, wrap: Wrap
) -> None:
    for writes, reads in ((wrap, bare), (bare, wrap), (wrap, wrap)):
        folder = tmp_path / f"{writes.__name__}-{reads.__name__}"
        model, other = writes(net()), reads(net(seed=9))
        optimizer, its = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
        train(model, optimizer)
        commit = checkpoint.save(folder, step=1, model=model, optimizer=optimizer)

        checkpoint.load(folder, model=other, optimizer=its)

        names = [name for name in load_file(commit / "rank-0.safetensors") if name.startswith("model/")]
        assert {name.removeprefix("model/") for name in names} == set(net().state_dict())
        assert same(list(other.state_dict().values()), list(model.state_dict().values()))
        assert same(its.state_dict(), optimizer.state_dict())


def test_a_wrapped_model_on_the_meta_device_gets_memory_and_stays_tied(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Flatten(), Tied()))
    with torch.device("meta"):
        other = recomputed(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Flatten(), Tied()))
    checkpoint.load(tmp_path, model=other)
    assert not any(one.is_meta for one in other.parameters())


def normed(model: torch.nn.Module) -> torch.nn.Module:
    assert isinstance(model, torch.nn.Sequential)
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


def averaged(model: torch.nn.Module) -> torch.nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("own", [normed, averaged])
def test_a_wrapper_inside_of_what_changes_the_names_itself_leaves_no_word(tmp_path: Path, own: Wrap) -> None:
    model, other = own(compiled_within(net())), own(net(seed=9))
    checkpoint.save(tmp_path / "wrapped", step=1, model=model)
    checkpoint.load(tmp_path / "wrapped", model=other)
    assert same(list(other.state_dict().values()), list(model.state_dict().values()))
    checkpoint.save(tmp_path / "bare", step=1, model=other)
    checkpoint.load(tmp_path / "bare", model=own(compiled_within(net(seed=7))))


def test_a_part_of_the_scripts_own_may_be_called_like_a_wrapper(tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)
            self._orig_mod = torch.nn.Linear(2, 2)

    model, other = Own(), Own()
    commit = checkpoint.save(tmp_path, step=1, model=model)
    checkpoint.load(tmp_path, model=other)
    names = {name.removeprefix("model/") for name in load_file(commit / "rank-0.safetensors")}
    assert names == set(model.state_dict())
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class Values:
    """A user's object."""

    def __init__(self, state: Any, refuses: BaseException | None = None) -> None:
        self.state = state
        self.refuses = refuses

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.refuses:
            raise self.refuses


def whole(seed: int) -> dict[str, Any]:
    """Everything that a training run has, in bfloat16 with an average of the weights."""
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
    """SGD on fp32 masters of bf16 weights, and a moment in fp32."""

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
    """MultiStepLR keeps its milestones in a Counter and asks for its elements only when its turn comes."""

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


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on epochs and on a schedule without a step
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


# Without memory yet


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)


def test_a_model_on_the_meta_device_gets_memory_stays_tied_and_keeps_its_optimizer(tmp_path: Path) -> None:
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
    """One of them would be lost."""
    apart, live = Tied(), Tied()
    apart.head.weight = torch.nn.Parameter(torch.ones(7, 3))
    checkpoint.save(tmp_path, step=1, model=apart)
    before = state_of({"model": live})
    with pytest.raises(StateError, match=r"one tensor here, and several .* \(1\): embed\.weight and head\.weight"):
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


def test_what_would_stay_on_the_meta_device_is_named_and_nothing_gets_memory(tmp_path: Path) -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(2, 2)
            self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    checkpoint.save(tmp_path, step=1, model=Rotary())
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(StateError, match=r"on the meta device, and not in the checkpoint \(1\): frequencies"):
        checkpoint.load(tmp_path, model=model)
    assert model.out.weight.is_meta


# Sharded by torch


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process is rank 1 of 2, of whom the other is nobody: enough to cut, never to gather."""
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
    with pytest.raises(StateError, match=r"has parts on other ranks: give their group to save"):
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
        blank=lambda name: tensors[name].to("meta"),
    )

    for whole, part in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(part), whole.chunk(2)[0])
        assert torch.equal(local(its.state[part]["exp_avg"]), optimizer.state[whole]["exp_avg"].chunk(2)[0])


# What does not fit


def state_of(objects: dict[str, Any]) -> Any:
    return copy.deepcopy({name: thing.state_dict() for name, thing in objects.items()})


def test_another_model_is_told_whole_and_changes_nothing(tmp_path: Path) -> None:
    model = net()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.SGD(model.parameters()), box=Values(1))
    torch.manual_seed(5)
    parts = {"0": torch.nn.Linear(4, 9), "2": torch.nn.Linear(8, 1).double(), "new": torch.nn.Linear(1, 1)}
    other = torch.nn.ModuleDict(parts)
    objects = {"model": other, "optimizer": torch.optim.SGD(other.parameters()), "box": Values(2)}
    before = state_of(objects)

    with pytest.raises(StateError) as refused:
        checkpoint.load(tmp_path, **objects)

    said = str(refused.value)
    assert "model: missing in the checkpoint (2): new.weight, new.bias" in said
    assert "model: unexpected in the checkpoint (5): 1.0.bias, 1.0.num_batches_tracked, 1.0.running_mean" in said
    assert "size mismatch (2): 0.bias (8,) in the checkpoint and (9,) here, 0.weight (8, 4)" in said
    assert "dtype mismatch (2): 2.bias float32 in the checkpoint and float64 here" in said
    assert "optimizer: other parameters in the checkpoint" in said
    assert "build the objects as they were" in said
    assert same(state_of(objects), before)


def test_of_a_thousand_names_ten_are_shown(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.ParameterDict({f"p{i}": torch.zeros(1) for i in range(1000)}))
    with pytest.raises(StateError, match=r"unexpected in the checkpoint \(1000\): .* and 990 more") as refused:
        checkpoint.load(tmp_path, model=torch.nn.Linear(1, 1))
    assert len(str(refused.value)) < 1000


def test_an_optimizer_whose_parameters_are_in_another_order_is_refused(tmp_path: Path) -> None:
    """Torch itself would give each the other's moments."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.Adam(model.parameters()))
    turned = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(StateError, match=r"in another order \(4\): model\.0\.weight where model\.1\.weight is here"):
        checkpoint.load(tmp_path, model=model, optimizer=turned)


def test_an_optimizer_may_be_loaded_without_its_model(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    alone = torch.optim.AdamW(net().parameters())
    checkpoint.load(tmp_path, optimizer=alone)
    assert same(alone.state_dict(), optimizer.state_dict())


def test_a_parameter_without_a_name_is_none_that_has_its_name_elsewhere(tmp_path: Path) -> None:
    model, free = torch.nn.Linear(3, 1, bias=False), torch.nn.Parameter(torch.zeros(1, 3))
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.Adam([model.weight, free]))
    with pytest.raises(StateError, match=r"in another order \(2\): model\.weight where one of no module is here"):
        checkpoint.load(tmp_path, model=model, optimizer=torch.optim.Adam([free, model.weight]))


@pytest.mark.parametrize(
    ("saved", "given", "lacking"),
    [
        (torch.optim.AdamW, torch.optim.SGD, r"SGD, as its groups lack settings \(2\): dampening, momentum"),
        (torch.optim.SGD, torch.optim.AdamW, r"AdamW, as its groups lack settings \(2\): betas, eps"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused(
    tmp_path: Path, saved: Any, given: Any, lacking: str
) -> None:
    """Torch itself takes it, and the next step ends in a KeyError."""
    model = net()
    optimizer = saved(model.parameters(), lr=0.1)
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=Values(optimizer.state_dict()))  # as a file has it
    with pytest.raises(StateError, match=f"optimizer: of another kind than {lacking}"):
        checkpoint.load(tmp_path, model=model, optimizer=given(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ("AdamW", "Adam"),
        ("Adam", "AdamW"),
        ("Adam", "RAdam"),
        ("NAdam", "Adam"),
        ("Adamax", "AdamW"),
        ("Adam", "SGD"),
    ],
)
def test_a_kind_of_optimizer_is_told_by_its_name_where_its_settings_are_alike(
    tmp_path: Path, saved: str, given: str
) -> None:
    """Torch makes an AdamW of an Adam that loads the state of one; of others the next step ends in a KeyError."""
    model = net()
    checkpoint.save(tmp_path, step=1, optimizer=getattr(torch.optim, saved)(model.parameters()))
    other = getattr(torch.optim, given)(model.parameters())
    before = state_of({"optimizer": other})
    with pytest.raises(StateError, match=f"of the kind {saved} in the checkpoint, and of the kind {given} here"):
        checkpoint.load(tmp_path, optimizer=other)
    assert same(state_of({"optimizer": other}), before)


def test_a_kind_of_the_scripts_own_is_that_of_torch_that_it_is_made_of(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = net()
    optimizer, mine = torch.optim.AdamW(model.parameters()), Mine(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, optimizer=optimizer)
    checkpoint.load(tmp_path, optimizer=mine)
    assert same(mine.state_dict(), optimizer.state_dict())


# Settings that the script has changed


def test_settings_that_a_checkpoint_replaces_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(steps: int, decay: float) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        parts = [
            torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
        ]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
        scaler = torch.amp.GradScaler("cpu", growth_interval=steps)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    one = made(6, 0.01)
    for _ in range(3):
        train(one["model"], one["optimizer"], 1)
        one["scheduler"].step()
    checkpoint.save(tmp_path, step=3, **one)
    checkpoint.load(tmp_path, **made(6, 0.01))
    assert "replace" not in caplog.text
    checkpoint.load(tmp_path, **made(12, 0.5))
    assert "optimizer: weight_decay is 0.01 in the checkpoint and 0.5 in the script" in caplog.text
    assert "scheduler[1]: T_max is 6 in the checkpoint and 12 in the script" in caplog.text
    assert "scaler: growth_interval is 6 in the checkpoint and 12 in the script" in caplog.text


def test_a_rate_that_no_scheduler_moves_is_a_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    checkpoint.save(tmp_path, step=1, optimizer=torch.optim.SGD([weight], lr=0.1))
    checkpoint.load(tmp_path, optimizer=torch.optim.SGD([weight], lr=0.2))
    assert "optimizer: lr is 0.1 in the checkpoint and 0.2 in the script" in caplog.text


def test_settings_that_an_earlier_torch_did_not_have_are_filled_in_by_this_one(tmp_path: Path) -> None:
    model = net()
    earlier = torch.optim.AdamW(model.parameters())
    del earlier.param_groups[0]["decoupled_weight_decay"]
    checkpoint.save(tmp_path, step=1, model=model, optimizer=earlier)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    train(model, optimizer)


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_moments_of_another_shape_are_refused(tmp_path: Path, stepped: bool) -> None:
    def adam(rows: int, *, stepped: bool) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.zeros(rows))
        weight.grad = torch.ones(rows)
        optimizer = torch.optim.Adam([weight])
        if stepped:
            optimizer.step()
        return optimizer

    checkpoint.save(tmp_path, step=1, optimizer=adam(3, stepped=True))
    said = r"size mismatch \(2\): exp_avg of parameter 0 \(3,\) in the checkpoint, of a parameter \(7,\) here"
    with pytest.raises(StateError, match=said):
        checkpoint.load(tmp_path, optimizer=adam(7, stepped=stepped))


@pytest.mark.parametrize("made", [torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_moments_that_are_not_like_their_parameter_come_back(tmp_path: Path, made: Any, stepped: bool) -> None:
    def trained(*, stepped: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = made([model[0].bias, model[0].weight], lr=0.01)
        if stepped:
            optimizer.step(lambda: model(torch.ones(2, 4)).sum().backward() or 1.0)
        return model, optimizer

    model, optimizer = trained(stepped=True)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other, again = trained(stepped=stepped)
    checkpoint.load(tmp_path, model=other, optimizer=again)
    assert same(again.state_dict(), optimizer.state_dict())


def test_other_groups_of_parameters_are_refused(tmp_path: Path) -> None:
    model = net()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.Adam(model.parameters()))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    with pytest.raises(StateError, match=r"groups of \[6\] parameters in the checkpoint, and of \[2, 2\] here"):
        checkpoint.load(tmp_path, model=model, optimizer=torch.optim.Adam(groups))


def unread(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} was asked for")


class NotMineError(Exception):
    """Of the script's own."""


@pytest.mark.parametrize("kind", [ValueError, AssertionError, OverflowError, OSError, NotMineError])
def test_an_object_that_refuses_its_state_leaves_all_as_they_were(tmp_path: Path, kind: type[Exception]) -> None:
    checkpoint.save(tmp_path, step=1, a=Values(1), model=net(seed=1), b=Values(1))
    objects = {"a": Values(2), "model": net(seed=2), "b": Values(2, refuses=kind("not mine"))}
    before = state_of(objects)
    with pytest.raises(StateError, match=r"saved state of 'b' does not fit.*not mine"):
        checkpoint.load(tmp_path, **objects)
    assert same(state_of(objects), before)


def test_a_number_that_no_float_holds_is_refused_and_leaves_all_as_they_were(tmp_path: Path) -> None:
    objects = {"a": Values(2), "b": Values(2)}
    with pytest.raises(StateError, match="saved state of 'b' does not fit"):
        load_into(objects, {"a": 1, "b": {"$float": 10**400}}, unread, blank=unread)
    assert [thing.state for thing in objects.values()] == [2, 2]


@pytest.mark.parametrize("error", [MemoryError(), CheckpointError("gone meanwhile")])
def test_what_is_no_refusal_keeps_its_name_and_leaves_all_as_they_were(error: Exception) -> None:
    def gone(name: str) -> torch.Tensor:
        raise error

    objects = {"a": Values(2), "b": Values(2)}
    with pytest.raises(type(error)):
        load_into(objects, {"a": 1, "b": {"$tensor": "b"}}, gone, blank=unread)
    assert [thing.state for thing in objects.values()] == [2, 2]


def test_a_factor_that_no_float_holds_is_refused_before_anything_is_changed() -> None:
    with pytest.raises(StateError, match="counters or its place in the data are none"):
        _Side.read({"ramp": {"begin": 10**400, "target": 1.0, "since": 1}}, None, None)


def test_a_load_that_is_interrupted_is_no_refusal() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_into({"a": Values(2, refuses=KeyboardInterrupt())}, {"a": 1}, unread, blank=unread)


def test_a_module_that_takes_old_names_still_may(tmp_path: Path) -> None:
    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = torch.nn.Linear(2, 2)

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for name in [name for name in state if name.startswith("old.")]:
                state[name.replace("old.", "new.")] = state.pop(name)
            super()._load_from_state_dict(state, prefix, *rest)

    old = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2)})
    checkpoint.save(tmp_path, step=1, model=old)
    model = Renamed()
    checkpoint.load(tmp_path, model=model)
    assert torch.equal(model.new.weight, old["old"].weight)


# What cannot be saved is known before the first step


class Odd(torch.optim.SGD):
    """Its first step puts something into the state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["schedule"] = lambda step: step


def test_what_an_optimizers_first_step_would_put_into_its_state_is_refused_before_it() -> None:
    model = net()
    optimizer = Odd(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before, generator = state_of({"model": model, "optimizer": optimizer}), torch.get_rng_state()
    with pytest.raises(StateError, match=r"optimizer\.state\.0\.schedule is of type function"):
        check_savable({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    assert same(state_of({"model": model, "optimizer": optimizer}), before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD, torch.optim.Muon])
def test_torchs_own_optimizers_are_let_through_untouched(made: Any) -> None:
    model = torch.nn.Linear(3, 4, bias=False)
    optimizer = made(model.parameters(), lr=0.1)
    check_savable({"model": model, "optimizer": optimizer})
    assert not optimizer.state
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Muon, {}),
    ],
)
def test_what_a_first_step_will_make_is_foreseen(made: Any, options: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 4, bias=False).to(torch.bfloat16)
    optimizer = made(model.parameters(), lr=0.1, **options)
    foretold = sorted(foreseen(optimizer), key=str)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tensors = flatten({"optimizer": optimizer}).tensors.values()
    assert foretold == sorted(((one.dtype, tuple(one.shape)) for one in tensors if one.dim()), key=str)
    assert list(foreseen(optimizer)) == [], "it speaks for itself"


def test_what_only_the_first_save_can_find_is_typed_and_costs_no_commit(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    good = checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    optimizer.state[model[0].weight]["odd"] = object()
    with pytest.raises(StateError, match=r"optimizer\.state\.0\.odd is of type object"):
        checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", good.name]
    optimizer.state.clear()
    assert checkpoint.load(tmp_path, model=model, optimizer=optimizer) is not None
