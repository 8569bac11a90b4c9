"""The options of `holdfast chaos`: faults, and after them the options of `holdfast run`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from holdfast.cli.run_options import CHAOS_HELP, parse
from holdfast.cli.support.arguments import Parser, checked, split_command
from holdfast.core.errors import UsageError
from holdfast.core.settings import whole
from holdfast.fault_injection.plan import Kind, Plan, make_plan, read_fault, read_kinds, read_rate

_FAULT_HELP = {
    Kind.KILL: "send SIGKILL to a rank: rank=1,step=50[,at=vote]",
    Kind.STOP: "send SIGSTOP to a rank: rank=1,step=50[,at=average][,seconds=5]",
    Kind.EXCEPTION: "raise an exception in the script: rank=1,step=50",
    Kind.SLEEP: "make the script sleep: rank=1,step=50[,seconds=5]",
    Kind.SLOW: "make the script slower: rank=1,step=50,seconds=0.5[,steps=10]",
    Kind.NAN_LOSS: "make the loss of a rank NaN: rank=1,step=50[,steps=10]",
    Kind.NAN_GRADIENT: "make a gradient of a rank NaN: rank=1,step=50[,steps=10]",
    Kind.NAN_WEIGHT: "make a weight of a rank NaN: rank=1,step=50",
    Kind.BAD_SAMPLE: "make a sample of the dataset unreadable: rank=1,step=50",
    Kind.OOM: "let backward of a rank run out of GPU memory: rank=1,step=50[,steps=2]",
    Kind.FLIP_WEIGHT: "flip a bit of a weight of a rank: rank=1,step=50",
}


def parse_chaos(words: Sequence[str]) -> tuple[Plan, list[str]]:
    """Return the plan and the arguments for `holdfast run`.

    Raises `UsageError`, which names the option and the remedy.
    """
    head, command = split_command(words)
    known, rest = _parser().parse_known_args(head)
    if not command:
        raise UsageError("holdfast chaos: no command to run; end with '-- python train.py'")
    specs = [(kind, text) for kind in Kind for text in getattr(known, str(kind)) or ()]
    if not specs and not known.rate:
        raise UsageError(
            "holdfast chaos: no faults to inject: pass faults, for example --kill rank=1,step=50, or --rate 2/min"
        )
    parse(["run", *rest, "--", *command])
    seed = secrets.randbelow(1 << 31) if known.seed is None else known.seed
    plan = make_plan(seed=seed, specs=specs, per_second=known.rate, kinds=known.faults)
    return plan, [*rest, "--", *command]


def _parser() -> Parser:
    usage = "holdfast chaos [faults] [options of holdfast run] -- python train.py [arguments]"
    parser = Parser(prog="holdfast chaos", usage=usage, description=CHAOS_HELP, allow_abbrev=False)
    for kind in Kind:
        text = _FAULT_HELP[kind]
        parser.add_argument(
            f"--{kind}", dest=str(kind), type=checked(_spec(kind)), action="append", metavar="SPEC", help=text
        )
    parser.add_argument(
        "--rate", type=checked(read_rate), default=0.0, help="inject faults at random times, for example 2/min"
    )
    parser.add_argument(
        "--faults",
        type=checked(read_kinds),
        default=(Kind.KILL,),
        help="kinds of the random faults, for example kill,stop (default: kill)",
    )
    parser.add_argument(
        "--seed", type=checked(whole()), help="seed of the random faults, to repeat them (default: random)"
    )
    return parser


def _spec(kind: Kind) -> Callable[[str], str]:
    def parse_spec(text: str) -> str:
        read_fault(kind, text)
        return text

    return parse_spec
