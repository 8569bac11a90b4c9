"""Claims on a tier. A claim is an attempt's right to save checkpoints, and is written before its first step."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from uuid import uuid4

from holdfast.checkpoint.format.file_names import CLAIMS, claim_file, parse_claim
from holdfast.checkpoint.io.durable_files import (
    create_durably,
    encode_json,
    move_exclusively,
    read_regular,
    sync_folder,
)
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, CorruptCheckpointError, DocumentError

_TRIES: Final = 10

_log = logging.getLogger("holdfast.checkpoint.claims")

LARGEST: Final = 64 << 10
"""The largest size of a claim, in bytes. A normal claim is about a hundred times smaller."""


def list_claims(root: Path) -> tuple[Claim, ...]:
    """Return every claim on the tier, in order.

    Raise an error if a claim cannot be read: a fence must not be missed.
    """
    for _ in range(_TRIES):
        # a superseded claim was removed during the listing: list again to find its successor
        with contextlib.suppress(FileNotFoundError):
            return _listed(root)
    return _listed(root)


def highest_generation(root: Path) -> int:
    """Return the highest generation of any claim or unfinished claim file; 0 if there is none.

    Without hard links, an unfinished file of a killed writer blocks its attempt's name for every other writer.
    """
    return max((attempt_id.generation for attempt_id, _ in _names(root)), default=0)


def _listed(root: Path) -> tuple[Claim, ...]:
    attempt_ids = sorted(attempt_id for attempt_id, leftover in _names(root) if not leftover)
    return tuple(_read(root / CLAIMS / claim_file(attempt_id), attempt_id) for attempt_id in attempt_ids)


def _names(root: Path) -> list[tuple[AttemptId, bool]]:
    """Return the attempt ID of each file, and whether the file is a leftover of an unfinished write."""
    try:
        return [parsed for path in (root / CLAIMS).iterdir() if (parsed := parse_claim(path.name)) is not None]
    except FileNotFoundError:
        return []


def _read(path: Path, attempt_id: AttemptId) -> Claim:
    try:
        raw = read_regular(path, LARGEST)
    except CorruptCheckpointError as error:
        raise ClaimError(
            f"{path} is not a valid claim: {error}. Restore the file, or move the whole folder away to start over"
        ) from error
    return parse_document(raw, attempt_id, str(path))


def parse_document(raw: bytes, attempt_id: AttemptId, path: str) -> Claim:
    """Parse the claim in a file that is named after `attempt_id`."""
    try:
        document = json.loads(raw)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        claim = Claim.from_json(document)
    except (ValueError, RecursionError, DocumentError) as error:
        raise ClaimError(
            f"this release cannot read the claim {path} ({error}). Nothing was changed. Restore the file, "
            "or move the whole folder away to start over"
        ) from error
    if claim.attempt_id != attempt_id:
        raise ClaimError(f"{path} claims {claim.attempt_id}. Nothing was changed. Restore the file")
    return claim


def write_claim(root: Path, claim: Claim, *, again: bool = False) -> None:
    """Make the claim durable under its own name, exclusively. `again`: an earlier try may have created it already."""
    folder = root / CLAIMS
    target = folder / claim_file(claim.attempt_id)
    fresh = folder / f"{claim_file(claim.attempt_id)}.tmp-{uuid4().hex}"
    try:
        folder.mkdir(exist_ok=True)
        if not again or claim not in list_claims(root):
            create_durably(fresh, encode_json(claim.to_json()))
            try:
                move_exclusively(fresh, target)
            finally:
                fresh.unlink(missing_ok=True)
        sync_folder(folder)
        sync_folder(root)
    except FileExistsError:
        raise ClaimError(
            f"{target} exists: another process has claimed attempt {claim.attempt_id} in this folder"
        ) from None
    except OSError as error:
        raise ClaimError(
            f"cannot write {target}: {error.strerror}. Without a claim, no checkpoint can be saved. Use a "
            "checkpoint folder that is writable and has free space"
        ) from error


def remove_claims(root: Path, claims: Iterable[Claim]) -> None:
    """Remove claims that a durable claim has superseded. A claim that cannot be removed is harmless."""
    for claim in claims:
        with contextlib.suppress(OSError):
            (root / CLAIMS / claim_file(claim.attempt_id)).unlink()


def clean_claims(root: Path, below: AttemptId) -> None:
    """Remove the unfinished claim files of attempts below this one."""
    with contextlib.suppress(OSError):
        for path in (root / CLAIMS).iterdir():
            parsed = parse_claim(path.name)
            if parsed is not None and parsed[1] and parsed[0] < below:
                path.unlink(missing_ok=True)
                _log.info("removed the leftover %s", path.name)
