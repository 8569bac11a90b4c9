"""Donors and receivers: real processes that a helper forks, with real gloo."""

from __future__ import annotations

import json
import os
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
SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"


class Ranks:
    """Run transfers."""

    def __init__(self) -> None:
        patience = timedelta(seconds=PATIENCE)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        # NumPy's OpenBLAS starts a thread per CPU when it is loaded. Processes with threads cannot fork safely.
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._helper = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone
        )
        self._said: Queue[dict[str, Any]] = Queue()
        self._prefixes = count(1)
        Thread(target=self._listen, daemon=True).start()

    def play(
        self,
        kind: str = "small",
        *,
        donors: int = 1,
        newcomers: int = 1,
        kinds: dict[int, str] | None = None,
        fault: dict[str, Any] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Return the output of each rank. The first ones are donors. A rank that dies has none."""
        prefix, size = f"1.{next(self._prefixes)}", donors + newcomers
        order = {
            "prefix": prefix,
            "port": self._store.port,
            "donors": list(range(donors)),
            "to": list(range(donors, size)),
            "kinds": [(kinds or {}).get(rank, kind) for rank in range(size)],
            "fault": fault,
        }
        assert self._helper.stdin is not None
        for rank in range(size):
            self._helper.stdin.write(json.dumps({**order, "rank": rank}) + "\n")
        self._helper.stdin.flush()
        expected = set(range(size)) - ({fault["rank"]} if fault and fault["act"] == "die" else set())
        said: dict[int, dict[str, Any]] = {}
        while set(said) != expected:
            one = self._next(said)
            if "dies" in one:
                self._store.set(f"{one['prefix']}/over", "")
            elif one["prefix"] == prefix:
                said[one["rank"]] = one
        self._store.set(f"{prefix}/end", "")
        return dict(sorted(said.items()))  # not in the order of their messages

    def _next(self, said: dict[int, Any]) -> dict[str, Any]:
        try:
            return self._said.get(timeout=PATIENCE)
        except Empty:
            pytest.fail(f"no word for {PATIENCE:g} s after {said}")

    def _listen(self) -> None:
        assert self._helper.stdout is not None
        for line in self._helper.stdout:
            self._said.put(json.loads(line))

    def close(self) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait(PATIENCE)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()
