"""DTensors sharded along any dimensions, and pipeline stages, are saved once and load in any other layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast import checkpoint
from holdfast.checkpoint.folder.catalog import read_manifest
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.cli.main import main
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import StateError

SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMIT = CheckpointName(step=1, attempt_id=AttemptId(0, 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, together: Callable[..., list[str]]) -> Path:
    """Four ranks save these folders, and load the state over the transposed mesh, by rows, and in other stages."""
    folder = tmp_path_factory.mktemp("meshes")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [{**environment, "RANK": str(rank)} for rank in range(4)]
    together([[sys.executable, SCRIPTS / "meshes.py", folder]] * 4, ranks)
    return folder


def feed_forward() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = torch.nn.Embedding(5, 4), torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def manifest_of(folder: Path) -> Any:
    return read_manifest(folder, COMMIT)


def test_one_process_loads_a_two_dimensional_shard_layout(saved: Path) -> None:
    """Tensor parallelism and FSDP each split one of the dimensions."""
    net = feed_forward()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    checkpoint.load(saved / "tier", model=net, optimizer=optimizer)
    expected = torch.load(saved / "whole.pt", weights_only=True)
    found = dict(net.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": one for name, one in state.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    assert len(expected) == 4 + 4 * 3


def test_tied_weights_missing_on_a_rank_are_saved_once(saved: Path) -> None:
    """One rank holds no row of the tied weights. They stay tied after loading."""
    assert manifest_of(saved / "tied").tensors.keys() == {"model/embed.weight", "model/other.weight"}
    model = Tied()
    checkpoint.load(saved / "tied", model=model)
    assert model.head.weight is model.embed.weight
    expected = torch.load(saved / "tied.pt", weights_only=True)
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())


@pytest.mark.thorough
def test_nothing_of_it_is_written_twice(saved: Path) -> None:
    manifest = manifest_of(saved / "tier")
    state = torch.load(saved / "whole.pt", weights_only=True)
    written = sum(chunk.nbytes for record in manifest.tensors.values() for chunk in record.chunks)
    assert written == sum(one.nbytes for one in state.values())
    assert manifest.tensors["model/2.weight"].shape == (5, 12)
    starts = [chunk.start for chunk in manifest.tensors["model/2.weight"].chunks]
    assert starts == [(0, 0), (0, 6), (3, 0), (3, 6)]


def test_manifest_names_the_meshes_and_the_format_it_requires(saved: Path) -> None:
    assert (manifest_of(saved / "tier").mesh, manifest_of(saved / "tier").version) == ({"data": 2, "tensor": 2}, 4)
    assert manifest_of(saved / "odd").mesh == {"line": 4, "up": 2, "across": 2}
    assert manifest_of(saved / "again").version == 1, "by rows again, any earlier release reads it"


def test_one_process_reads_all_pipeline_stages_or_a_part(saved: Path) -> None:
    nets = {f"stage{stage}": torch.nn.Linear(4, 4 + stage) for stage in range(2)}
    assert checkpoint.load(saved / "stages", **nets) is not None
    alone = torch.nn.Linear(4, 5)
    checkpoint.load(saved / "stages", stage1=alone)
    assert torch.equal(alone.weight, nets["stage1"].weight)
    assert sorted(manifest_of(saved / "stages").objects) == ["optimizer0", "optimizer1", "stage0", "stage1"]
    with pytest.raises(StateError, match=r"holds \['optimizer0', .*, but load\(\) received \['stage7'\]"):
        checkpoint.load(saved / "stages", stage7=alone)


def test_what_cannot_be_saved_leaves_nothing(saved: Path) -> None:
    assert not (saved / "bad").exists()


def test_a_flipped_bit_in_a_box_is_found_and_its_tensor_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "verify", str(saved / "tier")]) == 0
    copy = tmp_path / "copy"
    assert main(["checkpoints", "copy", str(saved / "tier"), str(copy)]) == 0
    last = manifest_of(copy).tensors["model/2.weight"].chunks[-1]
    path = copy / str(COMMIT) / last.file
    data = bytearray(path.read_bytes())
    data[last.offset] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["checkpoints", "verify", str(copy), "--json"]) != 0
    assert "model/2.weight" in capsys.readouterr().out


def test_export_is_complete_and_diff_by_rows_finds_no_change(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`diff` compares the checkpoint with the same state, saved by rows."""
    expected = torch.load(saved / "whole.pt", weights_only=True)
    assert main(["checkpoints", "export", str(saved / "tier"), str(tmp_path / "model.safetensors")]) == 0
    exported = load_file(tmp_path / "model.safetensors")
    assert sorted(exported) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(torch.equal(one, expected[name]) for name, one in exported.items())
    capsys.readouterr()
    main(["checkpoints", "diff", str(saved / "tier"), str(saved / "again"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["changed"], told["shape"], told["added"], told["missing"]) == ([], [], [], [])


def test_another_program_reads_boxes_by_the_page_alone(saved: Path, reader: ModuleType) -> None:
    commit, manifest = reader.newest(saved / "odd")
    box = reader.build(manifest["state"]["objects"]["box"], reader.read_tensors(commit, manifest))
    expected = torch.load(saved / "odd.pt", weights_only=True)
    assert sorted(box) == sorted(expected)
    assert all(box[name].tolist() == one.tolist() for name, one in expected.items())
