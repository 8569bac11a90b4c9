"""Weights of other formats become commits, and commits become files that other programs load: bit for bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.access import progress_bar
from holdfast.cli.main import main
from holdfast.core.errors import StateError

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


class Net(torch.nn.Module):
    """Tied weights, bf16, an empty tensor and a scalar."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(16, dtype=torch.bfloat16)
        self.body = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("none", torch.zeros(0, 5))
        self.register_buffer("count", torch.tensor(12345678901))


@pytest.fixture
def model() -> Net:
    made = Net()
    torch.nn.init.normal_(made.norm.weight)
    return made


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def run(*words: object) -> int:
    return main(["checkpoints", *map(str, words)])


def loaded(folder: Path) -> Net:
    fresh = Net(seed=9)
    assert checkpoint.load(folder, model=fresh) is not None
    return fresh


# In


def as_pt(model: Net, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.pt")
    return path / "w.pt"


def as_old_pt(model: Net, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.bin", _use_new_zipfile_serialization=False)
    return path / "w.bin"


def as_safetensors(model: Net, path: Path) -> Path:
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "w.safetensors")
    return path / "w.safetensors"


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


def test_names_of_a_wrapper_are_offered_to_be_stripped_and_a_part_of_that_name_is_kept(tmp_path: Path) -> None:
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
    assert "no state dict of which every name begins with it" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("step-*"))


def test_a_small_file_does_not_fill_the_memory_by_a_tensor_that_lies_over_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = {"list": [torch.zeros(1).expand(20, 10**9)]}
    torch.save(nested, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "ckpt") == 1
    assert "a tensor of shape [20, 1000000000] in it 80000000000" in capsys.readouterr().err


def test_a_tensor_that_lies_over_itself_is_taken_where_it_is_small(tmp_path: Path) -> None:
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


def test_a_part_of_a_dcp_folder_is_taken_and_what_is_no_tensor_is_left_out(model: Net, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    whole = {"app": {"model": model.state_dict(), "epoch": 3}, "note": "by hand"}
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)

    assert run("convert", tmp_path / "dcp", tmp_path / "ckpt", "--key", "app.model") == 0

    assert same(loaded(tmp_path / "ckpt").state_dict(), model.state_dict())


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_what_would_run_code_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    torch.save({"model": Evil(mark)}, tmp_path / "evil.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))

    for source in ("evil.pt", "dcp"):
        assert run("convert", tmp_path / source, tmp_path / "ckpt") == 3
        assert "mkdir" in capsys.readouterr().err
    assert not mark.exists()
    assert not (tmp_path / "ckpt").exists()


def test_a_flipped_bit_in_a_file_of_torch_save_is_damage_where_it_has_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = torch.full((1000,), 7.0)
    for name, sums in (("with", True), ("without", False)):
        torch.serialization.set_crc32_options(sums)
        torch.save({"w": marked}, tmp_path / f"{name}.pt")
    torch.serialization.set_crc32_options(True)
    assert run("convert", tmp_path / "without.pt", tmp_path / "ckpt", "--step", 1) == 0

    path = tmp_path / "with.pt"
    data = bytearray(path.read_bytes())
    data[data.index(marked[:2].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert run("convert", path, tmp_path / "ckpt", "--step", 2) == 1
    assert "its checksum differs" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("write", "labels"), [(as_pt, {"read", "convert"}), (as_safetensors, {"convert"})])
def test_on_a_terminal_a_conversion_shows_how_far_it_is(
    model: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], labels: set[str]
) -> None:
    monkeypatch.setattr(progress_bar, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert run("convert", write(model, tmp_path), tmp_path / "ckpt") == 0
    assert set(re.findall(r"K(\w+) \[#{24}\] 100%", terminal.getvalue())) == labels


@pytest.mark.parametrize("word", ["size", "chunks", "properties"])
def test_records_of_dcp_that_lack_what_such_records_have_are_damage(tmp_path: Path, word: str) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301  (written just now)
    del vars(metadata.state_dict_metadata["w"])[word]
    path.write_bytes(pickle.dumps(metadata))
    assert run("convert", tmp_path / "dcp", tmp_path / "ckpt", "--step", 1) == 1
    path.write_bytes(b"\x80\x05\x96" + (1 << 44).to_bytes(8, "little"))
    assert run("convert", tmp_path / "dcp", tmp_path / "ckpt", "--step", 1) == 1
    assert not (tmp_path / "ckpt").exists()


def test_names_that_would_meet_are_refused_before_one_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({1: {"a": torch.ones(1)}, "1": {"a": torch.ones(2)}}, tmp_path / "two.pt")
    assert run("convert", tmp_path / "two.pt", tmp_path / "ckpt", "--split", "--step", 1) == 2
    assert "the same as text" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()

    for state in ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, {"__metadata__": torch.ones(1)}):
        torch.save(state, tmp_path / "one.pt")
        folder = tmp_path / f"ckpt{len(state)}"
        assert run("convert", tmp_path / "one.pt", folder, "--step", 1) == 0
        assert run("export", folder, tmp_path / "model.safetensors") == 2
        assert "cannot have the name" in capsys.readouterr().err
        assert not (tmp_path / "model.safetensors").exists()


def test_names_that_no_file_can_have_are_refused_or_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"\ud800": torch.ones(1)}, tmp_path / "surrogate.pt")
    torch.save({"__metadata__": torch.ones(1), "b": torch.ones(2)}, tmp_path / "reserved.pt")
    for words in (["--split"], ["--object", "\udcff"]):
        assert run("convert", tmp_path / "surrogate.pt", tmp_path / "ckpt", *words) == 3
        assert "no Unicode text" in capsys.readouterr().err
        assert not (tmp_path / "ckpt").exists()
    assert run("convert", tmp_path / "reserved.pt", tmp_path / "ckpt", "--split") == 0
    assert run("verify", tmp_path / "ckpt") == 0


@pytest.mark.parametrize("step", [10**18, -1])
def test_a_step_that_no_commit_can_have_is_refused_before_anything_is_written(tmp_path: Path, step: int) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "one.pt")
    assert run("convert", tmp_path / "one.pt", tmp_path / "ckpt", f"--step={step}") == 2
    assert not (tmp_path / "ckpt").exists()


def lie(metadata: Any, sizes: list[int], parts: list[tuple[int, int]]) -> None:
    """Say that a tensor of three has other sizes, and is made up by these parts (begin, length)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    (record,) = metadata.state_dict_metadata.values()
    record.size = torch.Size(sizes)
    record.chunks = [
        ChunkStorageMetadata(offsets=torch.Size([begin]), sizes=torch.Size([length])) for begin, length in parts
    ]


@pytest.mark.parametrize(
    ("sizes", "parts", "told"),
    [
        ([1 << 50], [(0, 3)], "do not make up its shape"),
        ([4], [(0, 3)], "do not make up its shape"),
        ([3, 3], [(0, 3)], "do not make up its shape"),
        ([3], [], "do not make up its shape"),
        ([4], [(0, 3), (2, 2)], "do not make up its shape"),
        ([1 << 40], [(0, 1 << 40)], "speaks of 4398046511104 bytes of tensors"),
    ],
)
def test_a_dcp_folder_whose_parts_leave_gaps_or_claim_more_than_there_is_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: list[int], parts: list[tuple[int, int]], told: str
) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301  (written just now)
    lie(metadata, sizes, parts)
    path.write_bytes(pickle.dumps(metadata))

    assert run("convert", tmp_path / "dcp", tmp_path / "ckpt", "--step", 1) == 1

    assert told in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def header(table: Any, data: bytes = b"\0" * 8) -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        (1 << 60).to_bytes(8, "little"),
        header(b"not json"),
        header([]),
        header({"a": 1}),
        header(one(shape=[3])),
        header(one(shape=[-2])),
        header(one(dtype="F99")),
        header(one(dtype="U8")),
        header(one(data_offsets=[0, 9])),
        header(one(data_offsets=[8, 16])),
        header(one(shape=[1 << 62, 4], data_offsets=[0, 8])),
        header(one(), b"\0" * 9),
        header({**one(), "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        header(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        ),
    ],
    ids=range(15),
)
def test_a_safetensors_file_that_lies_is_damaged(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    assert run("convert", tmp_path / "x.safetensors", tmp_path / "ckpt") == 1
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "gone.safetensors", 3])
def test_an_index_that_leads_elsewhere_is_damaged(tmp_path: Path, file: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert run("convert", tmp_path, tmp_path / "ckpt") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("{0}/none.pt",), 3, "no such file"),
        (("{0}/w.txt",), 3, "no known format"),
        (("{0}/empty",), 3, "holds neither"),
        (("{0}/w.pt", "--key", "model.x"), 2, "there is no 'model'"),
        (("{0}/junk.pt",), 1, "not a file of torch.save"),
    ],
)
def test_what_cannot_be_converted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    as_pt(Net(), tmp_path)
    (tmp_path / "w.txt").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.pt").write_bytes(b"PK junk")
    source, *rest = (word.format(tmp_path) for word in words)

    assert run("convert", source, tmp_path / "ckpt", *rest) == code

    assert said in capsys.readouterr().err


# Out


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


def test_a_sharded_export_has_an_index_and_files_of_the_size_asked_for(model: Net, tmp_path: Path) -> None:
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
def test_what_was_exported_can_be_taken_back_though_tied_weights_are_there_once(
    model: Net, tmp_path: Path, target: str
) -> None:
    size = ("--max-shard-size", "3kB") if target == "hf" else ()
    checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    assert run("export", tmp_path / "ckpt", tmp_path / target, *size) == 0
    assert run("convert", tmp_path / target, tmp_path / "back") == 0

    back = loaded(tmp_path / "back")
    assert same(back.state_dict(), model.state_dict())
    assert back.head.weight is back.embed.weight


def test_an_export_whose_last_part_is_damaged_leaves_nothing_in_the_way(tmp_path: Path) -> None:
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


def test_an_export_replaces_nothing_and_a_damaged_commit_leaves_nothing(
    model: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    assert run("export", commit, tmp_path / "hf") == 0
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert run("export", commit, tmp_path / "hf") == 3
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before

    shard = commit / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    assert run("export", commit, tmp_path / "other") == 1
    assert list((tmp_path / "other").iterdir()) == []
    assert run("export", tmp_path / "ckpt", tmp_path / "x", "--object", "ema") == 2
    assert "one of model" in capsys.readouterr().err
