"""Sparse differences: what is restored is within the threshold of what was saved, however long the chain; the rest is
exact; and a patch that was made to do harm is refused."""

from __future__ import annotations

import json
import logging
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, decode
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import Alone, Exchange
from holdfast.checkpoint.restore.lossy_delta import told
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import lossy_delta, writer
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.cli.checkpoints.access.commit_reader import Content
from holdfast.cli.checkpoints.access.progress_bar import progress
from holdfast.cli.checkpoints.copy import copy, lineage
from holdfast.cli.checkpoints.diff import diff
from holdfast.cli.checkpoints.verify import verify
from holdfast.cli.main import main
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DamagedError, UnknownFormatError, UsageError

ONE = AttemptId(1, 1)
State = dict[str, np.ndarray[Any, Any]]
World = Callable[..., list[Any]]
# numpy has no bfloat16 and no 8-bit floats: their bits as they are.
KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I64": "<i8", "BOOL": "?"}
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
WEIGHT: dict[str, tuple[str, tuple[int, ...]]] = {"weight": ("F32", (300, 512)), "moment": ("F32", (20, 10))}
Forms = Mapping[str, tuple[str, tuple[int, ...]]]


def snapshot(step: int, state: State, forms: Forms, inexact: frozenset[str], pair: AttemptId = ONE) -> Snapshot:
    def read(piece: Any) -> bytes:
        whole = state[piece.spec.name]
        return (whole[piece.start[0] : piece.start[0] + piece.shape[0]] if piece.shape else whole).tobytes()

    return Snapshot(
        name=CheckpointName(step=step, pair=pair),
        specs=[TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in forms.items()],
        read=read,
        state={"objects": {"model": {"w": {"$tensor": "weight"}}} if "weight" in forms else {}, "counters": {}},
        data=None,
        alone={},
        numerics={},
        inexact=inexact,
    )


def save(
    root: Path,
    step: int,
    state: State,
    chain: Chain,
    *,
    exchange: Exchange | None = None,
    forms: Forms = WEIGHT,
    inexact: frozenset[str] = frozenset({"weight"}),
) -> SaveResult:
    mine = exchange or Alone()
    staged = stage(snapshot(step, state, forms, inexact), Arena(), Planner(), rank=mine.rank, size=mine.size)
    return writer.commit(root, staged, mine, chain=chain)


def manifest(root: Path, step: int) -> Manifest:
    return catalog.read_manifest(root, CheckpointName(step=step, pair=ONE))


def read(root: Path, step: int | None = None, forms: Forms = WEIGHT) -> State:
    loaded = restore(root, Alone(), step=step).loaded
    assert loaded is not None
    assert step in (None, loaded.name.step)
    return {
        name: np.frombuffer(bytes(loaded.tensors[name]), KINDS[dtype]).reshape(shape)
        for name, (dtype, shape) in forms.items()
    }


def weights(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype("<f4") for name, (_, shape) in WEIGHT.items()}


def moved(state: State, elements: int, by: float) -> State:
    """So many elements of the weight further by so much, spread over all of it."""
    weight = state["weight"].copy()
    weight.reshape(-1)[:: weight.size // elements][:elements] += np.float32(by)
    return {**state, "weight": weight}


@pytest.fixture
def chained(tmp_path: Path) -> tuple[Path, list[State]]:
    """Step 1 is full; in 2 and 3 all weights moved a little, and some of them far."""
    chain, states = Chain(every=8, threshold=1e-3), [weights()]
    for step in (2, 3):
        drifted = {**states[-1], "weight": states[-1]["weight"] + np.float32(2e-4)}
        states.append(moved(drifted, 100 * step, 0.5))
    for step, state in enumerate(states, start=1):
        assert save(tmp_path, step, state, chain).committed
    return tmp_path, states


# The bound


def numbers(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return (bits.astype("<u4") << 16).view("<f4") if dtype == "BF16" else bits


def assert_within(found: State, saved: State, forms: Forms, bound: float, inexact: set[str]) -> None:
    for name, (dtype, _) in forms.items():
        if name not in inexact:
            assert found[name].tobytes() == saved[name].tobytes(), name
            continue
        got, wanted = (numbers(state[name], dtype).astype("<f8") for state in (found, saved))
        odd = ~np.isfinite(wanted)
        assert found[name][odd].tobytes() == saved[name][odd].tobytes(), name
        with np.errstate(over="ignore"):
            assert np.all(np.abs(got[~odd] - wanted[~odd]) <= bound), name


def random_state(random: np.random.Generator, scale: float, before: State | None, odd: int) -> State:
    """The state before, moved by about `scale`, with some numbers that are none or at the edges of their kind."""
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
def test_every_restored_element_is_within_the_threshold_of_the_saved_one_and_exact_where_it_is_no_float(
    tmp_path_factory: pytest.TempPathFactory, world: World, steps: Any, threshold: float, sizes: tuple[int, int]
) -> None:
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
        assert len(found.stands_on) < every
        assert verify(FolderStore(root), CheckpointName(step=step, pair=ONE)).whole
    assert not list(root.glob("quarantine/*"))


def test_errors_do_not_add_up_over_a_long_chain(tmp_path: Path) -> None:
    chain, state = Chain(every=100, threshold=1e-3), weights()
    for step in range(1, 31):
        state = {**state, "weight": state["weight"] + np.float32(4e-4)}  # all of it, always the same way
        assert save(tmp_path, step, state, chain).committed
        assert_within(read(tmp_path, step), state, WEIGHT, 1e-3, {"weight"})
    sparse_ones = [step for step in range(1, 31) if manifest(tmp_path, step).version == 3]
    assert len(sparse_ones) >= 15


def test_only_what_moved_further_than_the_threshold_is_written(chained: tuple[Path, list[State]]) -> None:
    root, states = chained
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
    assert (second.parent, second.stands_on) == ("step-1.g1.a1", {"step-1.g1.a1"})


def test_a_patch_stands_on_exact_bytes_and_never_on_another_patch(chained: tuple[Path, list[State]]) -> None:
    root, states = chained
    third = manifest(root, 3)
    assert {chunk.file for chunk in third.tensors["weight"].chunks} == {"step-1.g1.a1/rank-0.safetensors"}
    shutil.rmtree(root / "step-2.g1.a1")
    assert_within(read(root, 3), states[2], WEIGHT, 1e-3, {"weight"})


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.5, np.nan), (0.5, np.inf), (-np.inf, 0.5), (np.inf, -np.inf), (np.nan, 0.5), (3e38, -3e38)],
)
def test_what_becomes_infinite_or_no_number_or_is_it_no_more_is_always_written(
    tmp_path: Path, before: float, after: float
) -> None:
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


def test_where_a_patch_is_not_smaller_the_blocks_are_written_and_are_the_next_base(tmp_path: Path) -> None:
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
    assert restore(tmp_path, Alone(), step=2).loaded is not None


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
        patched.setattr(writer, "publish", full)
        assert not save(tmp_path, 2, states[1], chain).committed
    assert save(tmp_path, 3, states[2], chain).committed
    assert [patch.count for patch in manifest(tmp_path, 3).tensors["weight"].patches] == [30]
    assert_within(read(tmp_path, 3), states[2], WEIGHT, 1e-3, {"weight"})


@pytest.mark.parametrize("rows", [(0, 300), (0, 1), (299, 300), (10, 200), (150, 150)])
def test_rows_are_read_with_their_part_of_a_patch(chained: tuple[Path, list[State]], rows: tuple[int, int]) -> None:
    root, _ = chained
    whole = read(root, 3)["weight"]
    loaded = restore(root, Alone(), step=3, select=lambda _: {"weight": rows}).loaded
    assert loaded is not None
    assert bytes(loaded.tensors["weight"]) == whole[rows[0] : rows[1]].tobytes()


@pytest.mark.parametrize("threshold", [-1e-3, 1.5, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="a delta threshold of"):
        Chain(every=2, threshold=threshold)


# What is lost, and what is kept


def lost(root: Path) -> dict[str, str]:
    return {one.path: one.reason for one in restore(root, Alone()).lost}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_patch_that_is_damaged_costs_its_own_commit_alone(chained: tuple[Path, list[State]]) -> None:
    root, states = chained
    flip(root / "step-3.g1.a1" / "rank-0.safetensors", 4096 + 9)
    assert lost(root).keys() == {"step-3.g1.a1"}
    assert_within(read(root), states[1], WEIGHT, 1e-3, {"weight"})


def test_a_base_that_is_gone_takes_its_patches_along_and_the_full_one_before_is_restored(tmp_path: Path) -> None:
    chain, state = Chain(every=2, threshold=1e-3), weights()
    states = {}
    for step in (1, 2, 3, 4):
        states[step] = state = moved(state, 50, 0.3)
        save(tmp_path, step, state, chain)
    assert [manifest(tmp_path, step).version for step in states] == [1, 3, 1, 3]
    shutil.rmtree(tmp_path / "step-3.g1.a1")
    assert lost(tmp_path) == {
        "step-4.g1.a1": "step-3.g1.a1, on which step-4.g1.a1 stands: rank-0.safetensors is missing"
    }
    assert_within(read(tmp_path, 2), states[2], WEIGHT, 1e-3, {"weight"})
    assert read(tmp_path, 1)["weight"].tobytes() == states[1]["weight"].tobytes()


def test_damage_in_the_full_one_that_is_all_there_is_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    chain, state = Chain(every=3, threshold=1e-3), weights()
    save(tmp_path, 1, state, chain)
    save(tmp_path, 2, moved(state, 50, 0.3), chain)
    flip(tmp_path / "step-1.g1.a1" / "rank-0.safetensors", 5000)
    found = restore(tmp_path, Alone())
    assert found.loaded is None
    assert {one.path for one in found.lost} == {"step-1.g1.a1", "step-2.g1.a1"}


def engine(root: Path, *, keep_last: int = 1, threshold: float = 1e-3) -> CheckpointManager:
    made = CheckpointManager(
        root,
        keep_last=keep_last,
        resume=Resume.ALWAYS,
        on_foreign=lambda _: None,
        full_every=4,
        delta_threshold=threshold,
    )
    made.enter(Attempt(pair=ONE, job_uid="job-1", publication="p", run_id="r"), Alone())
    found = made.restore()
    made.claim(step=found.step, pair=found.pair)
    return made


def test_retention_keeps_what_a_patch_stands_on(tmp_path: Path) -> None:
    job, state, seen = engine(tmp_path), weights(), []
    for step in range(1, 7):
        state = moved(state, 50, 0.1 * step)
        assert job.save(snapshot(step, state, WEIGHT, frozenset({"weight"}))).committed
        seen.append(sorted(name.step for name in catalog.list_commits(tmp_path)))
        assert_within(read(tmp_path, step), state, WEIGHT, 1e-3, {"weight"})
    assert all(1 in there for there in seen[:4])
    assert seen[4:] == [[5], [5, 6]]
    assert manifest(tmp_path, 6).version == 3


def test_weights_of_a_model_may_be_inexact_and_nothing_of_its_optimizer_and_its_buffers_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten, trained

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256).requires_grad_(False)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    objects = {"model": model, "optimizer": optimizer}
    job, then = engine(tmp_path, keep_last=9, threshold=5e-3), {}
    for step in (1, 2, 3):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = flatten(objects)
        then = {name: tensor.clone() for name, tensor in flat.tensors.items()}
        made = Snapshot(
            name=CheckpointName(step=step, pair=ONE),
            specs=flat.specs,
            read=flat.read,
            fill=flat.fill,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            alone={},
            numerics={},
            inexact=trained(objects, flat),
        )
        assert made.inexact == {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
        assert job.save(made).committed
    found = manifest(tmp_path, 3)
    loaded = restore(tmp_path, Alone(), step=3).loaded
    assert loaded is not None
    assert found.bounds.keys() <= made.inexact
    assert "model/0.weight" in found.bounds
    for name, tensor in then.items():
        got = torch.frombuffer(bytearray(loaded.tensors[name]), dtype=tensor.dtype).reshape(tensor.shape)
        if name in made.inexact:
            assert float((got.double() - tensor.double()).abs().max()) <= 5e-3
        else:
            assert torch.equal(got, tensor), name


def test_tied_and_wrapped_weights_are_found_and_frozen_ones_are_not() -> None:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten, trained

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.still = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_buffer("mean", torch.zeros(3))

    objects = {"net": torch.nn.DataParallel(Net()), "other": torch.optim.SGD([torch.zeros(2)])}
    assert trained(objects, flatten(objects)) == {"net/embed.weight"}


# What is said of it


def test_a_restore_and_show_say_that_a_state_is_not_exact(
    chained: tuple[Path, list[State]], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    with caplog.at_level(logging.WARNING, "holdfast.checkpoint.reader"):
        restore(root, Alone())
    said = "1 of 2 tensors are within 0.001 of what was saved, the others are exact"
    assert f"step-3.g1.a1 is not exact: {said}" in caplog.text
    assert main(["checkpoints", "show", str(root)]) == 0
    assert f"not exact  {said}" in capsys.readouterr().out
    assert main(["checkpoints", "show", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["inexact"] == said
    assert {tensor["name"]: tensor.get("bound") for tensor in shown["tensors"]} == {"weight": 1e-3, "moment": None}
    caplog.clear()
    restore(root, Alone(), step=1)
    assert "not exact" not in caplog.text


def test_where_all_may_be_inexact_nothing_is_said_of_others(tmp_path: Path) -> None:
    chain, state, forms = Chain(every=4, threshold=0.1), weights(), {"weight": WEIGHT["weight"]}
    for step in (1, 2):
        state = moved(state, 10, 1e-6)
        save(tmp_path, step, state, chain, forms=forms)
    assert told(manifest(tmp_path, 2)) == "all tensors are within 0.1 of what was saved"
    assert told(manifest(tmp_path, 1)) == ""


def test_a_release_that_does_not_know_patches_refuses_them_by_name_and_reads_the_rest(
    chained: tuple[Path, list[State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = chained
    assert [manifest(root, step).version for step in (1, 2, 3)] == [1, 3, 3]
    monkeypatch.setattr(manifests, "_KNOWN", (1, 2))
    with pytest.raises(UnknownFormatError, match=r"version 3.*use a newer holdfast"):
        restore(root, Alone())
    assert restore(root, Alone(), step=1).loaded is not None
    assert not (root / "quarantine").exists()


# Elsewhere


def test_copies_uploads_and_exports_have_what_a_restore_has(
    chained: tuple[Path, list[State]], tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    whole, elsewhere = read(root, 3)["weight"].tobytes(), tmp_path_factory.mktemp("elsewhere")
    name = CheckpointName(step=3, pair=ONE)
    for one in lineage(FolderStore(root), name):
        with progress("", 0) as shown:
            copy(FolderStore(root), one, FolderStore(elsewhere / "copy"), shown)
    uploader = Uploader(
        source=FolderStore(root),
        target=FolderStore(elsewhere / "up"),
        settings=UploadSettings(url="file:///up", keep_last=1),
        pace=Pace(None),
    )
    assert uploader.upload(name).arrived
    assert uploader.tidy(name) == ""
    assert [read(elsewhere / place, 3)["weight"].tobytes() for place in ("copy", "up")] == [whole, whole]
    assert main(["checkpoints", "export", str(root), str(elsewhere / "w.safetensors")]) == 0
    assert "step-3.g1.a1 is not exact" in capsys.readouterr().err
    assert (elsewhere / "w.safetensors").read_bytes().endswith(whole)


def test_diff_compares_what_a_restore_has(chained: tuple[Path, list[State]]) -> None:
    root, _ = chained
    with (
        Content(FolderStore(root), CheckpointName(step=2, pair=ONE)) as before,
        Content(FolderStore(root), CheckpointName(step=3, pair=ONE)) as after,
        Content(FolderStore(root), CheckpointName(step=3, pair=ONE)) as again,
        progress("", 0) as shown,
    ):
        assert diff(before, after, shown).changed == ("weight",)
        assert diff(after, again, shown).changed == ()


# Made to do harm


def sealed(document: Any) -> bytes:
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + f',"manifestDigest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def forge(root: Path, change: Callable[[Any, bytearray], object]) -> None:
    """Change the newest manifest and its file, with true digests and seal."""
    folder = root / "step-3.g1.a1"
    file, path = folder / "rank-0.safetensors", folder / "MANIFEST.json"
    document, data = json.loads(path.read_bytes()), bytearray(file.read_bytes())
    del document["manifestDigest"]
    document["files"][file.name] = {"bytes": 0}
    change(document, data)
    record = {
        "bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        "chunks": [xxhash.xxh3_128_hexdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)],
    }
    document["files"][file.name] = {**record, **{k: v for k, v in document["files"][file.name].items() if v}}
    file.write_bytes(data)
    path.write_bytes(sealed(document))


def patch_of(document: Any) -> Any:
    return document["tensors"]["weight"]["patches"][0]


def refused(root: Path, why: str) -> None:
    """The newest is refused with a typed error and little memory, and the one before restored."""
    tracemalloc.start()
    try:
        verdict = verify(FolderStore(root), CheckpointName(step=3, pair=ONE))
        found = restore(root, Alone())
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert why in verdict.reason
    assert {one.path: why in one.reason for one in found.lost} == {"step-3.g1.a1": True}
    assert found.step == 2
    assert [path.name.split(".")[0] for path in (root / "quarantine").iterdir() if path.is_dir()] == ["step-3"]


def places(*values: int) -> Callable[[Any, bytearray], None]:
    """Others in the place of the first ones, or from the end on of the last ones."""

    def change(document: Any, data: bytearray) -> None:
        patch = patch_of(document)
        raw = np.array(values, "<u4").tobytes()
        begin = patch["places"] + (patch["count"] * 4 - len(raw) if values[-1] > 1000 else 0)
        data[begin : begin + len(raw)] = raw

    return change


@pytest.mark.parametrize(
    "values", [(300 * 512,), (2**32 - 1,), (7, 7), (9, 8), (153_599, 153_599), (153_599, 153_598)]
)
def test_places_out_of_the_rows_or_twice_or_out_of_order_are_refused(
    chained: tuple[Path, list[State]], values: tuple[int, ...]
) -> None:
    root, _ = chained
    forge(root, places(*values))
    with Content(FolderStore(root), CheckpointName(step=3, pair=ONE)) as content, pytest.raises(DamagedError):
        content.tensor("weight")
    (damage,) = verify(FolderStore(root), CheckpointName(step=3, pair=ONE)).damages
    assert damage.tensors == ("weight",)
    refused(root, "names no elements of its rows in order")


def setter(**fields: Any) -> Callable[[Any, bytearray], None]:
    return lambda document, _: patch_of(document).update(fields)


def twice(document: Any, _: bytearray) -> None:
    document["tensors"]["weight"]["patches"] *= 2


def of_version(version: int) -> Callable[[Any, bytearray], None]:
    return lambda document, _: document.update(version=version)


def without(document: Any, _: bytearray) -> None:
    del document["tensors"]["weight"]["patches"]


def of_integers(document: Any, _: bytearray) -> None:
    document["tensors"]["weight"]["dtype"] = "I32"


def huge(document: Any, _: bytearray) -> None:
    """A file of 10 GB, by its record, in which a patch of 10 GB would lie, and a tensor that it would fit."""
    nbytes = 10 << 30
    document["files"]["rank-0.safetensors"] = {"bytes": nbytes, "chunks": ["0" * 32] * (nbytes // CHUNK_BYTES)}
    patch_of(document).update(count=300 * 512, values=5 << 30)


HARM: list[tuple[str, Callable[[Any, bytearray], object], str]] = [
    ("more elements than there are", setter(count=401), "lies in no file of the commit"),
    ("fewer elements than there are", setter(count=399), "disagree about"),
    ("more elements than rows have", setter(count=300 * 512 + 1), "has 153601 elements"),
    ("10 GB of elements", setter(count=10 << 28), "has 2684354560 elements"),
    ("no number of elements", setter(count=-1), "no such number"),
    ("a fraction of elements", setter(count=0.5), "no such number"),
    ("places behind the file", setter(places=1 << 40), "lies in no file of the commit"),
    ("values behind the file", setter(values=1 << 40), "lies in no file of the commit"),
    ("places and values in one place", setter(values=4096, places=4096), "share bytes"),
    ("rows behind the tensor", setter(start=[1, 0]), "is of no rows of it"),
    ("columns", setter(shape=[300, 5]), "is of no rows of it"),
    ("another number of dimensions", setter(start=[0], shape=[300]), "is of no rows of it"),
    ("no dimensions", setter(start=[], shape=[]), "is of no rows of it"),
    ("the same rows twice", twice, "is of no rows of it"),
    ("integers", of_integers, "is of no rows of it"),
    ("a file of an earlier commit", setter(file="step-1.g1.a1/rank-0.safetensors"), "lies in no file of the commit"),
    ("a file that is no commit's", setter(file="../../etc/passwd"), "lies in no file of the commit"),
    ("a rank's own file", setter(file="rank-0.json"), "lies in no file of the commit"),
    ("a bound of nothing", setter(bound=0.0), "bounds nothing"),
    ("a bound below nothing", setter(bound=-1e-3), "bounds nothing"),
    ("a bound above all", setter(bound=1e300), "bounds nothing"),
    ("a bound in words", setter(bound="little"), "bounds nothing"),
    ("the version of exact deltas", of_version(2), "says what version 3 is for"),
    ("no patches", without, "says what version 2 is for"),
    ("a file of 10 GB", huge, "bytes instead of 10737418240"),
]


@pytest.mark.parametrize(("change", "why"), [pytest.param(change, why, id=name) for name, change, why in HARM])
def test_a_patch_that_is_none_is_refused_with_a_typed_error(
    chained: tuple[Path, list[State]], change: Callable[[Any, bytearray], object], why: str
) -> None:
    root, _ = chained
    forge(root, change)
    refused(root, why)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(["file", "places", "values", "count", "start", "shape", "bound"]),
    value=st.none()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.lists(st.integers(-2, 2**40), max_size=4),
)
def test_whatever_stands_in_a_patch_is_read_or_refused_with_a_typed_error(
    known: tuple[bytes, Any], field: str, value: Any
) -> None:
    document = json.loads(json.dumps(known[1]))
    patch_of(document)[field] = value
    try:
        assert decode(sealed(document)).version == 3
    except DamagedError:
        assert value != known[1]["tensors"]["weight"]["patches"][0][field]


@pytest.fixture
def known(chained: tuple[Path, list[State]]) -> tuple[bytes, Any]:
    raw = (chained[0] / "step-3.g1.a1" / "MANIFEST.json").read_bytes()
    document = json.loads(raw)
    del document["manifestDigest"]
    assert sealed(document) == raw
    return raw, document
