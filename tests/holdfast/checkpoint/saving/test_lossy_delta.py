"""Sparse patches: restored values are within the threshold, and values that must be exact are exact."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lossy_states import (
    KINDS,
    ONE,
    WEIGHT,
    Forms,
    State,
    assert_within,
    manifest,
    moved,
    numbers,
    read,
    save,
    weights,
)

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import lossy_delta
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.errors import UsageError

World = Callable[..., list[Any]]


FORMS: dict[str, tuple[str, tuple[int, ...]]] = {
    "cut": ("F32", (1100, 512)),  # between two ranks
    "double": ("F64", (40, 300)),
    "half": ("F16", (70, 1000)),
    "brain": ("BF16", (130, 1000)),
    "small": ("F8_E4M3", (300, 300)),
    "whole": ("I64", (30, 100)),
    "flags": ("BOOL", (5000,)),
    "scalar": ("F32", ()),
    "none": ("F32", (0, 7)),
    "moment": ("F32", (64, 1024)),  # not among those that may be inexact
}


INEXACT = frozenset(FORMS) - {"moment"}


FLOATS = {"cut", "double", "half", "brain"}


def random_state(random: np.random.Generator, scale: float, before: State | None, odd: int) -> State:
    """Move the previous state by about `scale`, and set some values to NaN, infinity or the limits of their dtype."""
    state: State = {}
    for name, (dtype, shape) in FORMS.items():
        noise = random.standard_normal(shape) * scale
        if dtype in ("F64", "F32", "F16", "BF16"):
            old = np.zeros(shape) if before is None else numbers(before[name], dtype).astype("<f8")
            with np.errstate(all="ignore"):
                new = np.asarray(old + noise)
                if new.ndim:
                    places = random.integers(0, max(1, new.size), odd)
                    edges = random.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 0.0], odd)
                    new.reshape(-1)[places[: new.size]] = edges[: new.size]
                new = new.astype("<f4" if dtype == "BF16" else KINDS[dtype])
            state[name] = (np.ascontiguousarray(new).view("<u4") >> 16).astype("<u2") if dtype == "BF16" else new
        elif before is None or scale > 1e-3:
            state[name] = random.integers(0, 2, shape).astype(KINDS[dtype])
        else:
            state[name] = before[name]
    return state


steps = st.lists(
    st.tuples(st.integers(0, 2**32), st.sampled_from([0.0, 1e-9, 1e-6, 1e-4, 1e-2, 1.0, 1e36]), st.integers(0, 40)),
    min_size=2,
    max_size=5,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=steps,
    threshold=st.sampled_from([1e-50, 1e-9, 1e-5, 1e-3, 0.1, 1.0]) | st.floats(0, 1, exclude_min=True),
    sizes=st.tuples(st.integers(1, 2), st.integers(2, 4)),
)
def test_restored_elements_are_within_the_threshold(
    tmp_path_factory: pytest.TempPathFactory, world: World, steps: Any, threshold: float, sizes: tuple[int, int]
) -> None:
    """Elements that are not floating point are exact."""
    ranks, every = sizes
    root = tmp_path_factory.mktemp("chain")
    chains = [Chain(every=every, threshold=threshold) for _ in range(ranks)]
    history: dict[int, State] = {}
    state: State | None = None

    def by(step: int, state: State, exchange: Exchange) -> SaveResult:
        return save(root, step, state, chains[exchange.rank], exchange=exchange, forms=FORMS, inexact=INEXACT)

    for step, (seed, scale, odd) in enumerate(steps, start=1):
        state = random_state(np.random.default_rng(seed), scale, state, odd)
        history[step] = state
        results = world(ranks, partial(by, step, state))
        assert all(result.committed for result in results), results
    for step, saved in history.items():
        found = manifest(root, step)
        assert_within(read(root, step, FORMS), saved, FORMS, threshold, FLOATS)
        assert found.bounds.keys() <= FLOATS
        assert set(found.bounds.values()) <= {threshold}
        assert len(found.depends_on) < every
        assert verify(FolderStore(root), CheckpointName(step=step, attempt_id=ONE)).verified
    assert not list(root.glob("quarantine/*"))


def test_errors_do_not_add_up_over_a_long_chain(tmp_path: Path) -> None:
    chain, state = Chain(every=100, threshold=1e-3), weights()
    for step in range(1, 31):
        state = {**state, "weight": state["weight"] + np.float32(4e-4)}  # all of it, in the same direction
        assert save(tmp_path, step, state, chain).committed
        assert_within(read(tmp_path, step), state, WEIGHT, 1e-3, {"weight"})
    sparse_ones = [step for step in range(1, 31) if manifest(tmp_path, step).version == 3]
    assert len(sparse_ones) >= 15


def test_only_what_moved_further_than_the_threshold_is_written(lossy: tuple[Path, list[State]]) -> None:
    root, states = lossy
    found = read(root, 2)["weight"]
    far = np.abs(states[1]["weight"].astype("<f8") - states[0]["weight"]) > 1e-3
    assert far.sum() == 200
    assert np.array_equal(found[far], states[1]["weight"][far])
    assert np.array_equal(found[~far], states[0]["weight"][~far])
    second = manifest(root, 2)
    (patch,) = second.tensors["weight"].patches
    assert (patch.count, patch.bound, second.version) == (200, 1e-3, 3)
    assert second.bounds == {"weight": 1e-3}
    assert second.own["rank-0.safetensors"].nbytes == 4096 + 200 * (4 + 4)
    assert (second.parent, second.depends_on) == ("step-1.g1.a1", {"step-1.g1.a1"})


def test_patch_is_based_on_exact_bytes_and_never_on_a_patch(lossy: tuple[Path, list[State]]) -> None:
    root, states = lossy
    third = manifest(root, 3)
    assert {chunk.file for chunk in third.tensors["weight"].chunks} == {"step-1.g1.a1/rank-0.safetensors"}
    shutil.rmtree(root / "step-2.g1.a1")
    assert_within(read(root, 3), states[2], WEIGHT, 1e-3, {"weight"})


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.5, np.nan), (0.5, np.inf), (-np.inf, 0.5), (np.inf, -np.inf), (np.nan, 0.5), (3e38, -3e38)],
)
def test_changes_from_or_to_infinity_or_nan_are_always_written(tmp_path: Path, before: float, after: float) -> None:
    chain, state = Chain(every=4, threshold=1.0), weights()
    for step, value in ((1, before), (2, after)):
        state = {**state, "weight": state["weight"].copy()}
        state["weight"][7, 7] = value
        save(tmp_path, step, state, chain)
    found = manifest(tmp_path, 2)
    assert [patch.count for patch in found.tensors["weight"].patches] == [1]
    assert read(tmp_path)["weight"].tobytes() == state["weight"].tobytes()


def test_what_stays_no_number_is_not_written_again(tmp_path: Path) -> None:
    chain, state = Chain(every=4, threshold=1e-3), weights()
    state["weight"][:200] = np.nan
    save(tmp_path, 1, state, chain)
    state = moved(state, 50, 0.5)
    save(tmp_path, 2, state, chain)
    (patch,) = manifest(tmp_path, 2).tensors["weight"].patches
    assert patch.count < 50
    assert read(tmp_path)["weight"].tobytes() == state["weight"].tobytes()


def test_blocks_replace_a_patch_that_is_not_smaller(tmp_path: Path) -> None:
    """The next patches are based on these blocks."""
    chain, state = Chain(every=8, threshold=1e-3), weights()
    state["moment"] = np.zeros((20, 10), "<f4")
    forms: Forms = {**WEIGHT, "frozen": ("U8", (4 << 20,))}
    frozen = np.zeros(4 << 20, "u1")
    for step, change in ((1, 0.0), (2, 0.5), (3, 2e-4)):
        state = {**state, "frozen": frozen, "weight": state["weight"] + np.float32(change)}
        save(tmp_path, step, state, chain, forms=forms)
    second, third = manifest(tmp_path, 2), manifest(tmp_path, 3)
    assert (second.version, second.bounds) == (2, {})
    assert [patch.count for patch in third.tensors["weight"].patches] == [0]
    assert {chunk.file for chunk in third.tensors["weight"].chunks} == {"step-2.g1.a1/rank-0.safetensors"}
    assert restore(tmp_path, SingleRank(), step=2).loaded is not None


def test_it_is_off_by_default(tmp_path: Path) -> None:
    chain, state = Chain(every=4), weights()
    for step in (1, 2):
        state = moved(state, 1, 1e-6)
        save(tmp_path, step, state, chain)
    assert manifest(tmp_path, 2).version == 2
    assert read(tmp_path, 2)["weight"].tobytes() == state["weight"].tobytes()


def test_what_may_not_be_inexact_is_exact_and_says_so(tmp_path: Path) -> None:
    chain, state = Chain(every=4, threshold=0.1), weights()
    for step in (1, 2):
        state = moved(state, 1, 1e-6)
        save(tmp_path, step, state, chain, inexact=frozenset())
    assert (manifest(tmp_path, 2).version, manifest(tmp_path, 2).bounds) == (2, {})
    assert read(tmp_path, 2)["weight"].tobytes() == state["weight"].tobytes()


def test_a_tensor_that_may_be_inexact_no_more_is_written_exactly(tmp_path: Path) -> None:
    chain, state = Chain(every=4, threshold=0.1), weights()
    for step, inexact in ((1, {"weight"}), (2, {"weight"}), (3, set[str]())):
        state = moved(state, 10, 1e-6)
        save(tmp_path, step, state, chain, inexact=frozenset(inexact))
    assert manifest(tmp_path, 2).bounds
    assert not manifest(tmp_path, 3).bounds
    assert read(tmp_path, 3)["weight"].tobytes() == state["weight"].tobytes()


def test_without_memory_for_a_copy_of_the_base_commits_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossy_delta, "_copied", lambda *_: None)
    chain, state = Chain(every=4, threshold=0.1), weights()
    for step in (1, 2):
        state = moved(state, 10, 1e-6)
        assert save(tmp_path, step, state, chain).committed
    assert manifest(tmp_path, 2).bounds == {}


def test_a_save_that_failed_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, states = Chain(every=8, threshold=1e-3), [weights()]
    states += [{**states[0], "weight": states[0]["weight"] + np.float32(0.5)}]
    states += [moved(states[0], 30, 0.2)]
    save(tmp_path, 1, states[0], chain)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "publish", full)
        assert not save(tmp_path, 2, states[1], chain).committed
    assert save(tmp_path, 3, states[2], chain).committed
    assert [patch.count for patch in manifest(tmp_path, 3).tensors["weight"].patches] == [30]
    assert_within(read(tmp_path, 3), states[2], WEIGHT, 1e-3, {"weight"})


@pytest.mark.parametrize("rows", [(0, 300), (0, 1), (299, 300), (10, 200), (150, 150)])
def test_rows_are_read_with_their_part_of_a_patch(lossy: tuple[Path, list[State]], rows: tuple[int, int]) -> None:
    root, _ = lossy
    whole = read(root, 3)["weight"]
    loaded = restore(root, SingleRank(), step=3, select=lambda _: {"weight": rows}).loaded
    assert loaded is not None
    assert bytes(loaded.tensors["weight"]) == whole[rows[0] : rows[1]].tobytes()


@pytest.mark.parametrize("threshold", [-1e-3, 1.5, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="invalid delta threshold"):
        Chain(every=2, threshold=threshold)
