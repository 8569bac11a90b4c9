"""The options of `holdfast run`, in the words of torchrun."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.support.arguments import Parser, add_option, split_command, whole_number
from holdfast.core.errors import UsageError
from holdfast.core.limits import MOST_FULL_EVERY
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
CHAOS_HELP = "hurt a training on purpose, and say what it cost"
DEMO_HELP = "train with three launchers on this host, break it on purpose, print the story and a table"
_EXIT_CODES = """\
exit codes of 'holdfast run':
  0        the job is complete
  2        the command line or the environment is not valid; nothing was started
  70       a fault of the launcher or of its host
  75       this worker left on request (SIGTERM, a notice); the job continues elsewhere
  128 + n  ended by signal n
  other    the script's own exit code: the job has failed
"""


def parse(words: Sequence[str]) -> RunOptions:
    """Parse and check; raises `UsageError` that names the option and the mend."""
    head, command = split_command(words)
    _refuse_unused(head)
    known = parser().parse_args(head)
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


def _refuse_unused(words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("-"):
            continue
        name = word.split("=")[0].replace("_", "-")
        if name in _UNUSED:
            raise UsageError(f"holdfast run: {name} is not an option here: {_UNUSED[name]}")


def parser() -> Parser:
    """The commands of `holdfast`, and all options of `holdfast run`."""
    top = Parser(
        prog="holdfast",
        usage="holdfast COMMAND [options]",
        description="Fault-tolerant PyTorch training. 'holdfast COMMAND --help' describes a command.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_true", help="print the versions of Holdfast, its protocol and torch")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    verbs.add_parser("demo", help=DEMO_HELP)
    verbs.add_parser("timeline", help="show what happened in a run, here or as a picture")
    verbs.add_parser("chaos", help=CHAOS_HELP)
    verbs.add_parser("checkpoints", help="look at checkpoints, check, copy and compare them")
    run = verbs.add_parser(
        "run",
        help="run a training script and keep it running",
        usage="holdfast run [options] -- python train.py [arguments]",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _world_options(run)
    _checkpoint_options(run)
    _failure_options(run)
    _tier_options(run)
    _process_options(run)
    return top


def _world_options(run: argparse.ArgumentParser) -> None:
    add_option(
        run,
        "--nproc-per-node",
        whole_number("--nproc-per-node", words=("auto", "gpu", "cpu")),
        0,
        "rank processes on this host (a number, auto, gpu, cpu)",
    )
    add_option(run, "--nnodes", _nodes, (1, 1), "hosts: N, or MIN:MAX to go on with fewer and take them back")
    add_option(
        run, "--replica-step", whole_number("--replica-step"), 1, "hosts that one replica of a sharded model takes"
    )
    add_option(run, "--rdzv-endpoint", _endpoint, None, "HOST:PORT of the launcher that collects the others")
    add_option(run, "--rdzv-id", str, "", "name of the run (random when left out)")
    add_option(run, "--rdzv-backend", _backend, "c10d", "accepted for torchrun's sake; only c10d")
    add_option(
        run,
        "--max-restarts",
        whole_number("--max-restarts", least=0),
        3,
        "incidents of the script's own making to survive",
    )


def _checkpoint_options(run: argparse.ArgumentParser) -> None:
    add_option(
        run, "--checkpoint-interval", _interval, None, "steps (50) or seconds (30s) between checkpoints, or Auto"
    )
    add_option(run, "--checkpoint-keep", whole_number("--checkpoint-keep"), 3, "checkpoints to keep")
    add_option(
        run,
        "--checkpoint-full-every",
        _full_every,
        1,
        "of so many checkpoints one is full, the others hold what changed (1: all are full)",
    )
    add_option(
        run,
        "--checkpoint-delta-threshold",
        _number,
        0.0,
        "deltas may leave out what moved a weight by less than this (0: restored weights are exact)",
    )
    add_option(
        run, "--checkpoint-retention", _rules, "", "what is kept beside them, such as hours=6,daily=7,every=10000"
    )
    add_option(
        run, "--object-url", str, "", "s3://BUCKET/PREFIX or another URL to which checkpoints are copied as well"
    )


def _failure_options(run: argparse.ArgumentParser) -> None:
    add_option(run, "--hang-timeout", _hang_timeout, "Auto", "seconds that a step may take; Auto by the median; Off")
    add_option(
        run, "--resume", _resume, "Always", "Always, or Never to begin afresh on a folder that has checkpoints"
    )
    add_option(run, "--timeline", Path, None, "FILE to which what happens is written, for 'holdfast timeline FILE'")


def _tier_options(run: argparse.ArgumentParser) -> None:
    add_option(
        run, "--local-tier", _tier, None, "PATH[:SIZE] on a disk of this node for commits that outlive the launcher"
    )
    add_option(run, "--local-interval", whole_number("--local-interval"), None, "steps between commits there (10)")
    add_option(run, "--memory-tier", _tier, None, "PATH[:SIZE] of a memory volume for commits that outlive ranks")
    add_option(
        run, "--memory-interval", whole_number("--memory-interval"), None, "steps between commits in memory (1)"
    )
    add_option(
        run, "--peer-interval", whole_number("--peer-interval"), None, "steps between copies in another node's memory"
    )


def _process_options(run: argparse.ArgumentParser) -> None:
    run.add_argument("--standalone", action="store_true", help="one host, no rendezvous (the default)")
    add_option(
        run, "--warm-processes", _warm, 1, "processes that stand by for a lost rank; 0: a zygote only; or none"
    )
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
    count = whole_number("--checkpoint-full-every")(text)
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
