"""The `checkpoint_id` of `torch.distributed.checkpoint`: a folder and a step. Pure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from holdfast.core.errors import CheckpointError
from holdfast.core.paths import local_path

CHECKPOINT_ID: Final = re.compile(r"(?:(?P<folder>.*)/)?step-(?P<step>\d{1,18})", re.ASCII)


def parse_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> tuple[Path | None, int]:
    match = CHECKPOINT_ID.fullmatch(os.fspath(checkpoint_id))
    if match is None:
        raise CheckpointError(f"invalid checkpoint_id {checkpoint_id!r}: expected <folder>/step-<number>")
    return None if match["folder"] is None else local_path(match["folder"]), int(match["step"])
