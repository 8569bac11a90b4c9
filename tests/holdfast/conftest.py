"""Checkpoints without torch: byte strings are saved and restored by the code that jobs use."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from command_line import Commands
from nothing_managed import Tensors, snapshot_of

from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.attempt import AttemptId
from holdfast_testbed.fakes.s3 import REGION, S3Server, s3_server

SCRIPTS = Path(__file__).parent / "checkpoint" / "scripts"


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Commands:
    """The command line."""
    return Commands(capsys)


@pytest.fixture(scope="session")
def commit() -> Callable[..., SaveResult]:
    """Write a checkpoint of named byte strings."""

    def write(
        root: Path,
        step: int,
        tensors: Tensors,
        attempt_id: AttemptId | None = None,
        *,
        rank: int = 0,
        metrics: Any = (),
    ) -> SaveResult:
        snapshot = snapshot_of(step, attempt_id or AttemptId(1, 1), tensors, rank=rank)
        told = {"metrics": [[measured, values] for measured, values in metrics]}
        return save(root, replace(snapshot, state=snapshot.state | told), SingleRank())

    return write


@pytest.fixture(scope="session")
def reader() -> ModuleType:
    """A program that reads checkpoints by the reference page only."""
    spec = importlib.util.spec_from_file_location("third_party_reader", SCRIPTS / "third_party_reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def content() -> Callable[[Loaded], dict[str, bytes]]:
    """Return the byte strings of a loaded checkpoint."""

    def read(loaded: Loaded) -> dict[str, bytes]:
        return {name: bytes(loaded.tensors[name]) for name in loaded.manifest.tensors}

    return read


class ThreadExchange:
    """Ranks as threads of this process, with the same collectives and without a network."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared

    def gather(self, value: Any) -> list[Any]:
        self._shared["values"][self.rank] = value
        self._shared["barrier"].wait(timeout=240)
        values = list(self._shared["values"])
        self._shared["barrier"].wait(timeout=240)
        return values

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]


@pytest.fixture
def world() -> Callable[..., list[Any]]:
    """Run `act(exchange)` on every rank of a world, and return the results by rank. A failed rank ends the waits
    of others."""

    def run(size: int, act: Callable[[Exchange], Any]) -> list[Any]:
        barrier = Barrier(size)
        shared = {"values": [None] * size, "barrier": barrier}

        def one(rank: int) -> Any:
            try:
                return act(ThreadExchange(rank, size, shared))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            tasks = [pool.submit(one, rank) for rank in range(size)]
        failures = [error for task in tasks if (error := task.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [task.result() for task in tasks]

    return run


@pytest.fixture(scope="session")
def together() -> Callable[..., list[str]]:
    """Run processes that wait for each other, each with its environment. Assert that they succeed, and return
    their output."""

    def run(commands: Sequence[Sequence[object]], environments: Sequence[Mapping[str, str]]) -> list[str]:
        ranks = [
            subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        try:
            said = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()  # if one is gone, none of those that waited for it stays
                rank.wait()
        assert {rank.returncode for rank in ranks} == {0}, "\n".join(said)[-6000:]
        return said

    return run


@pytest.fixture
def commit_by() -> Callable[..., SaveResult]:
    """Write the part of one rank in a checkpoint of a world."""

    def write(
        exchange: Exchange, root: Path, step: int, tensors: Tensors, attempt_id: AttemptId | None = None
    ) -> SaveResult:
        return save(root, snapshot_of(step, attempt_id or AttemptId(1, 1), tensors, rank=exchange.rank), exchange)

    return write


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_settings(s3: S3Server) -> S3Settings:
    """A bucket for this test, with small parts and short pauses."""
    return S3Settings(
        bucket=s3.make_bucket(f"bucket-{uuid4().hex[:12]}"),
        prefix="team/job",
        endpoint=s3.url,
        region=REGION,
        credentials=s3.credentials,
        part_bytes=8 << 20,
        pause_seconds=0.001,
        longest_pause_seconds=0.01,
    )


@pytest.fixture
def s3_store(s3_settings: S3Settings) -> ObjectStore:
    """A store in that bucket."""
    return ObjectStore(S3Bucket(s3_settings), s3_settings.prefix)
