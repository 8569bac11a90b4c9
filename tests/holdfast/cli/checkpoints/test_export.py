"""Checkpoints are exported to safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from weight_files import Net, loaded, run, same

from holdfast import checkpoint

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


# Export


def test_an_export_is_what_safetensors_loads_tied_weights_once(model: Net, tmp_path: Path) -> None:
    from safetensors.torch import load_model

    checkpoint.save(tmp_path / "ckpt", step=1, model=model)

    assert run("export", tmp_path / "ckpt", tmp_path / "out" / "w.safetensors") == 0

    file = tmp_path / "out" / "w.safetensors"
    read = load_file(file)
    kept = "embed.weight" if "embed.weight" in read else "head.weight"
    assert len(read) == len(model.state_dict()) - 1
    assert same(read, {name: model.state_dict()[name] for name in read})
    assert torch.equal(read[kept], model.head.weight)
    fresh = Net(seed=9)
    load_model(fresh, file)
    assert same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("key", ["", "model", "net"])
def test_a_commit_that_was_made_through_dcp_is_exported_as_well(model: Net, tmp_path: Path, key: str) -> None:
    from torch.distributed import checkpoint as dcp

    from holdfast.checkpoint.dcp.writer import StorageWriter

    state = {key: model.state_dict(), "epoch": 3} if key else model.state_dict()
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt", step=4), no_dist=True)

    assert run("export", tmp_path / "ckpt", tmp_path / "w.safetensors", "--object", key or "model") == 0

    read = load_file(tmp_path / "w.safetensors")
    assert same(read, model.state_dict())
    assert run("export", tmp_path / "ckpt", tmp_path / "x.safetensors", "--object", "ema") == 2


def test_an_export_finds_tensors_in_mappings_that_keep_an_order(tmp_path: Path) -> None:
    class Box:
        def state_dict(self) -> Any:
            return {"w": torch.ones(2), "b": {"z": torch.zeros(3), "a": torch.ones(1)}}

        def load_state_dict(self, state: Any) -> None: ...

    checkpoint.save(tmp_path, step=1, box=Box())
    assert run("export", tmp_path, tmp_path / "box.safetensors", "--object", "box") == 0
    assert load_file(tmp_path / "box.safetensors").keys() == {"w", "b.z", "b.a"}


def test_sharded_export_has_an_index_and_files_of_requested_size(model: Net, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ckpt", step=1, model=model)

    assert run("export", tmp_path / "ckpt", tmp_path / "hf", "--max-shard-size", "3kB") == 0

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())
    parts = {file: load_file(tmp_path / "hf" / file) for file in set(index["weight_map"].values())}
    read = {name: parts[file][name] for name, file in index["weight_map"].items()}
    assert len(parts) > 2
    assert same(read, {name: model.state_dict()[name] for name in read})
    assert len(read) == len(model.state_dict()) - 1
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read.values())
    sizes = [sum(t.numel() * t.element_size() for t in part.values()) for part in parts.values()]
    assert all(size <= 3000 or len(part) == 1 for size, part in zip(sizes, parts.values(), strict=True))


@pytest.mark.parametrize("target", ["hf", "w.safetensors"])
def test_export_can_be_imported_with_tied_weights_stored_once(model: Net, tmp_path: Path, target: str) -> None:
    size = ("--max-shard-size", "3kB") if target == "hf" else ()
    checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    assert run("export", tmp_path / "ckpt", tmp_path / target, *size) == 0
    assert run("convert", tmp_path / target, tmp_path / "back") == 0

    back = loaded(tmp_path / "back")
    assert same(back.state_dict(), model.state_dict())
    assert back.head.weight is back.embed.weight


def test_export_with_a_corrupt_last_part_leaves_no_obstacle(tmp_path: Path) -> None:
    large = torch.nn.ParameterDict({f"p{i}": torch.zeros(3 << 20) for i in range(2)})
    file = checkpoint.save(tmp_path / "ckpt", step=1, model=large) / "rank-0.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\x55")
    words = ("export", tmp_path / "ckpt", tmp_path / "hf", "--max-shard-size", "13MB")
    assert run(*words) == 1
    assert list((tmp_path / "hf").iterdir()) == []
    file.write_bytes(good)
    assert run(*words) == 0


@pytest.mark.parametrize("intact", [True, False])
def test_an_export_leaves_files_of_others_alone(model: Net, tmp_path: Path, intact: bool) -> None:
    commit = checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    if not intact:
        (commit / "rank-0.safetensors").write_bytes(b"")
    (tmp_path / "hf").mkdir()
    theirs = tmp_path / "hf" / "model.safetensors.tmp"
    theirs.write_text("mine")
    assert run("export", commit, tmp_path / "hf") == (0 if intact else 1)
    assert theirs.read_text() == "mine"


def test_an_export_that_cannot_be_published_whole_is_taken_back(
    model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    rename = Path.rename

    def fail_at_the_index(path: Path, to: Path) -> Path:
        if to.name.endswith("index.json"):
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_at_the_index)
    assert run("export", commit, tmp_path / "hf", "--max-shard-size", "3kB") == 3
    assert list((tmp_path / "hf").iterdir()) == []


def test_export_replaces_nothing_and_leaves_nothing_if_corrupt(
    model: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    assert run("export", commit, tmp_path / "hf") == 0
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert run("export", commit, tmp_path / "hf") == 3
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before

    shard = commit / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    assert run("export", commit, tmp_path / "other") == 1
    assert list((tmp_path / "other").iterdir()) == []
    assert run("export", tmp_path / "ckpt", tmp_path / "x", "--object", "ema") == 2
    assert "one of model" in capsys.readouterr().err
