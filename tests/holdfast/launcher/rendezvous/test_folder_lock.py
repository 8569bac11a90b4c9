"""The lock on a checkpoint folder."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from holdfast.core.errors import UsageError
from holdfast.launcher.rendezvous.folder_lock import hold


def test_a_full_disk_costs_the_holders_name_and_not_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    let_go = asyncio.run(hold(tmp_path, "the first run"))
    with pytest.raises(UsageError, match="another run has its checkpoints in"):
        asyncio.run(hold(tmp_path, "the second run", timeout=0.0))
    let_go()
    asyncio.run(hold(tmp_path, "the second run", timeout=0.0))()
