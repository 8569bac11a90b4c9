"""The options of `holdfast resume-check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.cli.run_options import RESUME_CHECK_HELP, parse
from holdfast.cli.support.arguments import Parser, checked, split_command
from holdfast.core.errors import UsageError
from holdfast.core.settings import whole


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The number of steps, and the arguments of `holdfast run`."""

    steps: int
    timeout: int
    script: tuple[str, ...]

    @property
    def half(self) -> int:
        """The step at which one of the runs is restarted."""
        return self.steps // 2


def parse_plan(words: Sequence[str]) -> Plan:
    """Return the plan. Raises `UsageError`, which names the option and the remedy."""
    head, command = split_command(words)
    known = _parser().parse_args(head)
    if not command:
        raise UsageError("holdfast resume-check: no command to run; end with '-- python train.py'")
    processes = ["--nproc-per-node", known.nproc_per_node] if known.nproc_per_node else []
    parse(["run", *processes, "--", *command])
    return Plan(steps=known.steps, timeout=known.patience, script=(*processes, "--", *command))


def _parser() -> Parser:
    usage = "holdfast resume-check [options] -- python train.py [arguments]"
    parser = Parser(prog="holdfast resume-check", usage=usage, description=RESUME_CHECK_HELP, allow_abbrev=False)
    parser.add_argument(
        "--steps", type=checked(whole(2)), default=10, metavar="N", help="steps to compare (default: 10)"
    )
    parser.add_argument("--nproc-per-node", metavar="N", help="rank processes, as in 'holdfast run' (default: 1)")
    parser.add_argument(
        "--patience",
        type=checked(whole(1)),
        default=600,
        metavar="SECONDS",
        help="how long the script may take from one step to the next, and to its first step (default: 600)",
    )
    return parser
