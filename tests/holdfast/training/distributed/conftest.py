"""Worlds of real processes without a launcher, for the collectives of one attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import pytest
from torch.distributed import TCPStore

PATIENCE = 240.0
SCRIPT = Path(__file__).parent / "scripts" / "members.py"


class Members:
    """Run cases with ranks that a helper forks."""

    def __init__(self) -> None:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
        )
        # NumPy's OpenBLAS starts a thread per CPU when it is loaded. Processes with threads cannot fork safely.
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._helper = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone
        )
        self._said: Queue[dict[str, Any]] = Queue()
        self._prefixes = count(1)
        Thread(target=self._listen, daemon=True).start()

    def play(self, case: str, *, size: int, fault: str = "") -> list[dict[str, Any]]:
        """Return the output of each rank as one dictionary, without the rank that fails."""
        prefix = f"1.{next(self._prefixes)}"
        survivors = size - bool(fault)
        for rank in range(size):
            self._order(case=case, rank=rank, size=size, port=self._store.port, prefix=prefix, fault=fault)
        heard: list[dict[str, Any]] = [{} for _ in range(size)]
        try:
            while not all("end" in one for one in heard[:survivors]) or (fault and "suffers" not in heard[-1]):
                said = self._next(case, heard)
                if said["prefix"] == prefix:
                    heard[said["rank"]].update(said)
        finally:
            if fault != "killed" and "suffers" in heard[-1]:  # the process ID of a dead process may have been reused
                os.kill(heard[-1]["suffers"], signal.SIGKILL)
        return heard[:survivors]

    def close(self) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(PATIENCE)

    def _order(self, **order: Any) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.write(json.dumps(order) + "\n")
        self._helper.stdin.flush()

    def _next(self, case: str, heard: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            return self._said.get(timeout=PATIENCE)
        except Empty:
            pytest.fail(f"{case}: no word for {PATIENCE:g} s after {heard}")

    def _listen(self) -> None:
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            if line.startswith("{"):  # gloo of some versions of torch also prints lines
                self._said.put(json.loads(line))


@pytest.fixture(scope="session")
def members() -> Iterator[Members]:
    """Ranks that are forked on demand. Stopped or sleeping ones are ended with their case."""
    made = Members()
    yield made
    made.close()
