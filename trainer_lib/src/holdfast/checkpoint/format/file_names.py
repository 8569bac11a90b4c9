"""Names of folders and files on a tier. Pure.

A checkpoint is the folder `step-<step>.g<generation>.a<attempt>`. While the checkpoint is written, the folder's name
ends with `.tmp-<uuid>`, so that no reader uses it.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError

MANIFEST: Final = "MANIFEST.json"
# A manifest that retention renamed. The folder is half deleted, and a later attempt deletes the rest.
DELETED_MANIFEST: Final = "MANIFEST.json.deleted"
CLAIMS: Final = "claims"
QUARANTINE: Final = "quarantine"
LATEST: Final = "LATEST"
# The file that names the checkpoint that is being uploaded to the object store.
UPLOADING: Final = "UPLOADING"
# The lock file of a run without an operator, which shows the run that uses the folder.
RUN_LOCK: Final = "run.lock"

_MOST: Final = 10**18  # limit of the numbers in a name, which have at most 18 digits
_NUMBER: Final = r"(0|[1-9]\d{0,17})"  # no leading zeros, so that a checkpoint has exactly one name
_COMMIT: Final = re.compile(rf"step-{_NUMBER}\.g{_NUMBER}\.a{_NUMBER}(\.tmp-[0-9a-f]{{32}})?", re.ASCII)
_CLAIM: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}\.json(\.tmp-[0-9a-f]{{32}})?", re.ASCII)
_SLICES: Final = ".slices"
_SHARD: Final = re.compile(r"rank-(0|[1-9]\d{0,8})\.(safetensors|json)", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointName:
    """The parts of the name of a checkpoint's folder. Names are ordered by step, and then by attempt."""

    step: int
    attempt_id: AttemptId
    staging: bool = False

    def __str__(self) -> str:
        return f"step-{self.step}.g{self.attempt_id.generation}.a{self.attempt_id.attempt}"

    def to_json(self) -> str:
        return str(self)

    @classmethod
    def from_json(cls, value: str) -> CheckpointName:
        name = parse_commit(value)
        if name is None:
            raise ValueError(f"{value[:80]!r} is not the name of a checkpoint")
        return name


def step_number(value: object) -> int:
    """Return `value` as a step that a checkpoint's name can hold. Raise `UsageError` for anything else."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or not 0 <= number < _MOST:
        raise UsageError(f"invalid step {value!r}: expected an integer from 0 to {_MOST - 1}")
    return number


def parse_commit(name: str) -> CheckpointName | None:
    """Parse a folder's name. Return None if it is not the name of a checkpoint."""
    match = _COMMIT.fullmatch(name)
    if match is None:
        return None
    step, generation, attempt = (int(part) for part in match.groups()[:3])
    return CheckpointName(step=step, attempt_id=AttemptId(generation, attempt), staging=match[4] is not None)


def claim_file(attempt_id: AttemptId) -> str:
    return f"{attempt_id.generation}.{attempt_id.attempt}.json"


def parse_claim(name: str) -> tuple[AttemptId, bool] | None:
    """Return the attempt ID that a claim file names, and whether the file is a leftover of an unfinished write."""
    match = _CLAIM.fullmatch(name)
    return None if match is None else (AttemptId(int(match[1]), int(match[2])), match[3] is not None)


def tensors_file(rank: int) -> str:
    """Return the name of the file with a rank's share of the tensors."""
    return f"rank-{rank}.safetensors"


def rank_file(rank: int) -> str:
    """Return the name of the file with the per-rank state."""
    return f"rank-{rank}.json"


def is_rank_file(name: str) -> bool:
    return is_shard(name) and name.endswith(".json")


def slices_file(file: str) -> str:
    """Return the name of the file with the digests of a file's slices, in the same folder."""
    return f"{file.rpartition('.')[0]}{_SLICES}"


def is_shard(name: str) -> bool:
    """Return whether this is the name of a rank's file in the checkpoint's own folder."""
    return _SHARD.fullmatch(name) is not None


def inherited(file: str) -> CheckpointName | None:
    """Return the earlier checkpoint whose folder has this file of a manifest; None for any other name."""
    folder, slash, shard = file.partition("/")
    name = parse_commit(folder) if slash and is_shard(shard) else None
    return name if name is not None and not name.staging and str(name) == folder else None


def located(name: CheckpointName, file: str) -> tuple[CheckpointName, str]:
    """Return the checkpoint whose folder has this file of the manifest of `name`, and the file's name there."""
    home = inherited(f"{file.removesuffix(_SLICES)}.safetensors" if file.endswith(_SLICES) else file)
    return (name, file) if home is None else (home, file.partition("/")[2])


def shard_rank(name: str) -> int:
    """Return the rank that wrote a file for which `is_shard` is true."""
    match = _SHARD.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a rank's file")
    return int(match[1])
