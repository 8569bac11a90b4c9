"""The command line of `holdfast run`. Each option is declared as a setting, with torchrun's names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.cli.support.arguments import Parser, checked, local_processes, split_command
from holdfast.core.environment import SETTINGS, Environment
from holdfast.core.errors import UsageError
from holdfast.core.settings import Setting, switch
from holdfast.launcher.options import DEVICES, OPTIONS, RunOptions

_UNUSED = {
    "--node-rank": "Holdfast assigns the ranks",
    "--master-addr": "use --rdzv-endpoint HOST:PORT",
    "--master-port": "use --rdzv-endpoint HOST:PORT",
    "--module": "write it after '--': python -m MODULE",
    "-m": "write it after '--': python -m MODULE",
    "--no-python": "Holdfast runs the command after '--' unchanged",
    "--start-method": "each rank is a separate process",
}
CHAOS_HELP = "inject faults into a training run, and report what they cost"
RESUME_CHECK_HELP = "check on a training script that a restart changes no bit of the result"
DEMO_HELP = "train with three launchers on this host, inject faults, and print the events and a table"
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
    """Parse and validate. Raises `UsageError`, which names the option and the fix."""
    head, command = split_command(words)
    _refuse_unused(head)
    known = vars(parser().parse_args(head))
    if known.pop("verb") != "run":  # argparse has rejected anything else
        raise UsageError("holdfast: no command: run 'holdfast run [options] -- python train.py'")
    command = [*known.pop("script", ()), *command]
    if not command:
        raise UsageError("holdfast run: no command to run; end with '-- python train.py'")
    own = {one.name: known[one.name] for one in OPTIONS if one.name in known}
    given = {one.name: known[one.name] for one in SETTINGS if one.flag and one.name in known}
    if own.get("processes") in DEVICES:
        own["processes"] = local_processes(own["processes"])
    if "timeline" in own:
        own["timeline"] = own["timeline"].absolute()
    options = RunOptions(command=tuple(command), given=given, **own)
    _check_world(options)
    _check_hang_timeouts(options)
    _check_checkpoints(Environment().with_options(given))
    return options


def _check_world(options: RunOptions) -> None:
    low, high = options.nodes
    step = options.replica_step
    if options.standalone and options.endpoint is not None:
        raise UsageError("holdfast run: --standalone and --rdzv-endpoint exclude each other; leave one out")
    if high > 1 and options.endpoint is None:
        raise UsageError(f"holdfast run: --nnodes {low}:{high} needs --rdzv-endpoint HOST:PORT of the first host")
    if low % step or high % step:
        raise UsageError(
            f"holdfast run: --nnodes {low}:{high} is not valid: expected multiples of --replica-step {step}"
        )


def _check_hang_timeouts(options: RunOptions) -> None:
    if options.hang_min_timeout is not None and options.hang_timeout != "Auto":
        raise UsageError(
            "holdfast run: --hang-min-timeout has an effect only with --hang-timeout Auto; leave one of them out"
        )


def _check_checkpoints(options: Environment) -> None:
    if not options.given & {"checkpoint_delta_threshold", "checkpoint_retention"}:
        return
    from holdfast.checkpoint.policy.retention import Rules
    from holdfast.training.options.config import checked_threshold

    checks: dict[str, Callable[[], Any]] = {
        "--checkpoint-retention": lambda: Rules.parse(options.checkpoint_retention),
        "--checkpoint-delta-threshold": lambda: checked_threshold(
            options.checkpoint_delta_threshold, options.checkpoint_full_every
        ),
    }
    for option, check in checks.items():
        try:
            check()
        except UsageError as error:
            raise UsageError(f"holdfast run: {option}: {error}") from error


def _refuse_unused(words: Sequence[str]) -> None:
    for argument in words:
        name = argument.split("=")[0].replace("_", "-")
        if name in _UNUSED:
            raise UsageError(f"holdfast run: {name} is not an option here: {_UNUSED[name]}")


def parser() -> Parser:
    """Return the parser for the commands of `holdfast` and all options of `holdfast run`."""
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
    verbs.add_parser("timeline", help="show the events of a run, as text or as a picture")
    verbs.add_parser("chaos", help=CHAOS_HELP)
    verbs.add_parser("resume-check", help=RESUME_CHECK_HELP)
    verbs.add_parser("checkpoints", help="list, verify, copy and compare checkpoints")
    run = verbs.add_parser(
        "run",
        help="run a training script and keep it running",
        usage="holdfast run [options] -- python train.py [arguments]",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for one in (*OPTIONS, *SETTINGS):
        if one.flag:
            _add(run, one)
    run.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


def _add(parser: argparse.ArgumentParser, one: Setting) -> None:
    """Add an option in both spellings of torchrun, with - and with _."""
    option, _, takes = one.flag.partition(" ")
    names = dict.fromkeys((option, "--" + option[2:].replace("-", "_")))
    if one.read is switch:
        parser.add_argument(*names, dest=one.name, action="store_true", help=one.help)
    else:
        parser.add_argument(*names, dest=one.name, type=checked(one.read), metavar=takes, help=one.help)
