"""Jobs in this process (a world of one), and real worlds of processes under a launcher that the test simulates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import SCRIPT, Forks, Launcher
from solo_job import Solo, make_solo


@pytest.fixture
def solo() -> Callable[..., Solo]:
    """A job in a world of one. A second call with the same folder starts the next attempt."""
    return make_solo


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def script() -> Any:
    """The parts of a script for a world of one in this process."""
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{SCRIPT} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launcher(tmp_path: Path, short_path: Path, forks: Forks) -> Iterator[Launcher]:
    playing = Launcher(tmp_path, forks, sockets=short_path)
    try:
        yield playing
    finally:
        playing.close()
