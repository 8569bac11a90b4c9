"""The options of `holdfast checkpoints`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from holdfast.cli.support.arguments import Parser


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="holdfast checkpoints",
        description="List, verify, copy and compare checkpoints.",
        epilog="exit codes: 0 success, 1 corrupt or different, 2 usage, 3 cannot be read or written",
        allow_abbrev=False,
    )
    verbs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _listing(verbs.add_parser("ls", help="list the checkpoints in a folder", allow_abbrev=False))
    _single_checkpoint(verbs.add_parser("show", help="show the content of a checkpoint", allow_abbrev=False))
    checked = _single_checkpoint(
        verbs.add_parser("verify", help="read every byte and report corruption", allow_abbrev=False)
    )
    checked.add_argument("--newest", action="store_true", help="only the newest checkpoint")
    checked.add_argument("--quarantine", action="store_true", help="move corrupt checkpoints to a quarantine folder")
    compared = verbs.add_parser("diff", help="compare two checkpoints", allow_abbrev=False)
    compared.add_argument(
        "before", metavar="A", help="a checkpoint, or a folder, of which the newest checkpoint is used"
    )
    compared.add_argument("after", metavar="B", help="the other checkpoint or folder")
    copied = verbs.add_parser("copy", help="copy checkpoints to another folder", allow_abbrev=False)
    copied.add_argument("source", metavar="SOURCE", help="a folder of checkpoints, or one checkpoint")
    copied.add_argument("target", metavar="TARGET", help="the folder to copy to; created if it does not exist")
    copied.add_argument("--step", type=_step, help="only the checkpoint of this step")
    pruned = verbs.add_parser("prune", help="delete old checkpoints by rules", allow_abbrev=False)
    pruned.add_argument("where", metavar="WHERE", help="a folder of checkpoints (a path or a URL)")
    pruned.add_argument(
        "--rule",
        action="append",
        default=[],
        help="also keep checkpoints by rule: hours=6, daily=7, weekly=13, every=10000",
    )
    pruned.add_argument(
        "--keep-last", type=_step, required=True, help="number of newest complete checkpoints to keep; at least 1"
    )
    pruned.add_argument(
        "--others",
        action="store_true",
        help="also delete checkpoints of other jobs that the present job does not continue",
    )
    pruned.add_argument("--dry-run", action="store_true", help="print what would be deleted and why; delete nothing")
    rewound = verbs.add_parser("rewind", help="make the job resume from an older checkpoint", allow_abbrev=False)
    rewound.add_argument("where", metavar="PLACE", help="the job's checkpoint folder or URL; the job must not run")
    rewound.add_argument("--step", type=_step, required=True, help="the step of the checkpoint to resume from")
    rewound.add_argument("--dry-run", action="store_true", help="print what would be done; change nothing")
    _interchange(verbs)
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="print JSON")
    return top


def _interchange(verbs: Any) -> None:
    taken = verbs.add_parser("convert", help="convert weights in another format to a checkpoint", allow_abbrev=False)
    taken.add_argument("source", metavar="SOURCE", help="a .pt, .bin or .safetensors file, an index, a folder, DCP")
    taken.add_argument("target", metavar="TARGET", help="the folder to write to; created if it does not exist")
    taken.add_argument("--step", type=_step, default=0, help="the checkpoint's step (default: 0)")
    taken.add_argument("--key", default="", help="the part of the source to convert, for example state_dict")
    taken.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="prefix to remove from all names, for example module."
    )
    naming = taken.add_mutually_exclusive_group()
    naming.add_argument("--object", default="model", help="name of the object in the checkpoint (default: model)")
    naming.add_argument("--split", action="store_true", help="write each top-level part as a separate object")
    given = _single_checkpoint(
        verbs.add_parser("export", help="export tensors as safetensors for other programs", allow_abbrev=False)
    )
    given.add_argument("target", metavar="TARGET", help="a .safetensors file, or a folder in Hugging Face's layout")
    given.add_argument("--object", default="model", help="the object to export (default: model)")
    given.add_argument(
        "--max-shard-size",
        type=_nbytes,
        default=_nbytes("5GB"),
        help="largest size of each file in a folder (default: 5GB)",
    )


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,8})(B|kB|KB|MB|GB|TB)", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: expected a number and a unit, for example 500MB or 5GB"
        )
    factor: int = 1000 ** ("B", "KB", "MB", "GB", "TB").index(match[2].upper())
    return int(match[1]) * factor


def _listing(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("where", metavar="WHERE", help="a folder of checkpoints (a path or a URL), or one checkpoint")
    return parser


def _single_checkpoint(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    _listing(parser).add_argument("--step", type=_step, help="the checkpoint of this step")
    return parser


def _step(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: expected an integer")
    return int(text)
