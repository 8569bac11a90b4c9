"""Any change under a valid seal is accepted or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from forged_commits import (
    NEWEST,
    Json,
    forge,
    objects,
    outside,
    reheaded,
    replace_file,
    sealed,
    setter,
)
from hypothesis import given
from hypothesis import strategies as st
from mutations import CHANGES, FUZZ, kept, mutated

from holdfast import HoldfastError, checkpoint
from holdfast.checkpoint.format.manifest import decode
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.main import Exit, main
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError

# Arbitrary changes


def survives(root: Path) -> None:
    """Load the checkpoint: a typed error or a complete state is valid. No file outside of the folder changes."""
    around = outside(root)
    fresh = objects(0.0)
    try:
        checkpoint.load(root, step=20, **fresh)
    except HoldfastError:
        assert float(fresh["model"].weight.detach()[0, 0]) == 0.0
    assert outside(root) == around


@pytest.fixture
def again(root: Path) -> Callable[[], Path]:
    """Restore the newest checkpoint that the previous example changed."""
    good = {path.name: path.read_bytes() for path in (root / NEWEST).iterdir()}

    def put_back() -> Path:
        (root / NEWEST).mkdir(exist_ok=True)
        for name, data in good.items():
            (root / NEWEST / name).write_bytes(data)
        return root

    return put_back


@FUZZ
@given(changes=CHANGES)
@kept("manifest")
def test_any_manifest_under_a_true_seal_is_taken_or_refused(again: Callable[[], Path], changes: Any) -> None:
    root = again()
    mutate_manifest(root, changes)
    survives(root)


@FUZZ
@given(changes=CHANGES)
@kept("commands")
def test_any_validly_sealed_manifest_gets_an_exit_code(
    again: Callable[[], Path], changes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    root = again()
    mutate_manifest(root, changes)
    around = outside(root)
    newest = str(root / NEWEST)
    with TemporaryDirectory() as scratch:
        exported = ["export", newest, f"{scratch}/x.safetensors"]
        for words in (
            ["ls", str(root)],
            ["show", newest],
            ["verify", newest],
            ["diff", newest, str(root)],
            ["copy", newest, f"{scratch}/copy"],
            ["prune", str(root), "--keep-last", "1", "--dry-run"],
            [*exported, "--object", "model"],
            [*exported, "--object", "optimizer"],
        ):
            assert main(words) in set(Exit), words
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert outside(root) == around


@pytest.mark.parametrize(
    "tree",
    [
        {"w": {"$tensor": "model/none"}},
        {"w": {"$rows": []}},
        {"w": {"$rows": 1}},
        {"\ud800": {"$tensor": "model/weight"}},
    ],
    ids=str,
)
def test_an_object_that_is_no_state_of_tensors_is_not_exported(root: Path, tree: Json, tmp_path: Path) -> None:
    forge(root, setter("state|objects|model", tree))
    assert main(["export", str(root / NEWEST), str(tmp_path / "x.safetensors"), "--object", "model"]) == Exit.BAD
    assert not (tmp_path / "x.safetensors").exists()


def test_what_no_number_and_no_time_is_counts_for_no_rule(root: Path) -> None:
    forge(root, setter("state|metrics", [[20, {"loss": 10**400}]]))
    forge(root, setter("created", "0001-01-01T00:00:00+14:00"))
    (entry,) = [one for one in Ages(FolderStore(root)).entries() if one.commit.step == 20]
    assert (entry.created, dict(entry.metrics)) == (None, {})


def mutate_manifest(root: Path, changes: Any) -> None:
    path = root / NEWEST / "MANIFEST.json"
    document = json.loads(path.read_bytes())
    del document["manifestDigest"]
    path.write_bytes(sealed(mutated(document, changes)))


@FUZZ
@given(changes=CHANGES)
@kept("header")
def test_any_header_under_true_digests_is_taken_or_refused(again: Callable[[], Path], changes: Any) -> None:
    root = again()
    replace_file(root, reheaded(root, lambda header: mutated(header, changes)))
    survives(root)


@FUZZ
@given(raw=st.binary(max_size=64) | st.binary(max_size=24).map(lambda b: b'{"manifestDigest":"' + b + b'"}\n'))
def test_any_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises((CorruptCheckpointError, UnknownFormatError)):
        decode(raw)
