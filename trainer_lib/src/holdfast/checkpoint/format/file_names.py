"""Names of folders and files on a tier. Pure.

A commit is the folder `step-<step>.g<generation>.a<attempt>`; while it is written it has `.tmp-<uuid>` behind its
name, so that nobody takes it for one.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError

MANIFEST: Final = "MANIFEST.json"
# A manifest that retention took away: the folder is half deleted, and whoever comes next finishes it.
DELETED_MANIFEST: Final = "MANIFEST.json.deleted"
CLAIMS: Final = "claims"
QUARANTINE: Final = "quarantine"
LATEST: Final = "LATEST"
# Names the commit that is on its way to the object store.
UPLOADING: Final = "UPLOADING"
# Which run without an operator has the folder.
RUN_LOCK: Final = "run.lock"

_MOST: Final = 10**18  # of what a name has digits for
_NUMBER: Final = r"(0|[1-9]\d{0,17})"  # a commit has one name
_COMMIT: Final = re.compile(rf"step-{_NUMBER}\.g{_NUMBER}\.a{_NUMBER}(\.tmp-[0-9a-f]{{32}})?", re.ASCII)
_CLAIM: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}\.json(\.tmp-[0-9a-f]{{32}})?", re.ASCII)
_SLICES: Final = ".slices"
_SHARD: Final = re.compile(r"rank-(0|[1-9]\d{0,8})\.(safetensors|json)", re.ASCII)


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointName:
    """What the name of a commit's folder says. Their order is the order of steps; of one step, that of attempts."""

    step: int
    pair: AttemptId
    staging: bool = False

    def __str__(self) -> str:
        return f"step-{self.step}.g{self.pair.generation}.a{self.pair.attempt}"

    def to_json(self) -> str:
        return str(self)

    @classmethod
    def from_json(cls, value: str) -> CheckpointName:
        name = parse_commit(value)
        if name is None:
            raise ValueError(f"{value[:80]!r} is no commit's name")
        return name


def step_number(value: object) -> int:
    """A step that a commit's name can say; UsageError for anything else."""
    number = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if number is None or not 0 <= number < _MOST:
        raise UsageError(f"step is {value!r}: give a whole number from 0 to {_MOST - 1}")
    return number


def parse_commit(name: str) -> CheckpointName | None:
    """Read a folder's name; None if it is nobody's commit."""
    match = _COMMIT.fullmatch(name)
    if match is None:
        return None
    step, generation, attempt = (int(part) for part in match.groups()[:3])
    return CheckpointName(step=step, pair=AttemptId(generation, attempt), staging=match[4] is not None)


def claim_file(pair: AttemptId) -> str:
    return f"{pair.generation}.{pair.attempt}.json"


def parse_claim(name: str) -> tuple[AttemptId, bool] | None:
    """The pair that a claim's file names, and whether it is only a leftover of writing one."""
    match = _CLAIM.fullmatch(name)
    return None if match is None else (AttemptId(int(match[1]), int(match[2])), match[3] is not None)


def tensors_file(rank: int) -> str:
    """The file of a rank's share of the tensors."""
    return f"rank-{rank}.safetensors"


def rank_file(rank: int) -> str:
    """The file of what belongs to one rank alone."""
    return f"rank-{rank}.json"


def is_rank_file(name: str) -> bool:
    return is_shard(name) and name.endswith(".json")


def slices_file(file: str) -> str:
    """The file with the digests of a file's slices, beside it."""
    return f"{file.rpartition('.')[0]}{_SLICES}"


def is_shard(name: str) -> bool:
    """Whether a manifest may name this file: it lies in the commit's own folder."""
    return _SHARD.fullmatch(name) is not None


def inherited(file: str) -> CheckpointName | None:
    """The earlier commit in whose folder a file lies that a manifest names; None for all other names."""
    folder, slash, shard = file.partition("/")
    name = parse_commit(folder) if slash and is_shard(shard) else None
    return name if name is not None and not name.staging and str(name) == folder else None


def located(name: CheckpointName, file: str) -> tuple[CheckpointName, str]:
    """Where a file lies that the manifest of this commit names: in which commit's folder, under which name."""
    home = inherited(f"{file.removesuffix(_SLICES)}.safetensors" if file.endswith(_SLICES) else file)
    return (name, file) if home is None else (home, file.partition("/")[2])


def shard_rank(name: str) -> int:
    """The rank that wrote a file of which `is_shard` is true."""
    match = _SHARD.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no rank's file")
    return int(match[1])
