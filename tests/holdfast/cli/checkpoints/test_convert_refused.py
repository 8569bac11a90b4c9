"""Files of other formats with false content or code to run are refused."""

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
from weight_files import Net, as_pt, as_safetensors, one, run

from holdfast.cli.checkpoints.access import progress_bar

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


class Evil:
    """An object that runs code when it is unpickled."""

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


def test_flipped_bit_in_a_checksummed_torch_file_is_corruption(
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
    assert "its checksum does not match" in capsys.readouterr().err


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
def test_incomplete_dcp_records_are_corruption(tmp_path: Path, word: str) -> None:
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
    assert "the same text" in capsys.readouterr().err
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
        assert "not Unicode text" in capsys.readouterr().err
        assert not (tmp_path / "ckpt").exists()
    assert run("convert", tmp_path / "reserved.pt", tmp_path / "ckpt", "--split") == 0
    assert run("verify", tmp_path / "ckpt") == 0


@pytest.mark.parametrize("step", [10**18, -1])
def test_invalid_step_is_refused_before_any_write(tmp_path: Path, step: int) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "one.pt")
    assert run("convert", tmp_path / "one.pt", tmp_path / "ckpt", f"--step={step}") == 2
    assert not (tmp_path / "ckpt").exists()


def lie(metadata: Any, sizes: list[int], parts: list[tuple[int, int]]) -> None:
    """Record another size for a tensor of three elements, in these parts (start, length)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    (record,) = metadata.state_dict_metadata.values()
    record.size = torch.Size(sizes)
    record.chunks = [
        ChunkStorageMetadata(offsets=torch.Size([begin]), sizes=torch.Size([length])) for begin, length in parts
    ]


@pytest.mark.parametrize(
    ("sizes", "parts", "told"),
    [
        ([1 << 50], [(0, 3)], "do not cover its shape"),
        ([4], [(0, 3)], "do not cover its shape"),
        ([3, 3], [(0, 3)], "do not cover its shape"),
        ([3], [], "do not cover its shape"),
        ([4], [(0, 3), (2, 2)], "do not cover its shape"),
        ([1 << 40], [(0, 1 << 40)], "describes 4398046511104 bytes of tensors"),
    ],
)
def test_dcp_parts_with_gaps_or_excess_are_refused(
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
        (("{0}/w.txt",), 3, "not indicate a known format"),
        (("{0}/empty",), 3, "holds neither"),
        (("{0}/w.pt", "--key", "model.x"), 2, "no part 'model'"),
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
