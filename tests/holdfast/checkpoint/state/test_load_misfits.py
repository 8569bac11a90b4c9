"""A state that does not fit is refused. The message names all differences, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from live_states import Values, net, same, state_of, train

from holdfast import StateError, checkpoint


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
    assert "create the objects as they were" in said
    assert same(state_of(objects), before)


def test_of_a_thousand_names_ten_are_shown(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.ParameterDict({f"p{i}": torch.zeros(1) for i in range(1000)}))
    with pytest.raises(StateError, match=r"unexpected in the checkpoint \(1000\): .* and 990 more") as refused:
        checkpoint.load(tmp_path, model=torch.nn.Linear(1, 1))
    assert len(str(refused.value)) < 1000


def test_optimizer_with_reordered_parameters_is_refused(tmp_path: Path) -> None:
    """torch itself would exchange the moments of the parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.Adam(model.parameters()))
    turned = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(
        StateError, match=r"a different order \(4\): model\.0\.weight in the checkpoint, and model\.1\.weight here"
    ):
        checkpoint.load(tmp_path, model=model, optimizer=turned)


def test_an_optimizer_may_be_loaded_without_its_model(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    alone = torch.optim.AdamW(net().parameters())
    checkpoint.load(tmp_path, optimizer=alone)
    assert same(alone.state_dict(), optimizer.state_dict())


def test_unnamed_parameter_does_not_match_a_named_one(tmp_path: Path) -> None:
    model, free = torch.nn.Linear(3, 1, bias=False), torch.nn.Parameter(torch.zeros(1, 3))
    checkpoint.save(tmp_path, step=1, model=model, optimizer=torch.optim.Adam([model.weight, free]))
    with pytest.raises(
        StateError, match=r"a different order \(2\): model\.weight in the checkpoint, and one of no module here"
    ):
        checkpoint.load(tmp_path, model=model, optimizer=torch.optim.Adam([free, model.weight]))


@pytest.mark.parametrize(
    ("saved", "given", "lacking"),
    [
        (torch.optim.AdamW, torch.optim.SGD, r"SGD, because its groups lack settings \(2\): dampening, momentum"),
        (torch.optim.SGD, torch.optim.AdamW, r"AdamW, because its groups lack settings \(2\): betas, eps"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused(
    tmp_path: Path, saved: Any, given: Any, lacking: str
) -> None:
    """torch itself accepts the state, and the next step raises a KeyError."""
    model = net()
    optimizer = saved(model.parameters(), lr=0.1)
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=Values(optimizer.state_dict()))  # the form in a file
    with pytest.raises(StateError, match=f"optimizer: not a state of {lacking}"):
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
def test_optimizer_kinds_with_equal_settings_differ_by_name(tmp_path: Path, saved: str, given: str) -> None:
    """torch turns an Adam that loads the state of an AdamW into one. For other optimizers the next step raises a
    KeyError."""
    model = net()
    checkpoint.save(tmp_path, step=1, optimizer=getattr(torch.optim, saved)(model.parameters()))
    other = getattr(torch.optim, given)(model.parameters())
    before = state_of({"optimizer": other})
    with pytest.raises(StateError, match=f"kind {saved} in the checkpoint, and kind {given} here"):
        checkpoint.load(tmp_path, optimizer=other)
    assert same(state_of({"optimizer": other}), before)


def test_subclass_of_a_torch_optimizer_matches_its_base(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = net()
    optimizer, mine = torch.optim.AdamW(model.parameters()), Mine(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path, step=1, optimizer=optimizer)
    checkpoint.load(tmp_path, optimizer=mine)
    assert same(mine.state_dict(), optimizer.state_dict())


# Settings changed by the script


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


def test_settings_unknown_to_an_earlier_torch_get_defaults(tmp_path: Path) -> None:
    model = net()
    earlier = torch.optim.AdamW(model.parameters())
    del earlier.param_groups[0]["decoupled_weight_decay"]
    checkpoint.save(tmp_path, step=1, model=model, optimizer=earlier)
    optimizer = torch.optim.AdamW(model.parameters())
    default = optimizer.param_groups[0]["decoupled_weight_decay"]
    checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is default is True
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
