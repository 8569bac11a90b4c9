"""Copies, uploads and commands with deltas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from delta_states import (
    BLOCK,
    ONE,
    Tensors,
    assert_is,
    flip,
    fresh,
    manifest,
    save,
    there,
    touch,
)

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.saving import writer
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.cli.checkpoints.access.progress_bar import progress
from holdfast.cli.checkpoints.copy import Uncopied, copy, copy_all, lineage
from holdfast.cli.main import main

# Copies


def test_an_upload_takes_along_what_it_stands_on_and_keeps_it(tmp_path: Path) -> None:
    tensors, chain, root = fresh(), Chain(every=9), tmp_path / "shared"
    target = FolderStore(tmp_path / "copies")
    uploader = Uploader(
        source=FolderStore(root),
        target=target,
        settings=UploadSettings(url="file:///copies", keep_last=1),
        pace=Pace(None),
    )
    for step in (1, 2, 3):
        touch(tensors, "wide", step * BLOCK)
        save(root, step, tensors, chain)
    newest = CheckpointName(step=3, attempt_id=ONE)
    assert uploader.upload(newest).arrived
    assert uploader.delete_replaced(newest) == ""
    assert there(tmp_path / "copies") == [1, 2, 3]
    shutil.rmtree(root)
    assert_is(tmp_path / "copies", 3, tensors)


def test_a_copy_takes_along_what_it_stands_on_and_nothing_else(tmp_path: Path) -> None:
    tensors, chain, root = fresh(), Chain(every=9), tmp_path / "ckpt"
    for step in (1, 2, 3):
        touch(tensors, "scalar", 0)
        save(root, step, tensors, chain)
    source, target, name = FolderStore(root), FolderStore(tmp_path / "copy"), CheckpointName(step=3, attempt_id=ONE)
    assert [one.step for one in lineage(source, name)] == [1, 3]
    for one in lineage(source, name):
        with progress("", 0) as shown:
            copy(source, one, target, shown)
    assert_is(tmp_path / "copy", 3, tensors)


def test_what_stands_on_a_damaged_commit_is_not_copied(chained: tuple[Path, Tensors], tmp_path: Path) -> None:
    flip(chained[0] / "step-1.g1.a1" / "rank-0.safetensors", 9000)
    target = FolderStore(tmp_path / "copy")
    names = [CheckpointName(step=step, attempt_id=ONE) for step in (3, 2, 1)]
    bad = [one for one in copy_all(FolderStore(chained[0]), names, target) if isinstance(one, Uncopied)]
    assert [one.name.step for one in bad] == [1, 2, 3]
    assert all("step-1.g1.a1, which was not copied" in one.reason for one in bad[1:])
    assert list(target.commits()) == []


def test_verify_names_the_tensor_with_corrupt_bytes_in_a_base(
    chained: tuple[Path, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    place = manifest(root, 1).tensors["wide"].chunks[0].offset
    flip(root / "step-1.g1.a1" / "rank-0.safetensors", place + 20 * BLOCK)
    assert main(["checkpoints", "verify", str(root), "--step", "3", "--json"]) == 1
    (judged,) = json.loads(capsys.readouterr().out)["commits"]
    assert judged["damage"][0]["file"] == "step-1.g1.a1/rank-0.safetensors"
    assert "wide" in judged["damage"][0]["tensors"]


def test_show_and_ls_print_the_base_and_size_of_a_delta(
    chained: tuple[Path, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    assert main(["checkpoints", "show", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["parent"], shown["standsOn"]) == ("step-2.g1.a1", ["step-1.g1.a1", "step-2.g1.a1"])
    assert shown["bytes"] == sum(shown["files"].values()) < 200_000
    assert main(["checkpoints", "show", str(root)]) == 0
    assert "depends on  step-1.g1.a1, step-2.g1.a1" in capsys.readouterr().out


def test_export_writes_a_delta_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from holdfast.checkpoint.state.flatten import flatten

    model, chain = torch.nn.Linear(300, 300), Chain(every=4)
    for step in (1, 2):
        with torch.no_grad():
            model.bias += 1
        flat = flatten({"model": model})
        made = Snapshot(
            name=CheckpointName(step=step, attempt_id=ONE),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
        )
        writer.commit(
            FolderStore(tmp_path / "ckpt"), stage(made, Arena(), Planner(), rank=0, size=1), SingleRank(), chain=chain
        )
    assert manifest(tmp_path / "ckpt", 2).version == 2
    assert main(["checkpoints", "export", str(tmp_path / "ckpt"), str(tmp_path / "w.safetensors")]) == 0
    found = safetensors.load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
