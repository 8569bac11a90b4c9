"""Deltas of a job: retention, later attempts, and steps that are complete in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from delta_states import (
    BLOCK,
    ONE,
    Tensors,
    assert_is,
    flip,
    fresh,
    manifest,
    read,
    snapshot,
    there,
    touch,
)

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.settings import TierSettings, announced
from holdfast.core.attempt import AttemptId

# In a job


def engine(root: Path, attempt: int, *, keep_last: int = 1, full_every: int = 3) -> CheckpointManager:
    made = CheckpointManager(
        root, keep_last=keep_last, resume=Resume.ALWAYS, on_foreign=lambda _: None, full_every=full_every
    )
    made.enter(Attempt(attempt_id=AttemptId(1, attempt), job_uid="job-1", publication="p", run_id="r"), SingleRank())
    found = made.restore()
    made.claim(step=found.step, attempt_id=found.attempt_id)
    return made


def test_retention_keeps_what_a_delta_needs_and_nothing_longer(tmp_path: Path) -> None:
    tensors, job, seen = fresh(), engine(tmp_path, 1), []
    for step in range(1, 6):
        touch(tensors, "wide", step * BLOCK)
        assert job.save(snapshot(step, tensors)).committed
        seen.append(there(tmp_path))
    assert seen == [[1], [1, 2], [1, 2, 3], [4], [4, 5]]
    assert_is(tmp_path, 5, tensors)


def test_another_attempt_begins_with_a_full_commit(tmp_path: Path) -> None:
    tensors = fresh()
    first = engine(tmp_path, 1, keep_last=9, full_every=9)
    for step in (1, 2):
        first.save(snapshot(step, tensors))
    second = engine(tmp_path, 2, keep_last=9, full_every=9)
    second.save(snapshot(3, tensors, AttemptId(1, 2)))
    assert [
        line.depends_on
        for line in (
            manifest(tmp_path, 2),
            catalog.read_manifest(tmp_path, CheckpointName(step=3, attempt_id=AttemptId(1, 2))),
        )
    ] == [
        {"step-1.g1.a1"},
        frozenset(),
    ]


def test_without_being_asked_for_there_are_none(tmp_path: Path) -> None:
    job = engine(tmp_path, 1, keep_last=9, full_every=1)
    tensors = fresh()
    for step in (1, 2):
        job.save(snapshot(step, tensors))
    assert manifest(tmp_path, 2).version == 1


# With a memory tier


def beside_memory(root: Path, attempt: int = 1) -> CheckpointManager:
    """A manager with complete steps in memory and deltas in the folder. It has already read both."""
    memory = root / "memory"
    memory.mkdir(exist_ok=True)
    me = Neighbour(node="a", pod="a", host="127.0.0.1", port=1)
    said = TierSettings(
        folder=memory, limit=None, interval=1, peer_interval=None, per_second=None, me=me, key=b"k"
    ).to_json()
    made = CheckpointManager(
        root / "shared", keep_last=9, resume=Resume.ALWAYS, on_foreign=lambda _: None, full_every=9
    )
    made.enter(Attempt(attempt_id=AttemptId(1, attempt), job_uid="job-1", publication="p", run_id="r"), SingleRank())
    made.enter_tiers({"memory": said}, [announced({"memory": said})], 0, lambda: None)
    return made


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Tensors]:
    """Steps 1 and 2, each in memory and durable. The durable files of step 2 are small."""
    job, tensors = beside_memory(tmp_path), fresh()
    job.restore()
    job.claim(step=0, attempt_id=None)
    for step in (1, 2):
        touch(tensors, "wide", step * BLOCK)
        assert job.save_on(job.tiers[0], snapshot(step, tensors)).committed
        assert job.save(snapshot(step, tensors)).committed
    assert manifest(tmp_path / "shared", 2).depends_on == {"step-1.g1.a1"}
    close(job)
    return tmp_path, tensors


def close(job: CheckpointManager) -> None:
    (memory,) = job.tiers
    memory.close()


def restored(root: Path, tensors: Tensors) -> Any:
    job = beside_memory(root, attempt=2)
    found = job.restore()
    assert found.loaded is not None
    assert {name: bytes(found.loaded.tensors[name]) for name in tensors} == {n: bytes(t) for n, t in tensors.items()}
    close(job)
    return found, job.read_from(found)


def test_step_complete_in_memory_is_restored_despite_its_delta(
    both: tuple[Path, Tensors],
) -> None:
    """The durable delta of the same step counts as no fault."""
    root, tensors = both
    found, tiers = restored(root, tensors)
    assert (found.step, tiers) == (2, ["memory"])
    assert (found.quarantined, found.lost) == ((), ())
    assert restored(root, tensors)[1] == ["memory"], "nothing was set aside"


def test_corrupt_memory_falls_back_to_the_delta_without_loss(
    both: tuple[Path, Tensors],
) -> None:
    root, tensors = both
    for slot in (root / "memory").glob("*.slot-?"):
        flip(slot, 1 << 20)
    found, tiers = restored(root, tensors)
    assert (found.step, tiers) == (2, ["shared"])
    assert [bad.path for bad in found.quarantined] == ["step-2.g1.a1"]
    assert found.quarantined[0].reason.startswith("memory:")
    assert found.lost == ()


def test_where_the_durable_delta_is_damaged_memory_has_all_of_it(both: tuple[Path, Tensors]) -> None:
    root, tensors = both
    shutil.rmtree(root / "shared" / "step-1.g1.a1")
    found, tiers = restored(root, tensors)
    assert (found.step, tiers, found.lost) == (2, ["memory"], ())


def test_what_is_good_nowhere_falls_back_to_the_step_before(both: tuple[Path, Tensors]) -> None:
    root, tensors = both
    for slot in (root / "memory").glob("*.slot-?"):
        flip(slot, 1 << 20)
    (file,) = (root / "shared" / "step-2.g1.a1").glob("*.safetensors")
    flip(file, file.stat().st_size - 5)
    touch(tensors, "wide", 2 * BLOCK)
    found, tiers = restored(root, tensors)
    assert (found.step, [gone.path for gone in found.lost]) == (1, ["step-2.g1.a1"])
    assert "shared" in tiers


# checkpoint-12


def bytes_of(root: Path, step: int) -> int:
    return sum(path.stat().st_size for path in (root / f"step-{step}.g1.a1").iterdir())


def adapted(rank: int) -> tuple[Any, Any]:
    """A frozen model with a LoRA adapter on each layer, and Adam for the adapters."""
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(512, 512).requires_grad_(False)
            self.down = torch.nn.Linear(512, rank, bias=False)
            self.up = torch.nn.Linear(rank, 512, bias=False)

        def forward(self, value: Any) -> Any:
            return self.base(value) + self.up(self.down(value))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(6)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def test_deltas_of_an_adapted_model_are_a_tenth_of_full_ones(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten

    model, optimizer = adapted(rank=2)
    job, then = engine(tmp_path, 1, keep_last=9, full_every=9), {}
    for step in (1, 2, 3):
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = flatten({"model": model, "optimizer": optimizer})
        made = Snapshot(
            name=CheckpointName(step=step, attempt_id=ONE),
            specs=flat.specs,
            read=flat.read,
            fill=flat.fill,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
        )
        assert job.save(made).committed
        then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert bytes_of(tmp_path, 2) * 10 <= bytes_of(tmp_path, 1)
    assert bytes_of(tmp_path, 3) * 10 <= bytes_of(tmp_path, 1)
    loaded = read(tmp_path, 3)
    for name, tensor in then.items():
        assert bytes(loaded.tensors[f"model/{name}"]) == tensor.numpy().tobytes()
