"""Slots in memory: a kill at any instruction leaves a complete checkpoint, and nothing torn is read."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import Chunk, TensorRecord
from holdfast.checkpoint.io import chunk_digester
from holdfast.checkpoint.io.durable_files import encode_json
from holdfast.checkpoint.stores.memory import slot, slot_writer, slots
from holdfast.checkpoint.stores.memory.slot import Slot, opened
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, NoCapacityError

FILE = "rank-0.safetensors"
BYTES = 100_000
WRITERS = {module.__file__ for module in (slot, slot_writer, slots, chunk_digester)}


def named(step: int, attempt: int = 1) -> CheckpointName:
    return CheckpointName(step=step, attempt_id=AttemptId(1, attempt))


def body(step: int, nbytes: int = BYTES) -> bytes:
    return bytes([step % 251]) * nbytes


def commit(slot_set: SlotSet, step: int, keep: int | None = None, nbytes: int = BYTES, freed_later: int = 0) -> None:
    spared = () if keep is None else [named(keep)]
    writer = slot_set.begin(named(step), nbytes + 8192, keep=spared, job="job", freed_later=freed_later)
    record = writer.write(FILE, [body(step, nbytes)], nbytes)
    writer.stage()
    chunk = Chunk(file=FILE, offset=0, nbytes=nbytes, start=(0,), shape=(nbytes,))
    writer.seal(
        Manifest(
            step=step,
            attempt_id=AttemptId(1, 1),
            job_uid="job",
            publication="p",
            run_id="r",
            created="",
            world_size=1,
            mesh={"data": 1},
            tensors={"x": TensorRecord(dtype="U8", shape=(nbytes,), chunks=(chunk,))},
            files={FILE: record},
            state={},
            data=None,
            numerics={},
        )
    )


def whole(store: MemoryStore, name: CheckpointName) -> bytes:
    with store.open(name, FILE) as source:
        data = bytearray(source.nbytes)
        source.read_into(0, memoryview(data))
    return bytes(data)


def steps(store: MemoryStore) -> list[int]:
    """Return the steps that can be read, after comparing every byte."""
    found = [name.step for name in store.commits()]
    assert all(whole(store, named(step)) == body(step) for step in found)
    assert all(store.manifest(named(step)).step == step for step in found)
    return found


def killed_at(line: int, act: Callable[[], Any]) -> bool:
    """Run `act` in a child that is killed before this line of the writers. Return False if the child completed."""
    child = os.fork()
    if child == 0:
        left = [line]

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in WRITERS:
                return None
            if event == "line":
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            act()
            os._exit(0)
        finally:
            os._exit(1)  # never return to the tests of the parent process
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.thorough
def test_writer_killed_at_any_line_leaves_the_previous_one(tmp_path: Path) -> None:
    def third() -> None:
        commit(SlotSet(tmp_path, "own-0"), 3, keep=2)

    slot_set = SlotSet(tmp_path, "own-0")
    commit(slot_set, 1)
    commit(slot_set, 2, keep=1)
    slot_set.close()
    store, line, seen = MemoryStore(tmp_path), 0, set()
    while killed_at(line := line + 1, third):
        found = steps(store)
        assert 2 in found
        seen.add(tuple(found))
    assert seen == {(1, 2), (2,)}
    assert steps(store) == [2, 3]
    assert line > 80, "the lines of the writer were not counted"


def test_first_save_killed_while_creating_slots_blocks_nothing(tmp_path: Path) -> None:
    line = 0
    while killed_at(line := line + 7, lambda: commit(SlotSet(tmp_path, "own-0"), 1)):
        assert steps(MemoryStore(tmp_path)) in ([], [1])
    slot_set = SlotSet(tmp_path, "own-0")
    commit(slot_set, 2)
    assert 2 in steps(MemoryStore(tmp_path))
    assert list(tmp_path.glob("*.tmp-*")) == []


def test_oldest_slot_is_overwritten_unless_training_needs_it(tmp_path: Path) -> None:
    slot_set, store = SlotSet(tmp_path, "own-0"), MemoryStore(tmp_path)
    commit(slot_set, 10)
    commit(slot_set, 11)
    assert steps(store) == [10, 11]
    commit(slot_set, 12, keep=11)
    assert steps(store) == [11, 12]
    commit(slot_set, 13, keep=11)  # 12 was fenced: an attempt resumed from 11
    assert steps(store) == [11, 13]


def test_third_slot_protects_two_checkpoints_and_is_reused_later(tmp_path: Path) -> None:
    """The slot stays in use after it is no longer requested."""
    three, store = SlotSet(tmp_path, "own-0", count=3), MemoryStore(tmp_path)
    for step, keep in ((10, ()), (11, (10,)), (12, (11, 10)), (13, (12, 10))):
        writer = three.begin(named(step), BYTES, keep=[named(one) for one in keep])
        writer.write(FILE, [body(step)], BYTES)
        writer.stage()
    with opened(tmp_path) as found:
        assert {content.name.step for _, content in found} == {10, 12, 13}
    three.close()
    commit(SlotSet(tmp_path, "own-0"), 14, keep=10)
    with opened(tmp_path) as found:
        assert {content.name.step for _, content in found} == {10, 13, 14}
    assert steps(store) == [14]


def test_what_another_job_left_in_the_same_memory_is_not_there(tmp_path: Path) -> None:
    commit(SlotSet(tmp_path, "own-0"), 1)
    ours, theirs = MemoryStore(tmp_path, {"ours"}), MemoryStore(tmp_path, {"job", "ours"})
    assert theirs.commits() == (named(1),)
    assert ours.commits() == ()
    assert not ours.quarantine(named(1), "not ours") or theirs.commits() == (named(1),)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        ours.open(named(1), FILE)
    assert whole(theirs, named(1)) == body(1)


def test_bytes_overwritten_during_a_read_are_not_returned(tmp_path: Path) -> None:
    slot_set, store = SlotSet(tmp_path, "own-0"), MemoryStore(tmp_path)
    commit(slot_set, 1)
    commit(slot_set, 2)
    with store.open(named(1), FILE) as source:
        slot_set.begin(named(3), BYTES, keep=[named(2)])
        with pytest.raises(CorruptCheckpointError, match="overwritten in memory"):
            source.read_into(0, memoryview(bytearray(10)))
    assert steps(store) == [2]


@pytest.mark.parametrize("at", [0, 1024, 1040, 2048, 2070])
def test_a_torn_table_is_nothing(tmp_path: Path, at: int) -> None:
    slot_set, store = SlotSet(tmp_path, "own-0"), MemoryStore(tmp_path)
    commit(slot_set, 1)
    commit(slot_set, 2)
    path = tmp_path / "own-0.slot-1"
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x41]))
    with opened(tmp_path) as found:
        assert all(content.name in (named(1), named(2)) for _, content in found)
    assert 1 in steps(store)


def test_staged_bytes_are_read_for_a_manifest_that_is_elsewhere(tmp_path: Path) -> None:
    slot_set, store = SlotSet(tmp_path, "own-0"), MemoryStore(tmp_path)
    writer = slot_set.begin(named(5), 1000, keep=())
    writer.write("rank-0.json", [encode_json({})], len(encode_json({})))
    writer.stage()
    assert store.commits() == ()
    with store.open(named(5), "rank-0.json") as source:
        assert source.nbytes == len(encode_json({}))


def test_larger_checkpoints_get_larger_slots_and_keep_held_one(tmp_path: Path) -> None:
    slot_set, store = SlotSet(tmp_path, "own-0"), MemoryStore(tmp_path)
    commit(slot_set, 1)
    commit(slot_set, 2, keep=1, nbytes=5 << 20)
    assert {name.step for name in store.commits()} == {1, 2}
    assert whole(store, named(1)) == body(1)
    assert whole(store, named(2)) == body(2, 5 << 20)


def test_two_slots_beyond_the_limit_are_refused_with_the_need(tmp_path: Path) -> None:
    slot_set = SlotSet(tmp_path, "own-0", limit=7 << 20)
    message = r"own-0 needs two slots of 4 MiB, 8 MiB in all.*Raise checkpoint\.memory\.sizeLimit \(or --memory-tier"
    with pytest.raises(CheckpointError, match=message):
        slot_set.begin(named(1), 3 << 20, keep=())
    assert list(tmp_path.glob("*.slot-*")) == []


def test_when_others_free_memory_later_only_one_slot_is_created(
    tmp_path: Path,
) -> None:
    """The other slot is created with the next checkpoint."""
    kept = tmp_path / "for-lost.slot-0"
    kept.write_bytes(bytes(1 << 20))
    slot_set = SlotSet(tmp_path, "own-0", limit=2 << 20)
    with pytest.raises(NoCapacityError, match="1 MiB of 2 MiB are in use"):
        slot_set.begin(named(1), BYTES + 8192, keep=())
    commit(slot_set, 1, freed_later=1 << 20)
    assert [path.name for path in sorted(tmp_path.glob("own-0.slot-?"))] == ["own-0.slot-0"]
    with pytest.raises(NoCapacityError, match="2 MiB of 2 MiB are in use"):
        commit(slot_set, 2, keep=1)
    slot.remove(kept)
    commit(slot_set, 2, keep=1)
    assert steps(MemoryStore(tmp_path)) == [1, 2]


def test_what_does_not_fit_later_either_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "for-lost.slot-0").write_bytes(bytes(1 << 20))
    with pytest.raises(NoCapacityError, match="own-0 needs two slots"):
        SlotSet(tmp_path, "own-0", limit=2 << 20).begin(named(1), BYTES, keep=(), freed_later=1)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Slots on a memory volume, which reports its usage."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_replaced_slot_frees_its_memory_despite_a_forked_process(memory: Path) -> None:
    slot_set = SlotSet(memory, "own-0")
    commit(slot_set, 1)
    held = Slot(memory / "own-0.slot-0")  # as a data loader forked from the rank holds it
    before = os.fstat(held.fd).st_blocks
    commit(slot_set, 2)
    commit(slot_set, 3, nbytes=3 << 20)
    assert os.fstat(held.fd).st_nlink == 0
    assert os.fstat(held.fd).st_blocks * 512 <= 4096 < before * 512
    assert held.content() is None, "and what it held counts for nobody"
    held.close()


def test_only_one_process_writes_an_owners_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_OTHER_WRITER_SECONDS", 0.0)
    held = SlotSet(tmp_path, "own-0")
    assert in_child(lambda: SlotSet(tmp_path, "own-0")) == "another process writes the slots of own-0"
    held.close()
    assert in_child(lambda: SlotSet(tmp_path, "own-0")) == ""


def in_child(act: Callable[[], Any]) -> str:
    """Return the beginning of the error of `act` in a child process."""
    told, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(says, refusal(act).encode())
            os._exit(0)
        finally:
            os._exit(1)  # never return to the tests of the parent process
    assert os.waitpid(child, 0)[1] == 0
    os.close(says)
    with os.fdopen(told) as answer:
        return answer.read()


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error).partition(":")[0]
    return ""
