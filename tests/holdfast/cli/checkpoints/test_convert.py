"""Weights of other formats are converted to checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from weight_files import Net, as_pt, as_safetensors, loaded, run, same

from holdfast import checkpoint
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.errors import StateError

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


def as_old_pt(model: Net, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.bin", _use_new_zipfile_serialization=False)
    return path / "w.bin"


def as_sharded(model: Net, path: Path) -> Path:
    from safetensors.torch import save_file

    names = sorted(model.state_dict())
    files = {name: f"model-{1 + at % 2:05}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: model.state_dict()[name].clone() for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def as_dcp(model: Net, path: Path) -> Path:
    from torch.distributed import checkpoint as dcp

    dcp.save(model.state_dict(), checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def test_stripping_of_wrapper_prefixes_is_offered(tmp_path: Path) -> None:
    """A part of a model that has the same name is kept."""
    inside = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.save({f"module._orig_mod.{name}": one for name, one in inside.state_dict().items()}, tmp_path / "ddp.pt")
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert run("convert", tmp_path / "ddp.pt", tmp_path / "asis") == 0
    with pytest.raises(StateError, match=r"all names .* begin with 'module\.', .* --strip-prefix module\."):
        checkpoint.load(tmp_path / "asis", model=other)
    assert run("convert", tmp_path / "ddp.pt", tmp_path / "ckpt", "--strip-prefix", "module.") == 0
    checkpoint.load(tmp_path / "ckpt", model=other)
    assert same(other.state_dict(), inside.state_dict())


def test_a_prefix_is_stripped_of_all_names_or_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    torch.save({"model": own.state_dict(), "step": 3}, tmp_path / "own.pt")
    words = ("convert", tmp_path / "own.pt", tmp_path / "ckpt", "--split", "--strip-prefix", "module.")
    assert run(*words) == 2
    assert "in no state dict do all names begin with it" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("step-*"))


def test_small_file_with_an_overlapping_tensor_fills_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = {"list": [torch.zeros(1).expand(20, 10**9)]}
    torch.save(nested, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "ckpt") == 1
    assert "a tensor of shape [20, 1000000000] in it has 80000000000" in capsys.readouterr().err


def test_small_tensor_with_overlapping_strides_is_accepted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(4)}, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "ckpt") == 0


@pytest.mark.parametrize("write", [as_pt, as_old_pt, as_safetensors, as_sharded, as_dcp])
def test_weights_of_each_format_become_a_commit(
    model: Net, tmp_path: Path, write: Callable[[Net, Path], Path]
) -> None:
    source = write(model, tmp_path)

    assert run("convert", source, tmp_path / "ckpt", "--step", 7) == 0

    assert same(loaded(tmp_path / "ckpt").state_dict(), model.state_dict())
    assert run("verify", tmp_path / "ckpt") == 0


def test_tied_weights_of_a_pt_file_lie_in_the_commit_once(model: Net, tmp_path: Path) -> None:
    assert run("convert", as_pt(model, tmp_path), tmp_path / "ckpt") == 0
    store = FolderStore(tmp_path / "ckpt")
    assert len(store.manifest(store.commits()[0]).tensors) == len(model.state_dict()) - 1


def test_conjugated_tensors_of_a_pt_file_are_taken(tmp_path: Path) -> None:
    conj = torch.tensor([1 + 2j, 3 - 4j]).conj()
    torch.save({"conj": conj}, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "ckpt") == 0
    module = torch.nn.ParameterDict({"conj": torch.nn.Parameter(torch.zeros_like(conj))})
    checkpoint.load(tmp_path / "ckpt", model=module)
    assert torch.equal(module["conj"], conj)


def test_parts_of_a_file_become_objects_of_their_own(model: Net, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model.norm(model.body[0](model.embed(torch.tensor([1]))).bfloat16()).float().sum().backward()
    optimizer.step()
    whole = {"step": 5, "net": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    torch.save(whole, tmp_path / "all.pt")

    assert run("convert", tmp_path / "all.pt", tmp_path / "ckpt", "--key", "net", "--split") == 0

    fresh = Net(seed=9)
    other = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    checkpoint.load(tmp_path / "ckpt", model=fresh, optimizer=other)
    assert same(fresh.state_dict(), model.state_dict())
    assert other.param_groups[0]["lr"] == 0.25
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_part_of_a_dcp_folder_is_converted_without_non_tensors(model: Net, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    whole = {"app": {"model": model.state_dict(), "epoch": 3}, "note": "by hand"}
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)

    assert run("convert", tmp_path / "dcp", tmp_path / "ckpt", "--key", "app.model") == 0

    assert same(loaded(tmp_path / "ckpt").state_dict(), model.state_dict())
