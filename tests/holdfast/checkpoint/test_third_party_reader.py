"""A reader of at most 100 lines, written by the format page and without holdfast, reads checkpoints of holdfast."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import save
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save as save_snapshot
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId, Claim

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "third_party_reader.py"


class Net(torch.nn.Module):
    """Tied weights, bf16, an empty and a scalar tensor, and a tensor larger than a part with a digest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(64, 8)
        self.head = torch.nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(8, dtype=torch.bfloat16)
        self.register_buffer("large", torch.randn(1100, 2048))
        self.register_buffer("none", torch.zeros(0, 5))
        self.register_buffer("count", torch.tensor(12345678901))


def bits(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    flat = value.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if value.numel() else b""


def assert_same(read: dict[str, Any], state: dict[str, Any]) -> None:
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].shape == tuple(tensor.shape)
        assert bits(read[name]) == bits(tensor)


def test_the_reader_is_short_and_knows_no_holdfast() -> None:
    text = SCRIPT.read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    named = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}

    assert len(text.splitlines()) <= 100
    assert named == {"json", "re", "pathlib", "numpy", "xxhash"}


def test_it_reads_a_commit_of_one_rank_bit_for_bit(tmp_path: Path, reader: ModuleType) -> None:
    model = Net()
    save(tmp_path, step=3, model=model)

    commit, manifest = reader.newest(tmp_path)
    tensors = reader.read_tensors(commit, manifest)

    assert_same(reader.build(manifest["state"]["objects"]["model"], tensors), model.state_dict())
    assert len(tensors) == len(model.state_dict()) - 1  # tied weights are stored once


def test_it_reads_a_commit_of_two_ranks_bit_for_bit(
    tmp_path: Path, reader: ModuleType, world: Callable[..., Any]
) -> None:
    from holdfast.checkpoint.state.flatten import flatten

    model = Net()
    flat = flatten({"model": model})

    def snapshot() -> Snapshot:
        return Snapshot(
            name=CheckpointName(step=5, attempt_id=AttemptId(1, 2)),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
        )

    world(2, lambda exchange: save_snapshot(tmp_path, snapshot(), exchange))

    commit, manifest = reader.newest(tmp_path)
    assert sorted(manifest["files"]) == ["rank-0.json", "rank-0.safetensors", "rank-1.json", "rank-1.safetensors"]
    tensors = reader.read_tensors(commit, manifest)
    assert_same(reader.build(manifest["state"]["objects"]["model"], tensors), model.state_dict())


def test_it_reads_a_delta_bit_for_bit(tmp_path: Path, reader: ModuleType) -> None:
    from holdfast.checkpoint.io.staging_buffer import Arena
    from holdfast.checkpoint.ranks.exchange import SingleRank
    from holdfast.checkpoint.saving.incremental import Chain
    from holdfast.checkpoint.saving.planner import Planner
    from holdfast.checkpoint.saving.stager import stage
    from holdfast.checkpoint.saving.writer import commit
    from holdfast.checkpoint.state.flatten import flatten

    model, chain = Net(), Chain(every=4)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.large[step * 300] += 1
        flat = flatten({"model": model})
        snapshot = Snapshot(
            name=CheckpointName(step=step, attempt_id=AttemptId(1, 1)),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
        )
        staged = stage(snapshot, Arena(), Planner(), rank=0, size=1)
        assert commit(FolderStore(tmp_path), staged, SingleRank(), chain=chain).committed

    folder, manifest = reader.newest(tmp_path)
    assert (manifest["version"], manifest["parent"]) == (2, "step-2.g1.a1")
    tensors = reader.read_tensors(folder, manifest)
    assert_same(reader.build(manifest["state"]["objects"]["model"], tensors), model.state_dict())


def test_it_reads_a_commit_that_is_not_exact_as_holdfast_does(
    tmp_path: Path, reader: ModuleType, world: Callable[..., Any]
) -> None:
    from holdfast.checkpoint.io.staging_buffer import Arena
    from holdfast.checkpoint.ranks.exchange import SingleRank
    from holdfast.checkpoint.restore.search import restore
    from holdfast.checkpoint.saving.incremental import Chain
    from holdfast.checkpoint.saving.planner import Planner
    from holdfast.checkpoint.saving.stager import stage
    from holdfast.checkpoint.saving.writer import commit
    from holdfast.checkpoint.state.flatten import flatten, trained

    model, chains = torch.nn.Linear(1100, 512), [Chain(every=4, threshold=1e-2) for _ in range(2)]
    for step in (1, 2):
        with torch.no_grad():
            model.weight += 1e-4
            model.weight[::40, ::7] += step
        flat = flatten({"model": model})
        snapshot = Snapshot(
            name=CheckpointName(step=step, attempt_id=AttemptId(1, 1)),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
            inexact=trained({"model": model}, flat),
        )

        def act(exchange: Any, snapshot: Snapshot = snapshot) -> bool:
            staged = stage(snapshot, Arena(), Planner(), rank=exchange.rank, size=2)
            return commit(FolderStore(tmp_path), staged, exchange, chain=chains[exchange.rank]).committed

        assert all(world(2, act))

    folder, manifest = reader.newest(tmp_path)
    assert manifest["version"] == 3
    assert len(manifest["tensors"]["model/weight"]["patches"]) == 2
    tensors = reader.read_tensors(folder, manifest)
    loaded = restore(tmp_path, SingleRank()).loaded
    assert loaded is not None
    assert {name: bits(tensor) for name, tensor in tensors.items()} == {
        name: bytes(data) for name, data in loaded.tensors.items()
    }


def test_it_takes_the_commit_that_the_claims_allow(
    tmp_path: Path, reader: ModuleType, commit: Callable[..., Any]
) -> None:
    commit(tmp_path, 10, {"a": b"1"})
    commit(tmp_path, 20, {"a": b"2"})
    write_claim(
        tmp_path,
        Claim(
            attempt_id=AttemptId(2, 1),
            job_uid="job-1",
            publication="p2",
            from_step=10,
            from_attempt_id=AttemptId(1, 1),
        ),
    )

    assert reader.newest(tmp_path)[0].name == "step-10.g1.a1"

    commit(tmp_path, 15, {"a": b"3"}, AttemptId(2, 1))
    assert reader.newest(tmp_path)[0].name == "step-15.g2.a1"


@pytest.mark.parametrize("file", ["MANIFEST.json", "rank-0.safetensors", "rank-0.json"])
def test_it_finds_a_flipped_bit_in_every_file(tmp_path: Path, reader: ModuleType, file: str) -> None:
    path = save(tmp_path, step=1, model=torch.nn.Linear(4, 4)) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)

    with pytest.raises(reader.UnusableError, match="damaged"):
        reader.read_tensors(*reader.newest(tmp_path))
