"""Checkpoints on the disks of several nodes: the newest complete one is restored after kills, corruption or full
disks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tier_ranks import TierRank

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.local_disk import LocalStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.tiers.local_disk_tier import LocalTier
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.core.attempt import AttemptId, Claim

KEY = b"k" * 32
FIRST = AttemptId(1, 1)
TERMS = FencingContext(claims=(), job_uid="job", resume=Resume.ALWAYS)
World = Callable[..., list[Any]]


def tensors(step: int) -> dict[str, bytes]:
    return {"large": bytes([step]) * (3 << 20), "small": b"s" * (step + 1)}


def snapshot_of(step: int, rank: int, attempt_id: AttemptId = FIRST, job: str = "job") -> Snapshot:
    data = tensors(step)
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(one),)) for name, one in data.items()],
        read=lambda piece: data[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={"rank": rank},
        numerics={},
        job_uid=job,
        publication="p",
    )


class Disks:
    """The disk of each node. `ranks` names the node of each rank by number."""

    made: ClassVar[list[Disks]] = []

    def __init__(self, root: Path, ranks: str, limit: int | None = None) -> None:
        self.ranks = ranks
        self.servers: dict[str, PeerServer] = {}
        self.made.append(self)
        self._settings = {
            node: TierSettings(
                folder=root / node, limit=limit, interval=1, per_second=None, me=self._at(root, node), key=KEY
            )
            for node in ranks
        }
        for server in self.servers.values():
            server.key = KEY

    def _at(self, root: Path, node: str) -> Neighbour:
        server = self.servers.get(node) or PeerServer(root / node, host="127.0.0.1", store=LocalStore)
        self.servers[node] = server
        return Neighbour(node=node, pod=node, host="127.0.0.1", port=server.port)

    def lose(self, node: str) -> None:
        self.servers.pop(node).close()
        shutil.rmtree(self.folder(node))

    def folder(self, node: str) -> Path:
        return self._settings[node].folder

    def saves(self, exchange: Any, *snapshots: Snapshot, terms: FencingContext = TERMS) -> list[SaveResult]:
        """Save from a restarted rank."""
        node = self.ranks[exchange.rank]
        before = self.ranks[: exchange.rank].count(node)
        tier = TierRank(LocalTier(), self._settings[node], exchange, local_rank=before)
        return [tier.save(snapshot, terms) for snapshot in snapshots]

    def restored(self, exchange: Any, *further: FolderStore, **terms: Any) -> Restored:
        members = frozenset(one.me for one in self._settings.values())
        tier = TierRank(LocalTier(), self._settings[self.ranks[exchange.rank]], exchange, neighbours=members)
        try:
            return restore((*tier.stores(TERMS), *further), exchange, job_uid="job", **terms)
        finally:
            tier.close()


@pytest.fixture(autouse=True)
def _hung_up() -> Iterator[None]:
    yield
    while Disks.made:
        for server in Disks.made.pop().servers.values():
            server.close()


def on_all(world: World, disks: Disks, *steps: int) -> list[list[SaveResult]]:
    def act(exchange: Any) -> list[SaveResult]:
        return disks.saves(exchange, *(snapshot_of(step, exchange.rank) for step in steps))

    return world(len(disks.ranks), act)


def part(disks: Disks, node: str, step: int, rank: int) -> Path:
    """Return the file with the tensors of a rank."""
    (found,) = disks.folder(node).glob(f"*-own-*/step-{step}.g1.a1/rank-{rank}.safetensors")
    return found


def content(found: Restored) -> dict[str, bytes]:
    assert found.loaded is not None
    return {name: bytes(one) for name, one in found.loaded.tensors.items()}


def test_newest_checkpoint_is_restored_on_all_ranks_of_two_nodes(world: World, tmp_path: Path) -> None:
    """No other checkpoint uses space."""
    disks = Disks(tmp_path, "aab")
    results = on_all(world, disks, 1, 2, 3)
    assert all(result.committed and result.nbytes for mine in results for result in mine)
    for node in "ab":
        assert [name.step for name in LocalStore(disks.folder(node)).commits()] == [3]
    manifests = [path.read_bytes() for path in tmp_path.glob("*/*/step-3.*/MANIFEST.json")]
    assert len(manifests) == 3, "one for each rank"
    assert len(set(manifests)) == 1, "and the same"


def test_data_only_on_a_lost_node_comes_from_the_next_tier(world: World, tmp_path: Path) -> None:
    """The tier is decided for each step."""
    disks, shared = Disks(tmp_path, "ab"), tmp_path / "shared"
    world(2, lambda exchange: save(shared, snapshot_of(1, exchange.rank), exchange))
    on_all(world, disks, 2)
    disks.lose("b")
    found = world(2, lambda exchange: disks.restored(exchange, FolderStore(shared)))
    assert {one.step for one in found} == {1}
    assert all(content(one) == tensors(1) for one in found)


def test_a_replicated_state_is_read_from_the_disks_of_all_nodes(world: World, tmp_path: Path) -> None:
    disks, shared = Disks(tmp_path, "ab"), tmp_path / "shared"
    world(2, lambda exchange: save(shared, snapshot_of(1, exchange.rank), exchange))
    on_all(world, disks, 2)
    found = world(2, lambda exchange: disks.restored(exchange, FolderStore(shared)))
    assert all((one.step, content(one)) == (2, tensors(2)) for one in found)
    assert {LocalTier().reported_as(url) for one in found for url in one.stores} == {"local"}


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_corrupt_part_is_found_and_read_from_the_volume(world: World, tmp_path: Path, how: str) -> None:
    disks, shared = Disks(tmp_path, "aa"), tmp_path / "shared"
    world(2, lambda exchange: save(shared, snapshot_of(4, exchange.rank), exchange))
    on_all(world, disks, 4)
    damaged = part(disks, "a", 4, 1)
    if how == "flipped":
        with damaged.open("r+b") as file:
            file.seek(damaged.stat().st_size - 100)
            file.write(b"\xff\x00\xff")
    elif how == "short":
        os.truncate(damaged, damaged.stat().st_size - 4096)
    else:
        damaged.unlink()
    found = world(2, lambda exchange: disks.restored(exchange, FolderStore(shared)))
    assert all((one.step, content(one)) == (4, tensors(4)) for one in found)
    assert str(shared) in {url for one in found for url in one.stores}
    left = [name.step for name in LocalStore(disks.folder("a")).commits()]
    assert left == ([4] if how == "gone" else []), "set aside; a file that is not here may be on another node"
    on_all(world, disks, 5)
    assert not list(disks.folder("a").glob("*/quarantine")), "the next commit needs its room"


def test_corrupt_part_without_a_copy_restores_an_older_step(world: World, tmp_path: Path) -> None:
    """The loss is reported."""
    disks, shared = Disks(tmp_path, "aa"), tmp_path / "shared"
    world(2, lambda exchange: save(shared, snapshot_of(1, exchange.rank), exchange))
    on_all(world, disks, 2)
    part(disks, "a", 2, 0).write_bytes(b"torn")
    found = world(2, lambda exchange: disks.restored(exchange, FolderStore(shared)))
    assert {one.step for one in found} == {1}
    assert [bad.path for bad in found[0].lost] == ["step-2.g1.a1"]


class Dies(BaseException):
    """Raised where a rank ends."""


class Dying:
    """An exchange in which rank 1 ends before its nth message to the others."""

    def __init__(self, exchange: Any, turn: int) -> None:
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange, self._left = exchange, turn

    def gather(self, value: Any) -> list[Any]:
        self._left -= 1
        if self.rank == 1 and not self._left:
            raise Dies
        told: list[Any] = self._exchange.gather(value)
        return told

    def share(self, value: Any) -> Any:
        return self._exchange.share(value)


@pytest.mark.parametrize("turn", [1, 2, 3], ids=["before it wrote", "when it wrote", "when it published"])
def test_rank_dying_during_a_save_leaves_the_previous_checkpoint(world: World, tmp_path: Path, turn: int) -> None:
    disks = Disks(tmp_path, "ab")
    on_all(world, disks, 1)

    def killed(exchange: Any) -> None:
        disks.saves(Dying(exchange, turn), snapshot_of(2, exchange.rank))

    with pytest.raises(Dies):
        world(2, killed)
    (leftover,) = {path.parent.parent / f"step-2.g1.a1.tmp-{'0' * 32}" for path in [part(disks, "b", 1, 1)]}
    leftover.mkdir()  # of a rank that could not clean up
    assert part(disks, "a", 1, 0).exists()
    assert part(disks, "b", 1, 1).exists()
    on_all(world, disks, 3)
    assert [name.step for name in LocalStore(disks.folder("a")).commits()] == [3]
    assert not list(tmp_path.glob("*/*/*.tmp-*")), "what the dead left is removed"


def test_what_a_claim_cut_off_is_not_spared(tmp_path: Path) -> None:
    """Otherwise, a checkpoint beyond the claim would stay permanently, and the one that training resumed from
    would be deleted."""
    disks = Disks(tmp_path, "a")
    disks.saves(SingleRank(), snapshot_of(9, 0))
    claim = Claim(attempt_id=AttemptId(1, 2), job_uid="job", publication="p", from_step=3, from_attempt_id=FIRST)
    terms = FencingContext(claims=(claim,), job_uid="job", resume=Resume.ALWAYS)
    (result,) = disks.saves(SingleRank(), snapshot_of(4, 0, AttemptId(1, 2)), terms=terms)
    assert result.committed
    assert LocalStore(disks.folder("a")).commits() == (CheckpointName(step=4, attempt_id=AttemptId(1, 2)),)


def test_data_of_another_job_is_not_read_and_is_overwritten(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "a")
    disks.saves(SingleRank(), snapshot_of(9, 0, job="another"))
    assert disks.restored(SingleRank()).loaded is None
    disks.saves(SingleRank(), snapshot_of(1, 0))
    assert [name.step for name in LocalStore(disks.folder("a")).commits()] == [1]


def test_volume_below_two_parts_per_rank_is_refused_by_need(world: World, tmp_path: Path) -> None:
    """The message names the field and the bytes needed."""
    disks = Disks(tmp_path, "aa", limit=6 << 20)
    results = on_all(world, disks, 1)
    message = (
        r"2 ranks of pod a need \d+ MiB for two parts of each, and it has 6 MiB: raise checkpoint.local.sizeLimit"
    )
    for (result,) in results:
        assert not result.committed
        assert result.full
        assert result.cause == "Full"
        assert re.search(message, result.message), result.message
    assert not LocalStore(disks.folder("a")).commits()


def test_within_its_limit_it_goes_on_for_ever(world: World, tmp_path: Path) -> None:
    limit = 12 << 20
    disks = Disks(tmp_path, "aa", limit=limit)
    results = on_all(world, disks, *range(1, 8))
    assert all(result.committed for mine in results for result in mine), results
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used <= limit // 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "a"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "holdfast-test", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_full_disk_fails_the_save_and_keeps_the_previous_one(tmp_path: Path, small_disk: Path) -> None:
    disks = Disks(tmp_path, "a")
    (first,) = disks.saves(SingleRank(), snapshot_of(1, 0))
    assert first.committed, first.message
    (small_disk / "of-others").write_bytes(bytes(4 << 20))
    (second,) = disks.saves(SingleRank(), snapshot_of(2, 0))
    assert not second.committed
    assert "No space left" in second.message
    assert "free space on the node's disk" in second.message
    assert second.cause == "Full"
    assert not second.full, "there is one that is good: training goes on"
    found = disks.restored(SingleRank())
    assert (found.step, content(found)) == (1, tensors(1))
    (small_disk / "of-others").unlink()
    (third,) = disks.saves(SingleRank(), snapshot_of(3, 0))
    assert third.committed, third.message


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_disk_fails_the_save_by_that_name(tmp_path: Path, small_disk: Path) -> None:
    disks = Disks(tmp_path, "a")
    assert disks.saves(SingleRank(), snapshot_of(1, 0))[0].committed
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    (second,) = disks.saves(SingleRank(), snapshot_of(2, 0))
    assert (second.committed, second.cause, second.full) == (False, "ReadOnly", False)
    assert disks.restored(SingleRank()).step == 1
