"""Uploaders and their sources."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.tiers.uploader import (
    Target,
    Uploader,
    UploadSettings,
)
from holdfast.core.attempt import AttemptId


def uploader(source: FolderStore, target: Target, **settings: Any) -> Uploader:
    made = UploadSettings(url=target.url, **settings)
    return Uploader(source=source, target=target, settings=made, pace=Pace(None))


def name(step: int) -> CheckpointName:
    return CheckpointName(step=step, attempt_id=AttemptId(1, 1))
