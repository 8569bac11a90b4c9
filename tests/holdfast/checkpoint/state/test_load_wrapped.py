"""A checkpoint of a wrapped module loads into a bare one, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from live_states import Tied, net, same, train
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

from holdfast import checkpoint

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


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


def test_averages_of_a_compiled_model_load_into_a_bare_one(tmp_path: Path) -> None:
    averages, other = AveragedModel(compiled(net())), AveragedModel(net(seed=9))
    averages.update_parameters(net(seed=3))
    checkpoint.save(tmp_path, step=1, ema=averages)
    checkpoint.load(tmp_path, ema=other)
    assert int(other.n_averaged) == 1
    for one, loaded in zip(averages.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, loaded)


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
def test_wrappers_leave_no_prefix_and_load_with_or_without_them(tmp_path: Path, wrap: Wrap) -> None:
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


def test_wrapped_meta_model_gets_memory_and_stays_tied(tmp_path: Path) -> None:
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
def test_wrapper_inside_a_renaming_module_leaves_no_prefix(tmp_path: Path, own: Wrap) -> None:
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
