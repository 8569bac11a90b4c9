"""Deltas are small if little changes, and each checkpoint of a chain is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from delta_states import (
    BLOCK,
    ONE,
    Tensors,
    assert_is,
    flip,
    fresh,
    manifest,
    read,
    save,
    touch,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.copy import lineage
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.errors import UsageError

World = Callable[..., list[Any]]


# Content

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
def test_chain_checkpoints_are_bit_exact_and_chains_are_bounded(
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
        assert len(manifest(root, step).depends_on) < every
        assert verify(FolderStore(root), CheckpointName(step=step, attempt_id=ONE)).verified
    full = [step for step in history if manifest(root, step).parent is None]
    assert all(any(begin <= step < begin + every for begin in full) for step in history)
    assert not list((root).glob("quarantine/*"))


def test_rows_are_read_from_a_delta_wherever_they_lie(chained: tuple[Path, Tensors]) -> None:
    root, tensors = chained
    loaded = restore(root, SingleRank(), select=lambda _: {"wide": (4, 40), "narrow": (0, 1)}).loaded
    assert loaded is not None
    assert bytes(loaded.tensors["wide"]) == tensors["wide"][4 * BLOCK :]
    assert bytes(loaded.tensors["narrow"]) == tensors["narrow"][:1000]


def test_a_sparse_change_costs_the_blocks_that_it_is_in(chained: tuple[Path, Tensors]) -> None:
    root, _ = chained
    third = manifest(root, 3)
    assert third.own["rank-0.safetensors"].nbytes == 4096 + BLOCK + 65_000  # one row of `wide`, 65 of `narrow`
    assert third.depends_on == {"step-1.g1.a1", "step-2.g1.a1"}
    assert third.parent == "step-2.g1.a1"


def test_nothing_is_written_of_what_did_not_change(tmp_path: Path) -> None:
    tensors, chain = fresh(), Chain(every=8)
    first, second = (save(tmp_path, step, tensors, chain) for step in (1, 2))
    assert first.nbytes > sum(map(len, tensors.values()))
    assert second.nbytes < 5000
    assert_is(tmp_path, 2, tensors)


def test_when_everything_changes_each_checkpoint_is_full(tmp_path: Path) -> None:
    """Each of these checkpoints has the size of a full one."""
    chain = Chain(every=8)
    results = [save(tmp_path, step, fresh(step), chain) for step in (1, 2, 3)]
    assert len({result.nbytes for result in results}) == 1
    assert [manifest(tmp_path, step).parent for step in (1, 2, 3)] == [None, None, None]
    assert [json.loads((tmp_path / f"step-{n}.g1.a1/MANIFEST.json").read_bytes())["version"] for n in (1, 2)] == [
        1,
        1,
    ]


def test_share_with_most_parts_changed_is_written_in_full(tmp_path: Path, world: World) -> None:
    """More than half of the share changed. The other shares may still be skipped."""
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
        with pytest.raises(UsageError, match="for full_every: expected 2 to"):
            Chain(every=every)


# Losses


def lost(root: Path) -> dict[str, str]:
    return {one.path: one.reason for one in restore(root, SingleRank()).lost}


def test_base_of_a_long_chain_is_read_from_its_own_manifest(tmp_path: Path) -> None:
    chain, tensors = Chain(every=30), fresh()
    for step in range(1, 26):
        touch(tensors, "wide", step * BLOCK)
        save(tmp_path, step, tensors, chain)
    asked: list[CheckpointName] = []

    class Counted(FolderStore):
        def manifest(self, name: CheckpointName) -> Any:
            asked.append(name)
            return super().manifest(name)

    found = lineage(Counted(tmp_path), CheckpointName(step=25, attempt_id=ONE))
    assert (found[0].step, found[-1].step) == (1, 25)
    assert len(asked) == 1


def test_base_of_other_checkpoints_is_not_moved_away(chained: tuple[Path, Tensors]) -> None:
    root, tensors = chained
    flip(root / "step-1.g1.a1" / "rank-0.json", 0)  # no delta reads this part
    assert restore(root, SingleRank(), step=1).loaded is None
    assert verify(FolderStore(root), CheckpointName(step=1, attempt_id=ONE)).damaged
    assert not FolderStore(root).quarantine(CheckpointName(step=1, attempt_id=ONE), "one bit")
    assert (root / "step-1.g1.a1").is_dir()
    assert read(root).name.step == 3
    assert_is(root, 3, tensors)


def test_corrupt_delta_costs_its_dependents_and_restores_base(
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
    assert restore(tmp_path, SingleRank()).lost == ()
    assert_is(tmp_path, 3, tensors)


def test_a_delta_of_an_unknown_parent_is_refused_by_its_name(chained: tuple[Path, Tensors]) -> None:
    root, _ = chained
    shutil.rmtree(root / "step-2.g1.a1")
    assert lost(root) == {
        "step-3.g1.a1": "step-2.g1.a1, on which step-3.g1.a1 depends: rank-0.safetensors is missing"
    }
    assert read(root).name.step == 1


def test_corrupt_base_costs_its_deltas_and_restores_older_chain(tmp_path: Path) -> None:
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
    assert manifest(tmp_path, 3).depends_on == frozenset()
    assert_is(tmp_path, 3, tensors)


def test_what_failed_is_stood_on_by_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, chain = fresh(), Chain(every=8)
    save(tmp_path, 1, tensors, chain)
    touch(tensors, "wide", 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "publish", full)
        assert not save(tmp_path, 2, tensors, chain).committed
    assert save(tmp_path, 3, tensors, chain).committed
    assert manifest(tmp_path, 3).depends_on == {"step-1.g1.a1"}
    assert_is(tmp_path, 3, tensors)
