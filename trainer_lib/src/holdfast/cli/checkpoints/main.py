"""`holdfast checkpoints COMMAND …`: options, output and exit code.

0: success. 1: corrupt, or different. 2: invalid arguments. 3: a read or write failed, or there was nothing to verify
or to copy, so the state of the checkpoints is unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any

from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.restore.lossy_delta import inexactness
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints import list_show
from holdfast.cli.checkpoints.access.commit_reader import Content, tensor_bytes
from holdfast.cli.checkpoints.access.locate import choose, every, fenced, find
from holdfast.cli.checkpoints.access.progress_bar import printable, progress
from holdfast.cli.checkpoints.copy import Copied, Uncopied, copy_all, left_out
from holdfast.cli.checkpoints.diff import Difference, compared_bytes, diff
from holdfast.cli.checkpoints.options import parser
from holdfast.cli.checkpoints.prune import Pruning, carry_out, plan
from holdfast.cli.checkpoints.rewind import Rewinding
from holdfast.cli.checkpoints.rewind import carry_out as go_back
from holdfast.cli.checkpoints.rewind import plan as rewind
from holdfast.cli.checkpoints.verify import Verification, verify
from holdfast.core.errors import CorruptCheckpointError, HoldfastError, UsageError
from holdfast.core.paths import local_path
from holdfast.core.settings import format_size
from holdfast.launcher.rendezvous.folder_lock import hold


class Exit(IntEnum):
    """Exit codes of `holdfast checkpoints`."""

    FINE = 0
    BAD = 1
    USAGE = 2
    UNREADABLE = 3


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    try:
        known = parser().parse_args(list(arguments))
        return int(_COMMANDS[known.command](known))
    except UsageError as error:
        return _print_error(error, Exit.USAGE)
    except CorruptCheckpointError as error:
        return _print_error(error, Exit.BAD)
    except (HoldfastError, OSError) as error:
        return _print_error(error, Exit.UNREADABLE)


def _print_error(error: Exception, code: Exit) -> int:
    print(printable(f"holdfast checkpoints: {str(error).removeprefix('holdfast checkpoints: ')}"), file=sys.stderr)
    return int(code)


def _print(document: Any, text: Callable[[], str], *, as_json: bool) -> None:
    print(json.dumps(document, indent=2) if as_json else printable(text()))


def _ls(known: argparse.Namespace) -> Exit:
    place = find(known.where)
    lines = list_show.listed(place.store, every(place))
    document = {"tier": place.store.url, "commits": lines}
    _print(
        document,
        lambda: list_show.table(lines) if lines else f"{place.store.url} has no checkpoint",
        as_json=known.json,
    )
    return Exit.FINE


def _show(known: argparse.Namespace) -> Exit:
    place = find(known.where)
    commit = list_show.shown(place.store, choose(place, known.step))
    _print(commit, lambda: list_show.page(commit), as_json=known.json)
    return Exit.FINE


def _verify(known: argparse.Namespace) -> Exit:
    place = find(known.where)
    mover = place.changeable if known.quarantine else None
    names = [choose(place, known.step)] if known.newest else every(place, known.step)
    verifications = []
    for name in names:
        verification = verify(place.store, name)
        if mover is not None and verification.damaged:
            verification = verify(place.store, name)  # one failed read is no proof: bytes may change on their way
        moved = bool(mover is not None and verification.damaged and mover.quarantine(name, verification.reason))
        verifications.append((verification, moved))
        if not known.json:
            print(printable(_result_text(verification, moved=moved)), flush=True)
    if known.json:
        commits = [{**verification.to_json(), "quarantined": moved} for verification, moved in verifications]
        print(json.dumps({"tier": place.store.url, "commits": commits}, indent=2))
    elif not names:
        print(f"{place.store.url} has no checkpoint")
    if any(verification.damaged for verification, _ in verifications):
        return Exit.BAD
    unread = not verifications or any(verification.unknown for verification, _ in verifications)
    return Exit.UNREADABLE if unread else Exit.FINE


def _result_text(verification: Verification, *, moved: bool) -> str:
    if verification.unknown:
        return f"{verification.name}: not verified: {verification.unknown}"
    if verification.gone:
        return f"{verification.name}: deleted while it was read"
    if verification.verified:
        return f"{verification.name}: complete, {format_size(verification.nbytes)} verified"
    if not verification.damaged:
        return (
            f"{verification.name}: the files on this node are good, {format_size(verification.nbytes)} "
            f"verified{_unseen(verification)}"
        )
    lines = [f"{verification.name}: CORRUPT" + (", moved to quarantine" if moved else "") + _unseen(verification)]
    for damage in verification.damages:
        lines.append(f"  {damage.reason}")
        lines.extend(f"    tensor {tensor}" for tensor in damage.tensors)
    return "\n".join(lines)


def _unseen(verification: Verification) -> str:
    if not verification.elsewhere:
        return ""
    return f"; not verified, because they are on other nodes: {', '.join(verification.elsewhere)}"


def _diff(known: argparse.Namespace) -> Exit:
    one, other = find(known.before), find(known.after)
    with Content(one.store, choose(one, None)) as before, Content(other.store, choose(other, None)) as after:
        with progress("diff", compared_bytes(before.manifest, after.manifest)) as shown:
            found = diff(before, after, shown)
        document = {"before": str(before.name), "after": str(after.name), **found.to_json()}
    _print(document, lambda: _differs(document, found), as_json=known.json)
    return Exit.BAD if found.any else Exit.FINE


def _differs(document: dict[str, Any], found: Difference) -> str:
    lines = [f"{document['before']} -> {document['after']}: {found.same} tensors are equal"]
    for category in ("added", "missing", "shape", "dtype", "changed", "state"):
        lines.extend(f"  {category:8}{name}" for name in document[category])
    return "\n".join(lines)


def _copy(known: argparse.Namespace) -> Exit:
    source, there = find(known.source), find(known.target, fresh=True)
    target = there.changeable
    if there.name is not None:
        raise UsageError(f"{known.target} is the name of a checkpoint: pass the folder to copy to")
    requested = every(source, known.step)
    if not requested:
        raise UsageError(f"{source.store.url} has no checkpoint to copy")
    copied: list[Copied] = []
    left = left_out(source, requested)
    passed = {one.name for one in left}
    bad: list[Uncopied] = []
    for one in chain(left, copy_all(source.store, [name for name in requested if name not in passed], target)):
        if isinstance(one, Uncopied):
            bad.append(one)
            print(printable(f"holdfast checkpoints: {one.name} was not copied: {one.reason}"), file=sys.stderr)
            continue
        copied.append(one)
        if not known.json:
            print(_arrived(one, target.url), flush=True)
    claims = target.claims()
    notes = {str(one.name): reason for one in copied if (reason := fenced(target, one.name, claims))}
    for commit, reason in notes.items():
        print(f"holdfast checkpoints: the job of that folder will not read {commit}: {reason}", file=sys.stderr)
    if known.json:
        entries = [{"commit": str(c.name), "bytes": c.nbytes, "fresh": c.fresh} for c in copied]
        document = {"target": target.url, "commits": entries, "fenced": notes}
        print(json.dumps({**document, "notCopied": {str(one.name): one.reason for one in bad}}, indent=2))
    if any(one.damaged for one in bad):
        return Exit.BAD
    unread = not copied or not all(one.fine for one in bad)
    return Exit.UNREADABLE if unread else Exit.FINE


def _arrived(copied: Copied, url: str) -> str:
    if not copied.fresh:
        return f"{copied.name}: exists already, and is complete"
    return f"{copied.name}: {format_size(copied.nbytes)} copied to {url} and verified"


def _prune(known: argparse.Namespace) -> Exit:
    place = find(known.where)
    store = place.changeable
    if place.name is not None or known.keep_last < 1:
        raise UsageError(
            "holdfast checkpoints prune: pass the folder of the checkpoints, and --keep-last of at least 1"
        )
    rules, now = Rules.parse(",".join(known.rule)), datetime.now(UTC)
    pruning = plan(store, rules, known.keep_last, now=now, others=known.others)
    if not known.dry_run:
        carry_out(store, pruning)
    document = {"tier": store.url, "dryRun": known.dry_run, **pruning.to_json()}
    _print(document, lambda: _pruned(pruning, dry=known.dry_run), as_json=known.json)
    return Exit.BAD if pruning.damaged else Exit.FINE


def _pruned(pruning: Pruning, *, dry: bool) -> str:
    result = "would be deleted" if dry else "deleted"
    rows = [(str(name), result if deleted else "stays", reason) for name, deleted, reason in pruning.lines]
    damaged = [f"{name}: CORRUPT, and not counted: run holdfast checkpoints verify" for name in pruning.damaged]
    left = [f"{name}: {result}, left by an interrupted save or deletion" for name in pruning.leftovers]
    return "\n".join([*damaged, list_show.aligned(rows) if rows else "no checkpoint", *left])


def _rewind(known: argparse.Namespace) -> Exit:
    place = find(known.where)
    store = place.changeable
    if place.name is not None:
        raise UsageError("holdfast checkpoints rewind: pass all checkpoints of the job, not a single one")
    release: Callable[[], None] | None = None
    if isinstance(store, FolderStore):  # an object store has no lock
        release = asyncio.run(hold(Path(store.url), "holdfast checkpoints rewind", timeout=0))
    try:
        rewinding = rewind(store, known.step)
        if not known.dry_run:
            go_back(store, rewinding)
    finally:
        if release is not None:
            release()
    document = {"tier": store.url, "dryRun": known.dry_run, **rewinding.to_json()}
    _print(document, lambda: _rewound(rewinding, dry=known.dry_run), as_json=known.json)
    return Exit.FINE


def _rewound(rewinding: Rewinding, *, dry: bool) -> str:
    result = "would be moved" if dry else "moved"
    moved = [f"{name}: {result} to quarantine/" for name in rewinding.newer] or ["no checkpoint is newer"]
    return "\n".join([*moved, f"the job resumes from {rewinding.base}"])


def _convert(known: argparse.Namespace) -> Exit:
    from holdfast.cli.checkpoints.formats import import_weights
    from holdfast.cli.checkpoints.formats.detect import read_source

    there = find(known.target, fresh=True)
    target = there.changeable
    found = import_weights.pick(read_source(local_path(known.source)), known.key)
    values = import_weights.stripped(
        import_weights.objects(found, name=known.object, split=known.split), known.strip_prefix
    )
    name = import_weights.commit(target, values, step=known.step, made=datetime.now(UTC))
    document = {"commit": str(name), "target": target.url, "objects": sorted(values)}
    _print(document, lambda: f"{name}: created in {target.url} from {', '.join(sorted(values))}", as_json=known.json)
    return Exit.FINE


def _export(known: argparse.Namespace) -> Exit:
    from holdfast.cli.checkpoints.formats.export_weights import export, weights

    place = find(known.where)
    with Content(place.store, choose(place, known.step)) as content:
        chosen = weights(content.manifest, known.object)
        total = sum(tensor_bytes(content.manifest.tensors[source]) for source in chosen.tensors.values())
        with progress("export", total) as shown:
            made = export(content, chosen, local_path(known.target), most=known.max_shard_size, shown=shown)
    document = {
        "commit": str(content.name),
        "files": [str(file) for file in made.files],
        "bytes": made.nbytes,
        "tied": dict(chosen.tied),
        "leftOut": list(chosen.left_out),
        "inexact": inexactness(content.manifest),
    }
    files = "\n".join(f"  {file}" for file in made.files)
    if document["inexact"]:
        print(f"holdfast checkpoints: {content.name} is not exact: {document['inexact']}", file=sys.stderr)
    _print(
        document,
        lambda: f"{content.name}: {format_size(made.nbytes)} verified and written\n{files}",
        as_json=known.json,
    )
    return Exit.FINE


_COMMANDS: dict[str, Callable[[argparse.Namespace], Exit]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "copy": _copy,
    "prune": _prune,
    "rewind": _rewind,
    "convert": _convert,
    "export": _export,
}
