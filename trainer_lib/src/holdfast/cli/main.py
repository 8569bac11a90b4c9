"""The command line: `holdfast run [options] -- python train.py …` and the other commands."""

from __future__ import annotations

import asyncio
import platform
import signal
import sys
from collections.abc import Callable, Sequence

from holdfast import __version__
from holdfast.cli.chaos.options import parse_chaos
from holdfast.cli.run_options import DEMO_HELP, parse, parser
from holdfast.cli.support.arguments import Parser
from holdfast.core import linux
from holdfast.core.environment import Environment, process_environment, read_environment
from holdfast.core.errors import HoldfastError, UsageError
from holdfast.core.protocol import PROTOCOL_VERSION, ExitCode
from holdfast.launcher.options import RunOptions
from holdfast.training import torch_version

_SUPERVISES = frozenset({"run", "demo", "chaos", "resume-check"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in {"-h", "--help", "--version"}:
            sys.stdout.write(_version() if words == ["--version"] else parser().format_help())
            return int(ExitCode.COMPLETE)
        if words[0] in _SUPERVISES and "--help" not in words:
            linux.require(f"holdfast {words[0]}", "supervises processes with prctl and pidfd")
            torch_version.require()
        if words[0] in _OTHER_COMMANDS:
            return _OTHER_COMMANDS[words[0]](words[1:])
        return _run(parse(words), read_environment())
    except UsageError as error:
        print(error, file=sys.stderr)
        return int(ExitCode.USAGE)
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return int(ExitCode.LAUNCHER_FAULT)
    except KeyboardInterrupt:  # a running launcher handles SIGINT itself
        print("holdfast: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _version() -> str:
    torch = torch_version.installed() or "not installed"
    python = platform.python_version()
    return f"holdfast {__version__} (protocol {PROTOCOL_VERSION}, torch {torch}, Python {python})\n"


def _timeline(words: Sequence[str]) -> int:
    from holdfast.cli import timeline as timeline_view

    return timeline_view.main(words)


def _checkpoints(words: Sequence[str]) -> int:
    from holdfast.cli.checkpoints.main import main as checkpoints

    return checkpoints(words)


def _run(options: RunOptions, environment: Environment) -> int:
    from holdfast.launcher.main import launch

    return asyncio.run(launch(options, environment))


def _demo(words: Sequence[str]) -> int:
    parser = Parser(prog="holdfast demo", description=DEMO_HELP, allow_abbrev=False)
    parser.parse_args(words)
    from holdfast.cli.demo.scenario import run_demo

    return run_demo(process_environment())


def _chaos(words: Sequence[str]) -> int:
    plan, rest = parse_chaos(words)
    from holdfast.cli.chaos.run import run

    return run(plan, rest, process_environment())


def _resume_check(words: Sequence[str]) -> int:
    from holdfast.cli.resume_check.options import parse_plan

    plan = parse_plan(words)
    from holdfast.cli.resume_check.run import check

    return check(plan, process_environment())


_OTHER_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": _demo,
    "chaos": _chaos,
    "resume-check": _resume_check,
    "timeline": _timeline,
    "checkpoints": _checkpoints,
}
