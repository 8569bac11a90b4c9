"""The command line: `holdfast run [options] -- python train.py …`, in torchrun's words."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import platform
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast import __version__
from holdfast.core import linux
from holdfast.core.environment import Environment, process_environment, read_environment
from holdfast.core.errors import HoldfastError, UsageError
from holdfast.core.limits import MOST_FULL_EVERY
from holdfast.core.protocol import PROTOCOL_VERSION, ExitCode
from holdfast.fault_injection.plan import Kind, Plan, make_plan, read_fault, read_kinds, read_rate
from holdfast.launcher.options import RunOptions

_UNUSED = {
    "--node-rank": "Holdfast gives out ranks by itself",
    "--master-addr": "use --rdzv-endpoint HOST:PORT",
    "--master-port": "use --rdzv-endpoint HOST:PORT",
    "--module": "write it out after '--': python -m MODULE",
    "-m": "write it out after '--': python -m MODULE",
    "--no-python": "Holdfast runs what follows '--' as it stands",
    "--start-method": "each rank is a process of its own",
}


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place says what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in {"-h", "--help", "--version"}:
            sys.stdout.write(_version() if words == ["--version"] else _parser().format_help())
            return int(ExitCode.COMPLETE)
        if words[0] in _LINUX_ONLY and "--help" not in words:
            linux.require(f"holdfast {words[0]}")
        if words[0] in _OTHER_VERBS:
            return _OTHER_VERBS[words[0]](words[1:])
        return _run(parse(words), read_environment())
    except UsageError as error:
        print(error, file=sys.stderr)
        return int(ExitCode.USAGE)
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return int(ExitCode.LAUNCHER_FAULT)


def _version() -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
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
    parser = _Parser(prog="holdfast demo", description=_DEMO_HELP, allow_abbrev=False)
    parser.parse_args(words)
    from holdfast.cli.demo.scenario import play

    return play(process_environment())


def _chaos(words: Sequence[str]) -> int:
    plan, rest = parse_chaos(words)
    from holdfast.cli.chaos.run import run

    return run(plan, rest, process_environment())


def parse_chaos(words: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan, and the words for `holdfast run`; raises `UsageError` that names the option and the mend."""
    head, command = _split(words)
    known, rest = _chaos_parser().parse_known_args(head)
    if not command:
        raise UsageError("holdfast chaos: nothing to run; end with '-- python train.py'")
    specs = [(kind, text) for kind in Kind for text in getattr(known, str(kind)) or ()]
    if not specs and not known.rate:
        raise UsageError("holdfast chaos: nothing to do; give faults, such as --kill rank=1,step=50, or --rate 2/min")
    parse(["run", *rest, "--", *command])
    seed = secrets.randbelow(1 << 31) if known.seed is None else known.seed
    plan = make_plan(seed=seed, specs=specs, per_second=known.rate, kinds=known.faults)
    return plan, [*rest, "--", *command]


def _chaos_parser() -> _Parser:
    usage = "holdfast chaos [faults] [options of holdfast run] -- python train.py [arguments]"
    parser = _Parser(prog="holdfast chaos", usage=usage, description=_CHAOS_HELP, allow_abbrev=False)
    for kind in Kind:
        text = _FAULT_HELP[kind]
        parser.add_argument(f"--{kind}", type=_naming(_spec(kind)), action="append", metavar="SPEC", help=text)
    parser.add_argument(
        "--rate", type=_naming(read_rate), default=0.0, help="faults at random instants, such as 2/min"
    )
    parser.add_argument(
        "--faults", type=_naming(read_kinds), default=(Kind.KILL,), help="those of --rate, such as kill,stop (kill)"
    )
    parser.add_argument("--seed", type=_naming(_count("--seed", least=0)), help="the same faults again (random)")
    return parser


def _spec(kind: Kind) -> Callable[[str], str]:
    def checked(text: str) -> str:
        read_fault(kind, text)
        return text

    return checked


_CHAOS_HELP = "hurt a training on purpose, and say what it cost"
_FAULT_HELP = {
    Kind.KILL: "SIGKILL to a rank: rank=1,step=50[,at=vote]",
    Kind.STOP: "SIGSTOP to a rank: rank=1,step=50[,at=average][,seconds=5]",
    Kind.EXCEPTION: "an exception in the script: rank=1,step=50",
    Kind.SLEEP: "the script sleeps: rank=1,step=50[,seconds=5]",
    Kind.SLOW: "the script takes longer: rank=1,step=50,seconds=0.5[,steps=10]",
}
_DEMO_HELP = "train with three launchers on this host, break it on purpose, print the story and a table"
_LINUX_ONLY = frozenset({"run", "demo", "chaos", "checkpoints"})
_EXIT_CODES = """\
exit codes of 'holdfast run':
  0        the job is complete
  2        the command line or the environment is not valid; nothing was started
  70       a fault of the launcher or of its host
  75       this worker left on request (SIGTERM, a notice); the job continues elsewhere
  128 + n  ended by signal n
  other    the script's own exit code: the job has failed
"""
_OTHER_VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": _demo,
    "chaos": _chaos,
    "timeline": _timeline,
    "checkpoints": _checkpoints,
}


def parse(words: Sequence[str]) -> RunOptions:
    """Parse and check; raises `UsageError` that names the option and the mend."""
    head, command = _split(words)
    _refuse_unused(head)
    known = _parser().parse_args(head)
    if known.verb != "run":  # argparse has refused anything else
        raise UsageError("holdfast: give a command: holdfast run [options] -- python train.py")
    command = [*known.script, *command]
    if not command:
        raise UsageError("holdfast run: nothing to run; end with '-- python train.py'")
    low, high = known.nnodes
    if known.standalone and known.rdzv_endpoint is not None:
        raise UsageError("holdfast run: --standalone and --rdzv-endpoint exclude each other; leave one out")
    if high > 1 and known.rdzv_endpoint is None:
        raise UsageError(f"holdfast run: --nnodes {low}:{high} needs --rdzv-endpoint HOST:PORT of the first host")
    step = known.replica_step
    if low % step or high % step:
        raise UsageError(f"holdfast run: --nnodes {low}:{high} are no multiples of --replica-step {step}")
    return RunOptions(
        command=tuple(command),
        processes=known.nproc_per_node,
        min_nodes=low,
        max_nodes=high,
        endpoint=known.rdzv_endpoint,
        run_id=known.rdzv_id,
        max_restarts=known.max_restarts,
        checkpoint_interval=known.checkpoint_interval or "",
        checkpoint_keep=known.checkpoint_keep,
        checkpoint_full_every=known.checkpoint_full_every,
        checkpoint_delta_threshold=_threshold(known),
        checkpoint_retention=known.checkpoint_retention,
        resume=known.resume,
        hang_timeout=known.hang_timeout,
        prefix_output=known.prefix_output,
        warm_processes=known.warm_processes,
        timeline=None if known.timeline is None else known.timeline.absolute(),
        replica_step=step,
        object_url=known.object_url,
        local_tier=known.local_tier or "",
        local_interval=known.local_interval,
        memory_tier=known.memory_tier or "",
        memory_interval=known.memory_interval,
        peer_interval=known.peer_interval,
        nested_launcher=known.allow_nested_launcher,
    )


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--` is ours, what follows is the command."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _refuse_unused(words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("-"):
            continue
        name = word.split("=")[0].replace("_", "-")
        if name in _UNUSED:
            raise UsageError(f"holdfast run: {name} is not an option here: {_UNUSED[name]}")


def _parser() -> _Parser:
    top = _Parser(
        prog="holdfast",
        usage="holdfast COMMAND [options]",
        description="Fault-tolerant PyTorch training. 'holdfast COMMAND --help' describes a command.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the versions of Holdfast, its protocol and torch")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    verbs.add_parser("demo", help=_DEMO_HELP)
    verbs.add_parser("timeline", help="show what happened in a run, here or as a picture")
    verbs.add_parser("chaos", help=_CHAOS_HELP)
    verbs.add_parser("checkpoints", help="look at checkpoints, check, copy and compare them")
    run = verbs.add_parser(
        "run",
        help="run a training script and keep it running",
        usage="holdfast run [options] -- python train.py [arguments]",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add(
        run,
        "--nproc-per-node",
        _count("--nproc-per-node", words=("auto", "gpu", "cpu")),
        0,
        "rank processes on this host (a number, auto, gpu, cpu)",
    )
    _add(run, "--nnodes", _nodes, (1, 1), "hosts: N, or MIN:MAX to go on with fewer and take them back")
    _add(run, "--replica-step", _count("--replica-step"), 1, "hosts that one replica of a sharded model takes")
    _add(run, "--rdzv-endpoint", _endpoint, None, "HOST:PORT of the launcher that collects the others")
    _add(run, "--rdzv-id", str, "", "name of the run (random when left out)")
    _add(run, "--rdzv-backend", _backend, "c10d", "accepted for torchrun's sake; only c10d")
    _add(
        run, "--max-restarts", _count("--max-restarts", least=0), 3, "incidents of the script's own making to survive"
    )
    _add(run, "--checkpoint-interval", _interval, None, "steps (50) or seconds (30s) between checkpoints, or Auto")
    _add(run, "--checkpoint-keep", _count("--checkpoint-keep"), 3, "checkpoints to keep")
    _add(
        run,
        "--checkpoint-full-every",
        _full_every,
        1,
        "of so many checkpoints one is full, the others hold what changed (1: all are full)",
    )
    _add(
        run,
        "--checkpoint-delta-threshold",
        _number,
        0.0,
        "deltas may leave out what moved a weight by less than this (0: restored weights are exact)",
    )
    _add(run, "--checkpoint-retention", _rules, "", "what is kept beside them, such as hours=6,daily=7,every=10000")
    _add(run, "--object-url", str, "", "s3://BUCKET/PREFIX or another URL to which checkpoints are copied as well")
    _add(run, "--hang-timeout", _hang_timeout, "Auto", "seconds that a step may take; Auto by the median; Off")
    _add(run, "--resume", _resume, "Always", "Always, or Never to begin afresh on a folder that has checkpoints")
    _add(run, "--timeline", Path, None, "FILE to which what happens is written, for 'holdfast timeline FILE'")
    _add(run, "--local-tier", _tier, None, "PATH[:SIZE] on a disk of this node for commits that outlive the launcher")
    _add(run, "--local-interval", _count("--local-interval"), None, "steps between commits there (10)")
    _add(run, "--memory-tier", _tier, None, "PATH[:SIZE] of a memory volume for commits that outlive ranks")
    _add(run, "--memory-interval", _count("--memory-interval"), None, "steps between commits in memory (1)")
    _add(run, "--peer-interval", _count("--peer-interval"), None, "steps between copies in another node's memory")
    run.add_argument("--standalone", action="store_true", help="one host, no rendezvous (the default)")
    _add(run, "--warm-processes", _warm, 1, "processes that stand by for a lost rank; 0: a zygote only; or none")
    run.add_argument(
        "--prefix-output", "--prefix_output", action="store_true", help="begin each line of a rank with [rank]"
    )
    run.add_argument(
        "--allow-nested-launcher",
        "--allow_nested_launcher",
        action="store_true",
        help="start a command that is a launcher itself (torchrun, accelerate, deepspeed, mpirun)",
    )
    run.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


def _add(
    parser: argparse.ArgumentParser, name: str, read: Callable[[str], object], default: object, text: str
) -> None:
    """An option under torchrun's two spellings, with - and with _."""
    other = "--" + name[2:].replace("-", "_")
    names = [name] if other == name else [name, other]
    parser.add_argument(*names, dest=name[2:].replace("-", "_"), type=_naming(read), default=default, help=text)


def _naming(read: Callable[[str], object]) -> Callable[[str], object]:
    """Keep our own words for what is wrong; argparse puts the option's name before them."""

    def checked(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _count(name: str, *, least: int = 1, words: tuple[str, ...] = ()) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text in words:
            return _local_processes(text)
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            choices = "".join(f", or {word}" for word in words)
            raise ValueError(f"{text!r} does not do: give a whole number of at least {least}{choices}")
        return int(text)

    return read


def _local_processes(word: str) -> int:
    """As torchrun counts: one a GPU, else one a CPU."""
    import os

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if word == "cpu":
        return cpus
    import torch

    gpus = torch.cuda.device_count()
    if word == "gpu" and not gpus:
        raise ValueError("there is no GPU here: give a number, or cpu")
    return gpus or cpus


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} does not do: give N or MIN:MAX, such as 2:4")
    low = int(match[1])
    high = int(match[2] or match[1])
    if not 1 <= low <= high:
        raise ValueError(f"{text!r} does not do: MIN must be at least 1 and at most MAX")
    return low, high


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} does not do: give HOST:PORT, such as node-1:29400")
    return host.strip("[]"), int(port)


def _backend(text: str) -> str:
    if text != "c10d":
        raise ValueError(f"{text!r} does not do: Holdfast has its own rendezvous; leave it out or give c10d")
    return text


def _interval(text: str) -> str:
    if text != "Auto" and re.fullmatch(r"[1-9]\d*s?", text, re.ASCII) is None:
        raise ValueError(f"{text!r} does not do: give steps, such as 50, seconds, such as 30s, or Auto")
    return text


def _full_every(text: str) -> int:
    count = _count("--checkpoint-full-every")(text)
    if count > MOST_FULL_EVERY:
        raise ValueError(f"{text!r} does not do: give at most {MOST_FULL_EVERY}")
    return count


def _threshold(known: argparse.Namespace) -> float:
    from holdfast.training.options.config import checked_threshold

    try:
        return checked_threshold(known.checkpoint_delta_threshold, known.checkpoint_full_every)
    except UsageError as error:
        raise UsageError(f"holdfast run: --checkpoint-delta-threshold: {error}") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} does not do: give a number, such as 1e-5") from None


def _rules(text: str) -> str:
    from holdfast.checkpoint.policy.retention import Rules

    try:
        return str(Rules.parse(text))
    except UsageError as error:
        raise ValueError(str(error)) from error


def _hang_timeout(text: str) -> str:
    if text not in {"Auto", "Off"} and re.fullmatch(r"[1-9]\d*", text, re.ASCII) is None:
        raise ValueError(f"{text!r} does not do: give whole seconds, Auto, or Off")
    return text


def _warm(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdecimal():
        raise ValueError(f"{text!r} does not do: give a whole number, or none")
    return int(text)


def _tier(text: str) -> str:
    from holdfast.launcher.tiers.options import TierOptions

    TierOptions.parse(text)
    return text


def _resume(text: str) -> str:
    if text not in {"Always", "Never"}:
        raise ValueError(f"{text!r} does not do: give Always or Never")
    return text
