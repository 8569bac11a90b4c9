"""How a change of the world size affects batch, samples and learning rate, and what must not change."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import UsageError
from holdfast.training.data import Audit, Position, expected_audit, sample_at
from holdfast.training.data.loader import Loader, make_loader
from holdfast.training.options.elasticity import Elasticity, Ramp, Scaler, global_batch

LINEAR = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2)
WORLDS = st.integers(min_value=1, max_value=9)
CONFIGS = st.sampled_from([Elasticity(), *(Elasticity(batch="scaled", reference_world_size=n) for n in (1, 2, 3, 5))])


# Batch and samples


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(config: Elasticity, *, size: int, share: int) -> Loader:
    batch = share * (config.reference_world_size or 1)
    return make_loader(
        Numbers(size), global_batch=batch, micro_batch=1, device=torch.device("cpu"), elasticity=config
    )


def consumed(loader: Loader, position: Position, world: int) -> list[tuple[int, int]]:
    """Return what all ranks of a world fetch for one step: (epoch, sample)."""
    shares = [loader.parts(position, rank=rank, world_size=world) for rank in range(world)]
    places = [place for part in itertools.chain(*shares) for place in range(part.begin, part.end)]
    return [sample_at(place, size=loader.size, seed=position.seed) for place in places]


@given(
    config=CONFIGS,
    size=st.integers(1, 60),
    share=st.integers(1, 8),
    steps=st.lists(st.tuples(WORLDS, st.booleans()), min_size=1, max_size=14),
)
def test_each_sample_is_seen_once_an_epoch_over_any_worlds(
    config: Elasticity, size: int, share: int, steps: list[tuple[int, bool]]
) -> None:
    """Discarded steps make no difference."""
    loader = loader_of(config, size=size, share=share)
    position, seen = Position(fingerprint="f", seed=7), Counter[tuple[int, int]]()
    for world, committed in steps:
        samples = consumed(loader, position, world)
        assert len(samples) == loader.batch_at(world)
        if committed:
            audit = Audit()
            for epoch, sample in samples:
                audit = audit.seen(epoch, sample)
            seen.update(samples)
            position = position.advanced(loader.batch_at(world), audit)
    assert position.audit == expected_audit(size=size, seed=7, cursor=position.cursor)
    assert set(seen.values()) <= {1}
    whole = position.cursor // size
    assert {one for one in seen if one[0] < whole} == {(e, s) for e in range(whole) for s in range(size)}


@given(world=WORLDS, reference=WORLDS, share=st.integers(1, 9))
def test_scaled_batch_gives_equal_shares_in_every_world(world: int, reference: int, share: int) -> None:
    config = Elasticity(batch="scaled", reference_world_size=reference)
    assert global_batch(config, share * reference, world) == share * world
    loader = loader_of(config, size=99, share=share)
    start = Position(fingerprint="f", seed=0)
    assert {len(loader.parts(start, rank=rank, world_size=world)) for rank in range(world)} == {share}


@given(world=WORLDS, batch=st.integers(1, 100))
def test_by_default_batch_and_learning_rate_ignore_the_world(world: int, batch: int) -> None:
    assert global_batch(Elasticity(), batch, world) == batch
    assert Elasticity().factor(world) == 1.0


def test_unevenly_divisible_batch_is_refused_by_the_loader() -> None:
    config = Elasticity(batch="scaled", reference_world_size=4)
    with pytest.raises(UsageError, match="global_batch_size 6 is not a multiple of reference_world_size 4"):
        make_loader(Numbers(9), global_batch=6, micro_batch=2, device=torch.device("cpu"), elasticity=config)


# Learning rate


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("square-root", 2.0)])
def test_the_rule_follows_the_batch_relative_to_the_reference(rule: str, factor: float) -> None:
    config = Elasticity(batch="scaled", learning_rate=rule, reference_world_size=2)
    assert config.factor(2) == 1.0
    assert config.factor(8) == pytest.approx(factor)
    assert config.factor(8) * config.factor(1) == pytest.approx(factor * config.factor(1))


class Seen(torch.optim.SGD):
    """An optimizer that records the learning rates of its steps."""

    def __init__(self, *groups: Any, lr: Any = 0.1) -> None:
        parameters = groups or ([torch.nn.Parameter(torch.ones(2))],)
        super().__init__([{"params": list(group)} for group in parameters], lr=lr)
        self.seen: list[list[float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append([float(group["lr"]) for group in self.param_groups])


def steps(scaler: Scaler, optimizer: Seen, worlds: list[int], first: int = 0) -> list[float]:
    for step, world in enumerate(worlds, start=first):
        with scaler.applied(world, step):
            optimizer.step()
    return [rates[0] for rates in optimizer.seen[-len(worlds) :]]


def test_a_rising_rate_warms_up_and_a_falling_one_falls_at_once() -> None:
    optimizer = Seen(lr=1.0)
    config = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=4)
    made = steps(Scaler(optimizer, config), optimizer, [2, 2, 4, 4, 4, 4, 4, 2, 2])
    assert made == [1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 1.0, 1.0]


def test_change_during_a_warm_up_continues_from_the_current_rate() -> None:
    optimizer = Seen(lr=1.0)
    config = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=2)
    assert steps(Scaler(optimizer, config), optimizer, [2, 4, 6, 6, 6]) == [1.0, 1.5, 2.25, 3.0, 3.0]


def test_the_first_world_starts_at_its_own_rate() -> None:
    optimizer = Seen(lr=1.0)
    config = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=9)
    assert steps(Scaler(optimizer, config), optimizer, [8]) == [4.0]


@given(
    worlds=st.lists(WORLDS, min_size=2, max_size=20),
    cut=st.integers(0, 19),
    warmup=st.integers(0, 5),
)
def test_a_restore_or_a_newcomer_goes_on_with_the_same_rates(worlds: list[int], cut: int, warmup: int) -> None:
    cut = min(cut, len(worlds) - 1)
    config = Elasticity(batch="scaled", learning_rate="linear", reference_world_size=2, warmup_steps=warmup)
    whole, before, after = Seen(lr=1.0), Seen(lr=1.0), Seen(lr=1.0)
    expected = steps(Scaler(whole, config), whole, worlds)
    first, second = Scaler(before, config), Scaler(after, config)
    steps(first, before, worlds[:cut])
    if first.ramp is not None:
        second.ramp = Ramp.from_json(json.loads(json.dumps(first.ramp.to_json())))
    assert steps(second, after, worlds[cut:], first=cut) == expected[cut:]


def test_scheduler_results_do_not_depend_on_the_world() -> None:
    def run(worlds: list[int]) -> tuple[list[float], list[float]]:
        optimizer = Seen(lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        scaler, own = Scaler(optimizer, LINEAR), []
        for step, world in enumerate(worlds):
            with scaler.applied(world, step):
                optimizer.step()
            scheduler.step()
            own.append(optimizer.param_groups[0]["lr"])
        return own, [rates[0] for rates in optimizer.seen]

    changing = [2, 2, 3, 3, 1, 1, 7]
    alone, made = run([2] * 7), run(changing)
    assert made[0] == alone[0], "to the last bit"
    assert made[1] == [rate * (world / 2) for rate, world in zip(alone[1], changing, strict=True)]


def test_scheduler_reads_back_only_its_own_rates() -> None:
    optimizer = Seen(lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
    scaler = Scaler(optimizer, LINEAR)
    for step, world in enumerate([2, 4, 8, 8]):
        with scaler.applied(world, step):
            optimizer.step()
        plateau.step(1.0)
    assert [rates[0] for rates in optimizer.seen] == [1.0, 2.0, 2.0, 1.0]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_tensor_rate_changes_in_place_once_if_groups_share_it() -> None:
    rate = torch.tensor(0.3)
    optimizer = Seen([torch.nn.Parameter(torch.ones(1))], [torch.nn.Parameter(torch.ones(1))], lr=rate)
    for group in optimizer.param_groups:
        group["lr"] = rate
    steps(Scaler(optimizer, LINEAR), optimizer, [6])
    assert optimizer.seen == [[pytest.approx(0.9), pytest.approx(0.9)]]
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert torch.equal(rate, torch.tensor(0.3))


def test_rate_set_by_the_optimizer_in_its_step_stays_unscaled() -> None:
    optimizer = Seen(lr=1.0)
    scaler = Scaler(optimizer, LINEAR)
    with scaler.applied(4, 0):
        optimizer.param_groups[0]["lr"] *= 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_raises_gets_its_rate_back() -> None:
    optimizer = Seen(lr=0.1)
    with pytest.raises(ZeroDivisionError), Scaler(optimizer, LINEAR).applied(6, 0):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_real_optimizer_makes_the_step_of_a_scaled_rate() -> None:
    def weights(rate: float, world: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        optimizer = torch.optim.AdamW([parameter], lr=rate)
        parameter.grad = torch.tensor([0.5, -1.0, 2.0])
        with Scaler(optimizer, LINEAR).applied(world, 0):
            optimizer.step()
        return parameter.detach()

    assert torch.equal(weights(0.1, world=4), weights(0.2, world=2))


def test_the_log_gets_the_rate_that_was_applied() -> None:
    optimizer = Seen(lr=0.1)
    scaler = Scaler(optimizer, LINEAR)
    assert scaler.lr == 0.1
    steps(scaler, optimizer, [6])
    assert scaler.lr is not None
    assert math.isclose(scaler.lr, 0.3)
    assert Scaler(None, Elasticity()).lr is None


# Invalid input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": "double"}, "batch is 'double': expected 'constant' or 'scaled'"),
        ({"learning_rate": "cubic"}, "learning_rate is 'cubic': expected 'none' or 'linear' or 'square-root'"),
        ({"warmup_steps": -1}, "warmup_steps is -1: expected an integer of at least 0"),
        ({"warmup_steps": 1.5}, "warmup_steps is 1.5"),
        ({"reference_world_size": 0}, "reference_world_size is 0: expected an integer of at least 1"),
        ({"reference_world_size": True}, "reference_world_size is True"),
        ({"batch": "scaled"}, "reference_world_size is missing"),
        ({"learning_rate": "linear"}, "batch is constant: set batch='scaled'"),
        ({"warmup_steps": 5}, "warmup_steps is 5, but learning_rate 'none'"),
    ],
)
def test_a_bad_field_is_named_with_its_mend(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Elasticity(**fields)


def test_an_optimizer_without_a_rate_cannot_have_it_scaled() -> None:
    optimizer = Seen()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(UsageError, match="group 0 of the optimizer has no numeric lr"):
        Scaler(optimizer, LINEAR)
    Scaler(optimizer, Elasticity())
