"""Commands that no attempt could run are refused before the start, and the message contains the right command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.core.errors import UsageError
from holdfast.launcher.command_check import check

HERE = str(Path(__file__))


@pytest.mark.parametrize(
    ("words", "launcher", "instead"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 3", "torchrun", "--nproc-per-node 2 -- python train.py --lr 3"),
        ("/opt/bin/torchrun --nproc_per_node=4 train.py", "torchrun", "--nproc-per-node 4 -- python train.py"),
        ("python -m torch.distributed.run --standalone train.py", "torch.distributed.run", "N -- python train.py"),
        ("python3 -u -m torch.distributed.launch train.py", "torch.distributed.launch", "N -- python train.py"),
        (
            "accelerate launch --num_processes 2 train.py",
            "accelerate launch",
            "--nproc-per-node 2 -- python train.py",
        ),
        ("python -m accelerate.commands.launch train.py", "accelerate.commands.launch", "python train.py"),
        ("deepspeed --num_gpus 2 train.py --deepspeed", "deepspeed", "2 -- python train.py --deepspeed"),
        ("mpirun -np 2 python train.py", "mpirun", "--nproc-per-node 2 -- python train.py"),
        ("python /usr/bin/torchrun -m pkg.train", "torchrun", "N -- python train.py"),
    ],
)
def test_nested_launcher_is_refused_with_the_command_to_use(words: str, launcher: str, instead: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(words.split(), nested=False)
    assert f"({launcher})" in str(caught.value)
    assert f"{instead} (--allow-nested-launcher" in str(caught.value)


def test_intended_launcher_and_own_scripts_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "torchrun"
    program.touch(mode=0o755)
    check(["torchrun", "train.py"], nested=True)
    check([sys.executable, HERE, "torchrun"], nested=False)
    check([sys.executable, "-m", "my.distributed.run"], nested=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/no/such/program", "x"], "program '/no/such/program' was not found"),
        (["no-such-program"], "program 'no-such-program' was not found"),
        ([sys.executable, "-u", "missing.py"], f"script 'missing.py' was not found in {Path.cwd()}"),
        ([sys.executable, "/no/such/train.py"], "script '/no/such/train.py' was not found; correct"),
    ],
)
def test_what_is_not_there_is_named(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match="after '--'") as caught:
        check(argv, nested=False)
    assert said in str(caught.value)
