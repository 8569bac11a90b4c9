"""The configuration of a launcher at its start, with or without the operator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.tiers.uploader import UploadSettings
from holdfast.launcher.network.control_channel import CONTROL_PORT
from holdfast.launcher.network.tcp_store import STORE_PORT
from holdfast.launcher.ranks.supervisor import Command
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.options import TierOptions


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """The settings that a launcher needs before it receives a membership."""

    run_dir: Path
    identity: Identity
    host: str  # peers reach this launcher here
    command: Command
    control_port: int = CONTROL_PORT
    store_port: int = STORE_PORT
    grace_seconds: float = 30.0
    termination_log: Path | None = None
    membership_from_file: bool = True
    timeline: Path | None = None  # default: in the run directory
    stand_by: bool = True  # start the script before its world is known
    checkpoint_folder: Path | None = None
    upload: UploadSettings | None = None
    memory: TierOptions | None = None
    local: TierOptions | None = None
