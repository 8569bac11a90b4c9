"""Upload to S3, save into S3 and verified restore, relative to plain boto3 and the CRT with the same part size.

The server is versitygw on loopback with its data in memory, so that no disk is measured. The upload reads the shared
tier, computes digests (xxh3 of each 8 MiB, SHA-256 of the file), and publishes a manifest. A save without a shared
volume sends the same bytes from memory, with xxh3 alone. The peers upload the same file.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Measurement, interleaved, measured, not_measured, ratios

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.stager import Staged, stage
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.core.attempt import AttemptId
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.fakes.s3 import REGION, S3Server, s3_server

_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder made there is this run's own)
_BUCKET = "bench"
_FILE = "rank-0.safetensors"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A checkpoint in memory and in a folder, a server, and the target of downloads."""

    server: S3Server
    folder: Path
    staged: Staged
    source: FolderStore
    part_bytes: int

    @property
    def name(self) -> CheckpointName:
        """The checkpoint in the folder."""
        return self.staged.snapshot.name

    @property
    def file(self) -> Path:
        """The checkpoint's large file."""
        return self.folder / "shared" / str(self.name) / _FILE


def rows(*, nbytes: int = 1_000_000_000, rounds: int = 7, part_bytes: int = 16 << 20) -> list[Measurement]:
    """Return ratios to the better of the peers in each round."""
    try:
        with _scene(nbytes, part_bytes) as scene, ExitStack() as stack:
            peers = _peers(scene, stack)
            return _rows(scene, peers, rounds)
    except (TestbedError, ImportError) as error:
        return [not_measured("", "upload to and restore from S3", str(error))]


def _rows(scene: Scene, peers: Mapping[str, tuple[Any, Any]], rounds: int) -> list[Measurement]:
    size = f"{scene.file.stat().st_size / 1e9:.1f} GB"
    ours = {"save": lambda: _save(scene), "upload": lambda: _upload(scene)}
    up = interleaved(ours | {n: _timed(scene, p[0]) for n, p in peers.items()}, rounds)
    theirs = {n: up[n] for n in peers}
    _upload(scene)
    for name in peers:
        peers[name][0]()
    down = interleaved(
        {"ours": lambda: _restore(scene), **{n: _timed(scene, p[1]) for n, p in peers.items()}}, rounds
    )
    return [
        _row("upload", f"upload of {size} with digests and manifest", {"ours": up["upload"], **theirs}, "<= 1.2"),
        _row("save", f"save of {size} from memory into S3", {"ours": up["save"], **theirs}, "<= 1.2"),
        _row("restore", f"verified restore of {size} from S3", down, "<= 1.25"),
    ]


def _row(bar: str, what: str, values: Mapping[str, list[float]], target: str) -> Measurement:
    others = {name: found for name, found in values.items() if name != "ours"}
    best = [min(at) for at in zip(*others.values(), strict=True)]
    name = min(others, key=lambda peer: sum(others[peer]))
    said = ", ".join(f"{peer} {sorted(found)[len(found) // 2]:.2f} s" for peer, found in sorted(values.items()))
    return measured(
        f"object-{bar}",
        f"{what} ({said})",
        ratios(values["ours"], best),
        "x best peer",
        target=target,
        peer=1.0,
        peer_name=name,
    )


@contextmanager
def _scene(nbytes: int, part_bytes: int) -> Iterator[Scene]:
    place = _MEMORY if shutil.disk_usage(_MEMORY).free > 6 * nbytes else None
    with tempfile.TemporaryDirectory(dir=place) as folder, s3_server(Path(folder) / "s3") as server:
        server.make_bucket(_BUCKET)
        source, staged = FolderStore(Path(folder) / "shared"), _staged(nbytes)
        commit(source, staged, SingleRank())
        yield Scene(server=server, folder=Path(folder), staged=staged, source=source, part_bytes=part_bytes)


def _staged(nbytes: int) -> Staged:
    data = memoryview(random.Random(1).randbytes(64 << 20))  # noqa: S311 - not compressible, the same each run
    count = -(-nbytes // len(data))
    specs = [
        TensorSpec(name=f"w{i}", dtype="U8", shape=(min(len(data), nbytes - i * len(data)),)) for i in range(count)
    ]
    snapshot = Snapshot(
        name=CheckpointName(step=1, attempt_id=AttemptId(1, 1)),
        specs=specs,
        read=lambda piece: data[: piece.nbytes],
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={},
        numerics={},
        job_uid="bench",
        publication="bench",
    )
    return stage(snapshot, Arena(), Planner(), rank=0, size=1)


def _store(scene: Scene) -> ObjectStore:
    settings = S3Settings(
        bucket=_BUCKET,
        prefix="ours",
        endpoint=scene.server.url,
        region=REGION,
        credentials=scene.server.credentials,
        part_bytes=scene.part_bytes,
    )
    return ObjectStore(S3Bucket(settings), settings.prefix)


def _upload(scene: Scene) -> float:
    store = _store(scene)
    store.delete(scene.name)
    settings = UploadSettings(url=store.url)
    uploader = Uploader(source=scene.source, target=store, settings=settings, pace=Pace(None))
    began = time.perf_counter()
    outcome = uploader.upload(scene.name)
    seconds = time.perf_counter() - began
    if not outcome.arrived:
        raise RuntimeError(outcome.message)
    return seconds


def _save(scene: Scene) -> float:
    """Save what is staged. The copy into the arena is the stall, which does not depend on the store."""
    store = _store(scene)
    store.delete(scene.name)
    began = time.perf_counter()
    result = commit(store, scene.staged, SingleRank())
    seconds = time.perf_counter() - began
    if not result.committed or result.existed:
        raise RuntimeError(result.message)
    return seconds


def _restore(scene: Scene) -> float:
    """Restore like a job that has nothing else. The result is released after the clock has stopped."""
    store = _store(scene)
    began = time.perf_counter()
    found = restore([store], SingleRank())
    seconds = time.perf_counter() - began
    if found.loaded is None or found.quarantined:
        raise RuntimeError("what was read is not what was written")
    return seconds


def _timed(scene: Scene, act: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        (scene.folder / "download").unlink(missing_ok=True)
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    return timed


def _peers(scene: Scene, stack: ExitStack) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    return {"boto3 classic": _classic(scene), "CRT": _crt(scene, stack)}


def _classic(scene: Scene) -> tuple[Callable[[], None], Callable[[], None]]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = TransferConfig(
        multipart_chunksize=scene.part_bytes,
        multipart_threshold=scene.part_bytes,
        preferred_transfer_client="classic",
    )
    client = boto3.Session(**scene.server.credentials).client(
        "s3", endpoint_url=scene.server.url, region_name=REGION, config=Config(max_pool_connections=16)
    )
    target = str(scene.folder / "download")
    return (
        lambda: client.upload_file(str(scene.file), _BUCKET, "classic", Config=config),
        lambda: client.download_file(_BUCKET, "classic", target, Config=config),
    )


def _crt(scene: Scene, stack: ExitStack) -> tuple[Callable[[], None], Callable[[], None]]:
    import botocore.session
    from awscrt.auth import AwsCredentialsProvider
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

    keys = scene.server.credentials
    session = botocore.session.get_session()
    session.set_credentials(keys["aws_access_key_id"], keys["aws_secret_access_key"])
    provider = AwsCredentialsProvider.new_static(keys["aws_access_key_id"], keys["aws_secret_access_key"])
    client = create_s3_crt_client(REGION, provider, use_ssl=False, part_size=scene.part_bytes)
    given = {"region_name": REGION, "endpoint_url": scene.server.url}
    manager = stack.enter_context(CRTTransferManager(client, BotocoreCRTRequestSerializer(session, given)))
    target = str(scene.folder / "download")
    return (
        lambda: manager.upload(str(scene.file), _BUCKET, "crt").result(),
        lambda: manager.download(_BUCKET, "crt", target).result(),
    )


if __name__ == "__main__":
    from _bench import table

    print(table(rows(rounds=int(os.environ.get("ROUNDS", "3")))))
