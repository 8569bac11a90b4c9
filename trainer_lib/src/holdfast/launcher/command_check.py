"""Rejects commands of `holdfast run` with which no attempt could succeed, before anything starts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.core.errors import UsageError
from holdfast.launcher.process.script_imports import parse

# Programs and modules that start and restart the ranks of a script, with their own rendezvous.
_LAUNCHERS: Final = frozenset(
    {"torchrun", "torchrun.py", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun"}
)
_LAUNCHER_MODULES: Final = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.launcher",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
        "horovod.runner.launch",
    }
)


def check(argv: Sequence[str], *, nested: bool) -> None:
    """Raise UsageError if the command cannot start, or if it starts a launcher of its own without `nested`."""
    launcher = nested_launcher(argv)
    if launcher and not nested:
        raise UsageError(
            f"holdfast run: the command starts another launcher ({launcher}), whose ranks would all get the same "
            f"rank number; nothing was started. Pass the script itself, for example: {_suggestion(argv)} "
            "(--allow-nested-launcher starts it anyway)"
        )
    if shutil.which(argv[0]) is None:
        raise UsageError(f"holdfast run: program {argv[0]!r} was not found; pass a program after '--'")
    script = parse(argv)
    if script is not None and not script.is_module and not Path(script.target).exists():
        where = "" if Path(script.target).is_absolute() else f" in {Path.cwd()}"
        raise UsageError(f"holdfast run: script {script.target!r} was not found{where}; correct the path after '--'")


def nested_launcher(argv: Sequence[str]) -> str:
    """Return the launcher that the command starts, or ""."""
    program = Path(argv[0]).name
    if program in _LAUNCHERS:
        return " ".join(argv[:2]) if program == "accelerate" else program
    script = parse(argv)
    if script is None:
        return ""
    if script.is_module:
        return script.target if script.target in _LAUNCHER_MODULES else ""
    name = Path(script.target).name
    return name if name in _LAUNCHERS else ""  # an installed program by its path: python /usr/bin/torchrun


def _suggestion(argv: Sequence[str]) -> str:
    """Return the command without the nested launcher, as far as its options can be parsed."""
    arguments = list(argv[1:])
    at = next(
        (
            place
            for place, argument in enumerate(arguments)
            if argument.endswith(".py") and Path(argument).name not in _LAUNCHERS
        ),
        None,
    )
    script = ["train.py"] if at is None else arguments[at:]
    count = next((value for argument, value in _options(arguments[:at]) if _is_count(argument)), "N")
    return shlex.join(["holdfast", "run", "--nproc-per-node", count, "--", "python", *script])


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    split = [argument.partition("=") for argument in arguments]
    after = [*arguments[1:], ""]
    return [(name, value if sign else follows) for (name, sign, value), follows in zip(split, after, strict=True)]


def _is_count(argument: str) -> bool:
    return (
        argument.lstrip("-").replace("-", "_") in {"nproc_per_node", "num_processes", "num_gpus", "np", "n"}
        and argument[:1] == "-"
    )
