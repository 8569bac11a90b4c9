"""The watches end when they are told to, whenever that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

# As ``process`` does: told to end before kopf hears signals itself.
TOLD_EARLY = """
import signal, threading
from holdfast_operator import handlers
from holdfast_operator.cache import Cache
from holdfast_operator.feed import Feed
from holdfast_operator.queue import KeyedQueue

ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
signal.raise_signal(signal.SIGTERM)
handlers.serve(Feed(Cache(), KeyedQueue()), (), ended)
print("ended")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process whose API server is away."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}


def test_a_signal_that_came_before_the_watches_began_ends_them(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_EARLY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-2000:]
