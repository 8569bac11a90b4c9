"""The options of `holdfast checkpoints`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from holdfast.cli.support.arguments import Parser


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="holdfast checkpoints",
        description="Look at checkpoints, check, copy and compare them.",
        epilog="exit codes: 0 fine, 1 damaged or different, 2 usage, 3 cannot be read or written",
        allow_abbrev=False,
    )
    verbs = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _listing(verbs.add_parser("ls", help="the commits in a folder", allow_abbrev=False))
    _one(verbs.add_parser("show", help="one commit: what it holds", allow_abbrev=False))
    checked = _one(verbs.add_parser("verify", help="read every byte and name what is damaged", allow_abbrev=False))
    checked.add_argument("--newest", action="store_true", help="only the newest commit")
    checked.add_argument("--quarantine", action="store_true", help="move what is damaged aside")
    compared = verbs.add_parser("diff", help="what differs between two commits", allow_abbrev=False)
    compared.add_argument("before", metavar="A", help="a commit's folder, or a folder whose newest commit is meant")
    compared.add_argument("after", metavar="B", help="the same")
    copied = verbs.add_parser("copy", help="copy commits to another folder", allow_abbrev=False)
    copied.add_argument("source", metavar="SOURCE", help="a folder of commits, or one commit's")
    copied.add_argument("target", metavar="TARGET", help="the folder that gets them; made if it is not there")
    copied.add_argument("--step", type=_step, help="only the commit of this step")
    pruned = verbs.add_parser("prune", help="delete old commits by rules", allow_abbrev=False)
    pruned.add_argument("where", metavar="WHERE", help="a folder of commits (a path or a URL)")
    pruned.add_argument(
        "--rule",
        action="append",
        default=[],
        help="what stays beside the last ones: hours=6, daily=7, weekly=13, every=10000",
    )
    pruned.add_argument("--keep-last", type=_step, required=True, help="the newest that are whole; at least 1")
    pruned.add_argument(
        "--others", action="store_true", help="also what other jobs left there and the present one does not continue"
    )
    pruned.add_argument("--dry-run", action="store_true", help="say what would go and why, and delete nothing")
    rewound = verbs.add_parser("rewind", help="have the job resume from an older commit", allow_abbrev=False)
    rewound.add_argument("where", metavar="FOLDER", help="the job's folder of commits; the job must not run")
    rewound.add_argument("--step", type=_step, required=True, help="the step of the commit to resume from")
    rewound.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    _interchange(verbs)
    for verb in verbs.choices.values():
        verb.add_argument("--json", action="store_true", help="print JSON")
    return top


def _interchange(verbs: Any) -> None:
    taken = verbs.add_parser("convert", help="make a commit of weights in another format", allow_abbrev=False)
    taken.add_argument("source", metavar="SOURCE", help="a .pt, .bin or .safetensors file, an index, a folder, DCP")
    taken.add_argument("target", metavar="TARGET", help="the folder that gets the commit; made if it is not there")
    taken.add_argument("--step", type=_step, default=0, help="the commit's step (0)")
    taken.add_argument("--key", default="", help="the part of the source that is meant, such as state_dict")
    taken.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="what a wrapper put before all names, such as module."
    )
    naming = taken.add_mutually_exclusive_group()
    naming.add_argument("--object", default="model", help="the name of the object in the commit (model)")
    naming.add_argument("--split", action="store_true", help="each top-level part is an object of its own")
    given = _one(verbs.add_parser("export", help="write safetensors for other programs", allow_abbrev=False))
    given.add_argument("target", metavar="TARGET", help="a .safetensors file, or a folder in Hugging Face's layout")
    given.add_argument("--object", default="model", help="the object whose tensors are meant (model)")
    given.add_argument(
        "--max-shard-size", type=_nbytes, default=_nbytes("5GB"), help="of each file in a folder (5GB)"
    )


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,8})(B|kB|KB|MB|GB|TB)", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give such as 500MB or 5GB")
    factor: int = 1000 ** ("B", "KB", "MB", "GB", "TB").index(match[2].upper())
    return int(match[1]) * factor


def _listing(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("where", metavar="WHERE", help="a folder of commits (a path or a URL), or one commit's")
    return parser


def _one(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    _listing(parser).add_argument("--step", type=_step, help="the commit of this step")
    return parser


def _step(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: give a whole number")
    return int(text)
