"""Deltas: few bytes where little changes, each commit whole to the bit, and a loss costs only what stands on it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import Alone, Exchange
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import incremental, writer
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.settings import TierSettings, announced
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.cli.checkpoints.access.progress_bar import progress
from holdfast.cli.checkpoints.copy import Uncopied, copy, copy_all, lineage
from holdfast.cli.checkpoints.verify import verify
from holdfast.cli.main import main
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError

ONE = AttemptId(1, 1)
BLOCK = incremental.BLOCK_BYTES
# Rows of a whole block, rows of which several make one, rows larger than one, a scalar, and nothing.
SHAPES = {"wide": (40, BLOCK), "narrow": (300, 1000), "huge": (3, 70_000), "scalar": (), "none": (0, 7)}
Tensors = dict[str, bytearray]
World = Callable[..., list[Any]]


def fresh(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tensors:
    random.seed(seed)
    return {name: bytearray(random.randbytes(size(shape))) for name, shape in shapes.items()}


def size(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def snapshot(
    step: int, tensors: Tensors, pair: AttemptId = ONE, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> Snapshot:
    def read(piece: Any) -> bytes:
        shape = piece.spec.shape
        row = size(shape[1:])
        begin = (piece.start[0] if piece.start else 0) * row
        return bytes(tensors[piece.spec.name][begin : begin + piece.nbytes])

    return Snapshot(
        name=CheckpointName(step=step, pair=pair),
        specs=[TensorSpec(name=name, dtype="U8", shape=shape) for name, shape in shapes.items()],
        read=read,
        state={"objects": {}, "counters": {}},
        data=None,
        alone={},
        numerics={},
    )


def save(root: Path, step: int, tensors: Tensors, chain: Chain, exchange: Exchange | None = None) -> SaveResult:
    mine = exchange or Alone()
    staged = stage(snapshot(step, tensors), Arena(), Planner(), rank=mine.rank, size=mine.size)
    return writer.commit(root, staged, mine, chain=chain)


def read(root: Path, step: int | None = None) -> Any:
    return restore(root, Alone(), step=step).loaded


def assert_is(root: Path, step: int, tensors: Tensors) -> None:
    loaded = read(root, step)
    assert loaded is not None
    assert loaded.name.step == step
    assert {name: bytes(loaded.tensors[name]) for name in tensors} == {n: bytes(t) for n, t in tensors.items()}


def manifest(root: Path, step: int) -> Any:
    return catalog.read_manifest(root, CheckpointName(step=step, pair=ONE))


def touch(tensors: Tensors, name: str, at: int) -> None:
    tensors[name][at] ^= 1


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def chained(tmp_path: Path) -> tuple[Path, Tensors]:
    """Steps 1 (full), 2 and 3; 2 changed `wide`, 3 changed `narrow`, and each row 39 of `wide`."""
    tensors, chain = fresh(), Chain(every=8)
    for step, (name, at) in enumerate([("wide", 0), ("wide", 5 * BLOCK), ("narrow", 7)], start=1):
        touch(tensors, name, at)
        touch(tensors, "wide", 39 * BLOCK)
        assert save(tmp_path, step, tensors, chain).committed
    return tmp_path, tensors


# What they hold

changes = st.lists(
    st.lists(st.tuples(st.sampled_from(["wide", "narrow", "huge", "scalar"]), st.floats(0, 0.999)), max_size=6),
    min_size=2,
    max_size=6,
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=changes, ranks=st.integers(1, 3), every=st.integers(2, 4))
def test_every_commit_of_a_chain_is_whole_to_the_bit_and_chains_are_bounded(
    tmp_path_factory: pytest.TempPathFactory, world: World, changes: Any, ranks: int, every: int
) -> None:
    root, tensors = tmp_path_factory.mktemp("chain"), fresh()
    chains = [Chain(every=every) for _ in range(ranks)]
    history: dict[int, Tensors] = {}
    for step, change in enumerate(changes, start=1):
        for name, place in change:
            touch(tensors, name, int(place * len(tensors[name])))
        history[step] = {name: bytearray(data) for name, data in tensors.items()}
        results = world(ranks, lambda exchange: save(root, step, tensors, chains[exchange.rank], exchange))  # noqa: B023
        assert all(result.committed for result in results)
    for step, then in history.items():
        assert_is(root, step, then)
        assert len(manifest(root, step).stands_on) < every
        assert verify(FolderStore(root), CheckpointName(step=step, pair=ONE)).whole
    full = [step for step in history if manifest(root, step).parent is None]
    assert all(any(begin <= step < begin + every for begin in full) for step in history)
    assert not list((root).glob("quarantine/*"))


def test_rows_are_read_from_a_delta_wherever_they_lie(chained: tuple[Path, Tensors]) -> None:
    root, tensors = chained
    loaded = restore(root, Alone(), select=lambda _: {"wide": (4, 40), "narrow": (0, 1)}).loaded
    assert loaded is not None
    assert bytes(loaded.tensors["wide"]) == tensors["wide"][4 * BLOCK :]
    assert bytes(loaded.tensors["narrow"]) == tensors["narrow"][:1000]


def test_a_sparse_change_costs_the_blocks_that_it_is_in(chained: tuple[Path, Tensors]) -> None:
    root, _ = chained
    third = manifest(root, 3)
    assert third.own["rank-0.safetensors"].nbytes == 4096 + BLOCK + 65_000  # one row of `wide`, 65 of `narrow`
    assert third.stands_on == {"step-1.g1.a1", "step-2.g1.a1"}
    assert third.parent == "step-2.g1.a1"


def test_nothing_is_written_of_what_did_not_change(tmp_path: Path) -> None:
    tensors, chain = fresh(), Chain(every=8)
    first, second = (save(tmp_path, step, tensors, chain) for step in (1, 2))
    assert first.nbytes > sum(map(len, tensors.values()))
    assert second.nbytes < 5000
    assert_is(tmp_path, 2, tensors)


def test_where_all_changes_each_commit_is_a_full_one_and_as_large(tmp_path: Path) -> None:
    chain = Chain(every=8)
    results = [save(tmp_path, step, fresh(step), chain) for step in (1, 2, 3)]
    assert len({result.nbytes for result in results}) == 1
    assert [manifest(tmp_path, step).parent for step in (1, 2, 3)] == [None, None, None]
    assert [json.loads((tmp_path / f"step-{n}.g1.a1/MANIFEST.json").read_bytes())["version"] for n in (1, 2)] == [
        1,
        1,
    ]


def test_where_more_than_half_of_a_share_changes_it_is_written_whole_and_the_rest_may_still_be_left(
    tmp_path: Path, world: World
) -> None:
    tensors, chains = fresh(), [Chain(every=8), Chain(every=8)]
    world(2, lambda exchange: save(tmp_path, 1, tensors, chains[exchange.rank], exchange))
    mine = chains[0]._base
    assert mine is not None
    for piece in mine.pieces:
        if piece.spec.name == "wide":
            for row in range(piece.start[0], piece.start[0] + piece.shape[0]):
                touch(tensors, "wide", row * BLOCK)
    world(2, lambda exchange: save(tmp_path, 2, tensors, chains[exchange.rank], exchange))
    sizes = [[manifest(tmp_path, n).own[f"rank-{r}.safetensors"].nbytes for r in (0, 1)] for n in (1, 2)]
    assert sizes[1][0] == sizes[0][0]
    assert sizes[1][1] < sizes[0][1] / 10
    assert_is(tmp_path, 2, tensors)


def test_a_chain_has_a_bound() -> None:
    for every in (0, 1, 101):
        with pytest.raises(UsageError, match="a full commit every"):
            Chain(every=every)


# What is lost


def lost(root: Path) -> dict[str, str]:
    return {one.path: one.reason for one in restore(root, Alone()).lost}


def test_what_a_long_chain_stands_on_is_read_from_its_own_manifest(tmp_path: Path) -> None:
    chain, tensors = Chain(every=30), fresh()
    for step in range(1, 26):
        touch(tensors, "wide", step * BLOCK)
        save(tmp_path, step, tensors, chain)
    asked: list[CheckpointName] = []

    class Counted(FolderStore):
        def manifest(self, name: CheckpointName) -> Any:
            asked.append(name)
            return super().manifest(name)

    found = lineage(Counted(tmp_path), CheckpointName(step=25, pair=ONE))
    assert (found[0].step, found[-1].step) == (1, 25)
    assert len(asked) == 1


def test_a_commit_on_which_others_stand_is_not_moved_from_under_them(chained: tuple[Path, Tensors]) -> None:
    root, tensors = chained
    flip(root / "step-1.g1.a1" / "rank-0.json", 0)  # which no delta reads
    assert restore(root, Alone(), step=1).loaded is None
    assert verify(FolderStore(root), CheckpointName(step=1, pair=ONE)).damaged
    assert not FolderStore(root).quarantine(CheckpointName(step=1, pair=ONE), "one bit")
    assert (root / "step-1.g1.a1").is_dir()
    assert read(root).name.step == 3
    assert_is(root, 3, tensors)


def test_damage_in_a_delta_costs_what_stands_on_it_and_the_full_one_is_restored(
    chained: tuple[Path, Tensors],
) -> None:
    root, _ = chained
    flip(root / "step-2.g1.a1" / "rank-0.safetensors", 4096)
    bad = lost(root)
    assert bad.keys() == {"step-3.g1.a1", "step-2.g1.a1"}
    assert bad["step-3.g1.a1"].startswith("step-2.g1.a1/rank-0.safetensors: digest of chunk 0 differs")
    assert read(root).name.step == 1
    assert sorted(path.name.split(".")[0] for path in (root / "quarantine").iterdir() if path.is_dir()) == [
        "step-2",
        "step-3",
    ]


def test_damage_where_no_byte_of_a_delta_lies_costs_it_nothing(tmp_path: Path) -> None:
    tensors, chain = fresh(), Chain(every=8)
    save(tmp_path, 1, tensors, chain)
    touch(tensors, "scalar", 0)
    save(tmp_path, 2, tensors, chain)
    touch(tensors, "scalar", 0)
    save(tmp_path, 3, tensors, chain)
    flip(tmp_path / "step-2.g1.a1" / "rank-0.safetensors", 4096)
    assert restore(tmp_path, Alone()).lost == ()
    assert_is(tmp_path, 3, tensors)


def test_a_delta_of_an_unknown_parent_is_refused_by_its_name(chained: tuple[Path, Tensors]) -> None:
    root, _ = chained
    shutil.rmtree(root / "step-2.g1.a1")
    assert lost(root) == {"step-3.g1.a1": "step-2.g1.a1, on which step-3.g1.a1 stands: rank-0.safetensors is missing"}
    assert read(root).name.step == 1


def test_a_full_commit_that_is_damaged_takes_its_deltas_along_and_an_older_chain_is_restored(tmp_path: Path) -> None:
    tensors, chain = fresh(), Chain(every=2)
    for step in (1, 2, 3, 4):
        touch(tensors, "narrow", step)
        save(tmp_path, step, tensors, chain)
    flip(tmp_path / "step-3.g1.a1" / "rank-0.safetensors", 4096 + 30 * BLOCK)
    assert lost(tmp_path).keys() == {"step-4.g1.a1", "step-3.g1.a1"}
    assert read(tmp_path).name.step == 2


def test_a_commit_is_full_again_when_a_link_of_the_chain_is_gone(tmp_path: Path) -> None:
    tensors, chain = fresh(), Chain(every=8)
    for step in (1, 2):
        save(tmp_path, step, tensors, chain)
    shutil.rmtree(tmp_path / "step-1.g1.a1")
    save(tmp_path, 3, tensors, chain)
    assert manifest(tmp_path, 3).stands_on == frozenset()
    assert_is(tmp_path, 3, tensors)


def test_what_failed_is_stood_on_by_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, chain = fresh(), Chain(every=8)
    save(tmp_path, 1, tensors, chain)
    touch(tensors, "wide", 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "publish", full)
        assert not save(tmp_path, 2, tensors, chain).committed
    assert save(tmp_path, 3, tensors, chain).committed
    assert manifest(tmp_path, 3).stands_on == {"step-1.g1.a1"}
    assert_is(tmp_path, 3, tensors)


# In a job


def engine(root: Path, attempt: int, *, keep_last: int = 1, full_every: int = 3) -> CheckpointManager:
    made = CheckpointManager(
        root, keep_last=keep_last, resume=Resume.ALWAYS, on_foreign=lambda _: None, full_every=full_every
    )
    made.enter(Attempt(pair=AttemptId(1, attempt), job_uid="job-1", publication="p", run_id="r"), Alone())
    found = made.restore()
    made.claim(step=found.step, pair=found.pair)
    return made


def there(root: Path) -> list[int]:
    return sorted(name.step for name in catalog.list_commits(root))


def test_retention_keeps_what_a_delta_needs_and_nothing_longer(tmp_path: Path) -> None:
    tensors, job, seen = fresh(), engine(tmp_path, 1), []
    for step in range(1, 6):
        touch(tensors, "wide", step * BLOCK)
        assert job.save(snapshot(step, tensors)).committed
        seen.append(there(tmp_path))
    assert seen == [[1], [1, 2], [1, 2, 3], [4], [4, 5]]
    assert_is(tmp_path, 5, tensors)


def test_another_attempt_begins_with_a_full_commit(tmp_path: Path) -> None:
    tensors = fresh()
    first = engine(tmp_path, 1, keep_last=9, full_every=9)
    for step in (1, 2):
        first.save(snapshot(step, tensors))
    second = engine(tmp_path, 2, keep_last=9, full_every=9)
    second.save(snapshot(3, tensors, AttemptId(1, 2)))
    assert [
        line.stands_on
        for line in (
            manifest(tmp_path, 2),
            catalog.read_manifest(tmp_path, CheckpointName(step=3, pair=AttemptId(1, 2))),
        )
    ] == [
        {"step-1.g1.a1"},
        frozenset(),
    ]


def test_without_being_asked_for_there_are_none(tmp_path: Path) -> None:
    job = engine(tmp_path, 1, keep_last=9, full_every=1)
    tensors = fresh()
    for step in (1, 2):
        job.save(snapshot(step, tensors))
    assert manifest(tmp_path, 2).version == 1


# Beside a memory tier


def beside_memory(root: Path, attempt: int = 1) -> CheckpointManager:
    """An engine whose steps lie whole in memory and as deltas in the folder; it has looked at both."""
    memory = root / "memory"
    memory.mkdir(exist_ok=True)
    me = Neighbour(node="a", pod="a", host="127.0.0.1", port=1)
    said = TierSettings(
        folder=memory, limit=None, interval=1, peer_interval=None, per_second=None, me=me, key=b"k"
    ).to_json()
    made = CheckpointManager(
        root / "shared", keep_last=9, resume=Resume.ALWAYS, on_foreign=lambda _: None, full_every=9
    )
    made.enter(Attempt(pair=AttemptId(1, attempt), job_uid="job-1", publication="p", run_id="r"), Alone())
    made.enter_tiers({"memory": said}, [announced({"memory": said})], 0, lambda: None)
    return made


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Tensors]:
    """Steps 1 and 2, each in memory and durable; of 2 the durable files hold little."""
    job, tensors = beside_memory(tmp_path), fresh()
    job.restore()
    job.claim(step=0, pair=None)
    for step in (1, 2):
        touch(tensors, "wide", step * BLOCK)
        assert job.save_on(job.tiers[0], snapshot(step, tensors)).committed
        assert job.save(snapshot(step, tensors)).committed
    assert manifest(tmp_path / "shared", 2).stands_on == {"step-1.g1.a1"}
    close(job)
    return tmp_path, tensors


def close(job: CheckpointManager) -> None:
    (memory,) = job.tiers
    memory.close()


def restored(root: Path, tensors: Tensors) -> Any:
    job = beside_memory(root, attempt=2)
    found = job.restore()
    assert found.loaded is not None
    assert {name: bytes(found.loaded.tensors[name]) for name in tensors} == {n: bytes(t) for n, t in tensors.items()}
    close(job)
    return found, job.read_from(found)


def test_a_step_that_is_whole_in_memory_is_restored_from_there_and_the_durable_delta_is_no_fault(
    both: tuple[Path, Tensors],
) -> None:
    root, tensors = both
    found, tiers = restored(root, tensors)
    assert (found.step, tiers) == (2, ["memory"])
    assert (found.quarantined, found.lost) == ((), ())
    assert restored(root, tensors)[1] == ["memory"], "nothing was set aside"


def test_where_memory_is_damaged_the_durable_delta_is_restored_and_no_step_lost(
    both: tuple[Path, Tensors],
) -> None:
    root, tensors = both
    for slot in (root / "memory").glob("*.slot-?"):
        flip(slot, 1 << 20)
    found, tiers = restored(root, tensors)
    assert (found.step, tiers) == (2, ["shared"])
    assert [bad.path for bad in found.quarantined] == ["step-2.g1.a1"]
    assert found.quarantined[0].reason.startswith("memory:")
    assert found.lost == ()


def test_where_the_durable_delta_is_damaged_memory_has_all_of_it(both: tuple[Path, Tensors]) -> None:
    root, tensors = both
    shutil.rmtree(root / "shared" / "step-1.g1.a1")
    found, tiers = restored(root, tensors)
    assert (found.step, tiers, found.lost) == (2, ["memory"], ())


def test_what_is_good_nowhere_falls_back_to_the_step_before(both: tuple[Path, Tensors]) -> None:
    root, tensors = both
    for slot in (root / "memory").glob("*.slot-?"):
        flip(slot, 1 << 20)
    (file,) = (root / "shared" / "step-2.g1.a1").glob("*.safetensors")
    flip(file, file.stat().st_size - 5)
    touch(tensors, "wide", 2 * BLOCK)
    found, tiers = restored(root, tensors)
    assert (found.step, [gone.path for gone in found.lost]) == (1, ["step-2.g1.a1"])
    assert "shared" in tiers


# checkpoint-12


def bytes_of(root: Path, step: int) -> int:
    return sum(path.stat().st_size for path in (root / f"step-{step}.g1.a1").iterdir())


def adapted(rank: int) -> tuple[Any, Any]:
    """A frozen model with a LoRA adapter on each of its layers, and Adam for these."""
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(512, 512).requires_grad_(False)
            self.down = torch.nn.Linear(512, rank, bias=False)
            self.up = torch.nn.Linear(rank, 512, bias=False)

        def forward(self, value: Any) -> Any:
            return self.base(value) + self.up(self.down(value))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(6)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def test_deltas_of_an_adapted_model_are_a_tenth_of_its_full_commits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten

    model, optimizer = adapted(rank=2)
    job, then = engine(tmp_path, 1, keep_last=9, full_every=9), {}
    for step in (1, 2, 3):
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = flatten({"model": model, "optimizer": optimizer})
        made = Snapshot(
            name=CheckpointName(step=step, pair=ONE),
            specs=flat.specs,
            read=flat.read,
            fill=flat.fill,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            alone={},
            numerics={},
        )
        assert job.save(made).committed
        then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert bytes_of(tmp_path, 2) * 10 <= bytes_of(tmp_path, 1)
    assert bytes_of(tmp_path, 3) * 10 <= bytes_of(tmp_path, 1)
    loaded = read(tmp_path, 3)
    for name, tensor in then.items():
        assert bytes(loaded.tensors[f"model/{name}"]) == tensor.numpy().tobytes()


# Elsewhere


def test_an_upload_takes_along_what_it_stands_on_and_keeps_it(tmp_path: Path) -> None:
    tensors, chain, root = fresh(), Chain(every=9), tmp_path / "shared"
    target = FolderStore(tmp_path / "copies")
    uploader = Uploader(
        source=FolderStore(root),
        target=target,
        settings=UploadSettings(url="file:///copies", keep_last=1),
        pace=Pace(None),
    )
    for step in (1, 2, 3):
        touch(tensors, "wide", step * BLOCK)
        save(root, step, tensors, chain)
    newest = CheckpointName(step=3, pair=ONE)
    assert uploader.upload(newest).arrived
    assert uploader.tidy(newest) == ""
    assert there(tmp_path / "copies") == [1, 2, 3]
    shutil.rmtree(root)
    assert_is(tmp_path / "copies", 3, tensors)


def test_a_copy_takes_along_what_it_stands_on_and_nothing_else(tmp_path: Path) -> None:
    tensors, chain, root = fresh(), Chain(every=9), tmp_path / "ckpt"
    for step in (1, 2, 3):
        touch(tensors, "scalar", 0)
        save(root, step, tensors, chain)
    source, target, name = FolderStore(root), FolderStore(tmp_path / "copy"), CheckpointName(step=3, pair=ONE)
    assert [one.step for one in lineage(source, name)] == [1, 3]
    for one in lineage(source, name):
        with progress("", 0) as shown:
            copy(source, one, target, shown)
    assert_is(tmp_path / "copy", 3, tensors)


def test_what_stands_on_a_damaged_commit_is_not_copied(chained: tuple[Path, Tensors], tmp_path: Path) -> None:
    flip(chained[0] / "step-1.g1.a1" / "rank-0.safetensors", 9000)
    target = FolderStore(tmp_path / "copy")
    names = [CheckpointName(step=step, pair=ONE) for step in (3, 2, 1)]
    bad = [one for one in copy_all(FolderStore(chained[0]), names, target) if isinstance(one, Uncopied)]
    assert [one.name.step for one in bad] == [1, 2, 3]
    assert all("step-1.g1.a1, which was not copied" in one.reason for one in bad[1:])
    assert list(target.commits()) == []


def test_verify_names_the_tensor_whose_bytes_are_damaged_in_another_commit(
    chained: tuple[Path, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    place = manifest(root, 1).tensors["wide"].chunks[0].offset
    flip(root / "step-1.g1.a1" / "rank-0.safetensors", place + 20 * BLOCK)
    assert main(["checkpoints", "verify", str(root), "--step", "3", "--json"]) == 1
    (judged,) = json.loads(capsys.readouterr().out)["commits"]
    assert judged["damage"][0]["file"] == "step-1.g1.a1/rank-0.safetensors"
    assert "wide" in judged["damage"][0]["tensors"]


def test_show_and_ls_tell_what_a_delta_stands_on_and_how_large_it_is(
    chained: tuple[Path, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = chained
    assert main(["checkpoints", "show", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["parent"], shown["standsOn"]) == ("step-2.g1.a1", ["step-1.g1.a1", "step-2.g1.a1"])
    assert shown["bytes"] == sum(shown["files"].values()) < 200_000
    assert main(["checkpoints", "show", str(root)]) == 0
    assert "stands on  step-1.g1.a1, step-2.g1.a1" in capsys.readouterr().out


def test_export_writes_a_delta_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from holdfast.checkpoint.state.flatten import flatten

    model, chain = torch.nn.Linear(300, 300), Chain(every=4)
    for step in (1, 2):
        with torch.no_grad():
            model.bias += 1
        flat = flatten({"model": model})
        made = Snapshot(
            name=CheckpointName(step=step, pair=ONE),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            alone={},
            numerics={},
        )
        writer.commit(tmp_path / "ckpt", stage(made, Arena(), Planner(), rank=0, size=1), Alone(), chain=chain)
    assert manifest(tmp_path / "ckpt", 2).version == 2
    assert main(["checkpoints", "export", str(tmp_path / "ckpt"), str(tmp_path / "w.safetensors")]) == 0
    found = safetensors.load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
