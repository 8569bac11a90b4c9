"""What a script may pass, what is refused, and that the error names the object and the fix."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from holdfast.checkpoint.state.flatten import flatten
from holdfast.core.errors import UsageError
from holdfast.training.options.validation import Structure, check_batches, check_loss, check_managed, check_run


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what this thread logged. Threads of other tests may log too."""
    return [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(*things: Any) -> torch.optim.Optimizer:
    parameters = [
        one for thing in things for one in (thing.parameters() if isinstance(thing, nn.Module) else [thing])
    ]
    return torch.optim.SGD(parameters, lr=0.1)


# Objects that may be managed


def shared() -> dict[str, Any]:
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    made[1].weight = made[0].weight
    return {"model": made, "optimizer": sgd(made)}


def complex_and_integers() -> dict[str, Any]:
    made = nn.Linear(2, 2)
    made.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    made.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    made.register_buffer("turn", torch.ones(1, dtype=torch.complex64))
    return {"model": made, "optimizer": sgd(made)}


def two_modules() -> dict[str, Any]:
    one, other = model(), model()
    return {"model": one, "critic": other, "optimizer": sgd(one, other)}


def partly_frozen() -> dict[str, Any]:
    made = model()
    made[0].requires_grad_(False)
    return {"model": made, "optimizer": sgd(made)}


@pytest.mark.parametrize("make", [shared, complex_and_integers, two_modules, partly_frozen, dict])
def test_an_ordinary_job_passes_without_a_word(
    make: Callable[[], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check_managed(make())
    assert not said(caplog)


class Temperature:
    """State outside of modules, with its own format."""

    def __init__(self) -> None:
        self.value = nn.Parameter(torch.ones(1))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value.data.copy_(state["value"])


def test_parameter_saved_by_another_object_may_be_trained() -> None:
    """The other object is managed too."""
    made, heat = model(), Temperature()
    objects = {"model": made, "optimizer": sgd(made, heat.value), "heat": heat}
    check_managed(objects, list(flatten({"heat": heat}).tensors.values()))
    with pytest.raises(
        UsageError, match=r"parameter 6 of its group 0 of shape \(1,\), which belongs to no managed model"
    ):
        check_managed({"model": made, "optimizer": sgd(made, heat.value)})


def test_parameters_that_nobody_steps_are_named(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    check_managed({"model": made, "optimizer": sgd(made[2])})
    (message,) = said(caplog)
    assert message.startswith("model.0.weight, model.0.bias, model.1.weight and 1 more: these require a gradient")


@pytest.mark.parametrize("hooked", [True, False])
def test_averages_without_an_optimizer_hook_are_named(caplog: pytest.LogCaptureFixture, *, hooked: bool) -> None:
    made = model()
    optimizer, average = sgd(made), swa_utils.AveragedModel(made).requires_grad_(False)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(made))
    check_managed({"model": made, "optimizer": optimizer, "ema": average})
    assert [message.startswith("ema is an AveragedModel") for message in said(caplog)] == ([] if hooked else [True])


# Objects that may not


def wrapped() -> dict[str, Any]:
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    return {"model": ddp}


def with_scheduler_of_another() -> dict[str, Any]:
    made = model()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(made), step_size=1)
    return {"model": made, "optimizer": sgd(made), "scheduler": scheduler}


def managed(**given: Any) -> dict[str, Any]:
    made = model()
    return {"model": made, "optimizer": sgd(made), **given}


def frozen() -> dict[str, Any]:
    made = model()
    objects = {"model": made, "optimizer": sgd(made)}
    made.requires_grad_(False)
    return objects


REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"model": [1]}, "model is of type list: expected a torch.nn.Module"),
    (lambda: managed(optimizer=Temperature()), "optimizer is of type Temperature.*expected a torch.optim.Optimizer"),
    (lambda: managed(optimizer=torch.optim.LBFGS([torch.ones(1)])), "LBFGS.*use another optimizer"),
    (lambda: managed(scheduler=Temperature()), r"scheduler is of type Temperature, which has no step\(\)"),
    (
        lambda: managed(scaler=Temperature()),
        r"scaler is of type Temperature, without scale\(\): expected a GradScaler",
    ),
    (with_scheduler_of_another, "the scheduler belongs to another optimizer"),
    (wrapped, r"model is a DistributedDataParallel.*: pass its \.module"),
    (lambda: {"model": nn.Embedding(4, 2, sparse=True)}, "model makes sparse gradients.*set sparse=False"),
    (lambda: {"model": nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))}, r"model\.0 makes sparse"),
    (lambda: {"model": nn.LazyLinear(3)}, "model.weight has no shape yet: run one batch"),
    (lambda: {"model": nn.Linear(2, 2, device="meta")}, "model.weight is on the meta device: initialize its weights"),
    (frozen, "no parameter of the optimizer requires a gradient"),
    (
        lambda: managed(optimizer=sgd(model())),
        "the optimizer trains parameter 0.*and 3 more, which belongs to no managed model",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_work_is_refused_at_manage(make: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_managed(make())


# batches and step


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Endless(list[int]):
    def __len__(self) -> int:
        raise TypeError("object of type 'Endless' has no len()")


GOOD: dict[str, Any] = {"dataset": [1, 2], "global_batch": 4, "micro_batch": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": Stream()}, "needs a map-style dataset"),
        ({"dataset": iter([1])}, "needs a map-style dataset"),
        ({"dataset": Endless()}, "length of the dataset is not known .object of type 'Endless'"),
        ({"dataset": []}, "is empty: expected at least one sample"),
        ({"global_batch": 4.0}, "global_batch_size is 4.0: expected an integer of at least 1"),
        ({"micro_batch": 0}, "micro_batch_size is 0"),
        ({"micro_batch": 5}, "micro_batch_size 5 is not between 1 and global_batch_size 4"),
        ({"collate": "list"}, "collate is of type str: expected a function"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(given: dict[str, Any], message: str) -> None:
    check_batches(**GOOD)
    with pytest.raises(UsageError, match=message):
        check_batches(**{**GOOD, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_steps": -1}, "max_steps is -1"),
        ({"max_steps": None}, "max_steps is None"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_a_run_without_sense_is_refused(given: dict[str, Any], message: str) -> None:
    check_run(max_steps=0, seed=0)
    with pytest.raises(UsageError, match=message):
        check_run(**{"max_steps": 5, "seed": 0, **given})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.5, r"received a float: pass the loss itself, a tensor"),
        (torch.ones(3, requires_grad=True), r"the loss has shape \(3,\).*loss.mean\(\)"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True), "the loss is complex"),
        (torch.ones(()), "does not depend on any parameter"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    check_loss(torch.ones(1, requires_grad=True))
    with pytest.raises(UsageError, match=message):
        check_loss(loss)


# In mid-run


def change(made: nn.Module, kind: str) -> None:
    match kind:
        case "a layer is added":
            made.add_module("head", nn.Linear(2, 2))
        case "a parameter is added":
            made[1].register_parameter("extra", nn.Parameter(torch.ones(1)))
        case "a layer is replaced":
            made[2] = nn.Linear(4, 2)
        case "a parameter is replaced":
            made[0].weight = nn.Parameter(torch.ones(4, 3))
        case "a layer is removed":
            del made[2]
        case "a shape is changed":
            made[0].weight.data = torch.ones(5, 3)


def run(structure: Structure, first: int, end: int) -> None:
    for step in range(first, end):
        structure.check(step)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a layer is added", "model.head.weight, model.head.bias: new"),
        ("a parameter is added", "model.1.extra: new"),
        ("a layer is replaced", "model.2.weight, model.2.bias: replaced by another tensor"),
        ("a parameter is replaced", r"model.0.weight: replaced.*copy_\(\)"),
        ("a layer is removed", "model.2.weight, model.2.bias: gone"),
        ("a shape is changed", "changed its shape"),
    ],
)
def test_model_changed_in_mid_run_is_detected_within_some_steps(kind: str, message: str) -> None:
    made = model()
    structure = Structure({"model": made})
    run(structure, 0, 40)
    change(made, kind)
    with pytest.raises(UsageError, match=message):
        structure.check_now()
    with pytest.raises(UsageError, match=message):
        run(structure, 40, 40 + Structure.EVERY)


def test_what_leaves_the_parameters_as_they_are_is_no_change() -> None:
    made = model()
    structure = Structure({"model": made, "optimizer": sgd(made)})
    made.eval().train()
    made.requires_grad_(False).requires_grad_(True)
    with torch.no_grad():
        made[0].weight.copy_(torch.ones(4, 3))
    made.load_state_dict(model().state_dict())
    made.add_module("rest", nn.Sequential(nn.Dropout()))
    structure.check_now()
    made.rest.append(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"model\.rest\.1\.weight"):
        structure.check_now()
