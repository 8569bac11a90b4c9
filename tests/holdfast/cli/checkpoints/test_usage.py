"""Messages, exit codes and terminals of `holdfast checkpoints`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Commands

from holdfast.cli.checkpoints.access.progress_bar import Progress
from holdfast.core.settings import format_size

# Errors


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "{root}/none"), 3, "no such folder"),
        (("ls", "{root}/file"), 3, "is a file"),
        (("ls", "s4://bucket/x"), 2, "s4"),
        (("ls", ""), 2, "empty path"),
        (("ls", "s3://[x"), 2, "s3://[x is not a URL"),
        (("verify", "file://[x/y"), 2, "file://[x/y is not a URL"),
        (("ls", "memory://name:secret@[a"), 2, "checkpoints: memory://[a is not a URL"),
        (("ls", "s3://bu\u2100cket/x"), 2, "is not a URL"),
        (("copy", "{root}/ckpt", "file://[x/y"), 2, "file://[x/y is not a URL"),
        (("show", "{root}/ckpt", "--step", "15"), 3, "no checkpoint of step 15"),
        (("show", "{root}/ckpt", "--step", "x"), 2, "not a step"),
        (("show", "{root}/ckpt/step-10.g1.a1", "--step", "20"), 2, "is not a checkpoint of step 20"),
        (("show", "{root}/ckpt/step-11.g1.a1"), 3, "no checkpoint step-11.g1.a1"),
        (("show", "{root}/renamed"), 3, "does not have the name of a checkpoint"),
        (("verify", "{root}/ckpt/step-10.g1.a1.tmp-" + "0" * 32), 3, "unfinished"),
        (("verify", "{root}/bare"), 3, ""),
        (("copy", "{root}/ckpt", "{root}/ckpt/step-10.g1.a1"), 2, "pass the folder to copy to"),
        (("prune", "{root}/ckpt", "--keep-last", "1", "--rule", "monthly=3"), 2, "retention rule 'monthly=3'"),
        (("prune", "{root}/ckpt", "--keep-last", "0"), 2, "at least 1"),
        (("prune", "{root}/ckpt"), 2, "--keep-last"),
        (("frobnicate",), 2, "invalid choice"),
        ((), 2, "required"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(
    holdfast: Commands, folder: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    tmp_path = folder.parent
    (tmp_path / "file").touch()
    (tmp_path / "renamed").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "renamed" / "MANIFEST.json").write_bytes((folder / "step-10.g1.a1" / "MANIFEST.json").read_bytes())

    assert holdfast(*(word.format(root=tmp_path) for word in words)) == code
    assert said in holdfast.err


@pytest.mark.parametrize("url", ["github://x/y", "reference://x", "dbfs://x", "jlab://x", "dir://x", "generic://x"])
def test_a_url_that_says_too_little_for_its_file_system_is_named(holdfast: Commands, url: str) -> None:
    pytest.importorskip("fsspec")
    assert holdfast("ls", url) == 2
    assert url.rstrip("/") in holdfast.err


def test_the_commands_load_no_torch(folder: Path) -> None:
    code = f"""
import sys
from holdfast.cli.main import main
assert main(["checkpoints", "verify", {str(folder)!r}]) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show(
    tmp_path: Path, commit: Callable[..., Any], encoding: str
) -> None:
    commit(tmp_path / "漢", 10, {"model/gewicht_漢": b"x"})
    shown, refused = (
        subprocess.run(
            [sys.executable, "-m", "holdfast", "checkpoints", "show", str(where)],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
            timeout=120,
        )
        for where in (tmp_path / "漢", tmp_path / "字")
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"gewicht_\u6f22" in shown.stdout
    assert refused.returncode == 3
    assert r"\u5b57: no such folder" in refused.stderr


def test_progress_is_drawn_on_a_terminal_only() -> None:
    stream = io.StringIO()
    shown = Progress("verify", 200, stream)
    shown._drawn = float("-inf")

    shown.add(100)

    assert "50%" in stream.getvalue()
    assert [format_size(n) for n in (999, 1 << 10, 3 << 29)] == ["999 B", "1 KiB", "1.5 GiB"]
