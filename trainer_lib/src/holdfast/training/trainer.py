"""The loop over `job.batches` with `job.run_step` as one call: `holdfast.Trainer(model=…, …).fit()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from holdfast.checkpoint.state.flatten import Stateful
from holdfast.core.errors import UsageError
from holdfast.training.data.loader import MapDataset
from holdfast.training.init import init
from holdfast.training.job import Job
from holdfast.training.options.elasticity import Elasticity
from holdfast.training.options.validation import check_run, check_whole
from holdfast.training.step.step_result import StepResult


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What to train, on which data, and for how long. Nothing happens before `fit`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor]
    """Returns the mean over a micro-batch, from the model and the micro-batch. It may communicate."""
    dataset: MapDataset
    global_batch_size: int
    micro_batch_size: int
    max_steps: int
    seed: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    max_grad_norm: float | None = None
    group_norms: bool = False
    elasticity: Elasticity | None = None
    others: Mapping[str, Stateful] = field(default_factory=dict)
    """Other objects for `job.manage`, by name."""
    evaluate: Callable[[Any], object] | None = None
    """Called with the model on each rank, after every `evaluate_every` completed steps. It must not communicate."""
    evaluate_every: int | None = None
    on_step: Callable[[StepResult], object] | None = None
    """Called with each result, including those of steps that were not completed."""
    job: Job | None = None
    """The result of `holdfast.init`, if the script has called it; otherwise `fit` calls it."""

    def __post_init__(self) -> None:
        _check_type("model", self.model, torch.nn.Module, "a torch.nn.Module")
        _check_type("optimizer", self.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer of its parameters")
        _check_call("loss", self.loss, "a function of the model and a batch, which returns the mean over the batch")
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            raise UsageError(
                f"dataset is of type {type(self.dataset).__name__}: expected one with __len__ and __getitem__"
            )
        check_whole("global_batch_size", self.global_batch_size, least=1)
        check_whole("micro_batch_size", self.micro_batch_size, least=1)
        check_run(max_steps=self.max_steps, seed=self.seed)
        _check_type("others", self.others, Mapping, "a dict of objects by their names")
        if self.on_step is not None:
            _check_call("on_step", self.on_step, "a function of a StepResult, or None")
        if (self.evaluate is None) != (self.evaluate_every is None):
            missing = "evaluate" if self.evaluate is None else "evaluate_every"
            raise UsageError(f"{missing} is missing: set evaluate and evaluate_every together, or neither")
        if self.evaluate is not None:
            _check_call("evaluate", self.evaluate, "a function of the model")
            check_whole("evaluate_every", self.evaluate_every, least=1)

    def fit(self) -> Job:
        """Train until `max_steps` steps are completed, from the newest valid state."""
        job = init() if self.job is None else self.job
        self.model.to(job.device)
        job.manage(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            max_grad_norm=self.max_grad_norm,
            group_norms=self.group_norms,
            elasticity=self.elasticity,
            **self.others,
        )
        batches = job.batches(
            self.dataset,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            max_steps=self.max_steps,
            seed=self.seed,
            collate=self.collate,
            alike=True,
        )
        for batch in batches:
            self._after(job, job.run_step(partial(self.loss, self.model, batch)))
        return job

    def _after(self, job: Job, result: StepResult) -> None:
        if self.on_step is not None:
            self.on_step(result)
        if self.evaluate is None or self.evaluate_every is None or not result.committed:
            return
        if result.step % self.evaluate_every == 0:
            with job.phase("evaluation"):
                self.evaluate(self.model)


def _check_type(name: str, thing: Any, kind: type, wanted: str) -> None:
    if not isinstance(thing, kind):
        raise UsageError(f"{name} is of type {type(thing).__name__}: expected {wanted}")


def _check_call(name: str, thing: Any, wanted: str) -> None:
    if not callable(thing):
        raise UsageError(f"{name} is of type {type(thing).__name__}, which cannot be called: expected {wanted}")
