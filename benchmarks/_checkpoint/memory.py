"""The memory tier: restore from it relative to a copy in memory; copies to a neighbour and back relative to raw TCP;
the same state from there relative to the shared tier.

`memory.py far BYTES ROUNDS` measures the neighbour, preferably on a separate link (`unshare --net`), whose speed it
limits. `memory.py neighbour FOLDER` is the neighbour: it serves a memory and also raw bytes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

import _bench as bench  # noqa: E402

from _checkpoint.contenders import at_hand, workplace  # noqa: E402
from _checkpoint.restore import when_cold  # noqa: E402
from holdfast.checkpoint.format.file_names import CheckpointName, tensors_file  # noqa: E402
from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord  # noqa: E402
from holdfast.checkpoint.format.shard_layout import TensorSpec  # noqa: E402
from holdfast.checkpoint.policy.fencing import Resume  # noqa: E402
from holdfast.checkpoint.policy.fencing_context import FencingContext  # noqa: E402
from holdfast.checkpoint.ranks.exchange import SingleRank  # noqa: E402
from holdfast.checkpoint.restore.chunk_reader import read_into  # noqa: E402
from holdfast.checkpoint.restore.copies import Copies, whole_file  # noqa: E402
from holdfast.checkpoint.restore.memory_layout import Extent  # noqa: E402
from holdfast.checkpoint.restore.search import Restored, restore  # noqa: E402
from holdfast.checkpoint.saving.planner import Planner  # noqa: E402
from holdfast.checkpoint.saving.snapshot import Snapshot  # noqa: E402
from holdfast.checkpoint.saving.stager import plan  # noqa: E402
from holdfast.checkpoint.saving.writer import save  # noqa: E402
from holdfast.checkpoint.stores.base import CheckpointStore  # noqa: E402
from holdfast.checkpoint.stores.folder import FolderStore  # noqa: E402
from holdfast.checkpoint.stores.memory.peer_client import Copy, Neighbour, Peer, PeerStore, send, space_for  # noqa: E402
from holdfast.checkpoint.stores.memory.peer_server import PeerServer  # noqa: E402
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter  # noqa: E402
from holdfast.checkpoint.stores.memory.slots import SlotSet  # noqa: E402
from holdfast.checkpoint.stores.memory.store import MemoryStore  # noqa: E402
from holdfast.checkpoint.tiers.memory_tier import MemoryTier  # noqa: E402
from holdfast.checkpoint.tiers.settings import TierSettings  # noqa: E402
from holdfast.checkpoint.tiers.tier import TierWorld  # noqa: E402
from holdfast.core.attempt import AttemptId  # noqa: E402

KEY = b"k" * 32
PAIR = AttemptId(1, 1)
LARGE, SMALL, SMALL_BYTES = 157, 471, 4096
LINK = "5gbit"
MEMORY = "/dev/shm"  # noqa: S108 - memory, not a temporary file
_LENGTH = 8
Values = dict[str, list[float]]


def rows(nbytes: int, rounds: int) -> list[bench.Measurement]:
    """Return all rows for one size of state."""
    what = f"{nbytes / 1e9:.2g} GB in {LARGE + SMALL} tensors"
    return [*near_rows(what, near(nbytes, rounds)), *far_rows(what, nbytes, rounds)]


def near_rows(what: str, values: Values) -> list[bench.Measurement]:
    """Return the rows on one node."""
    return [
        *(
            bench.measured(
                "checkpoint-4",
                f"verified restore from memory of {what}, into {where}",
                bench.ratios(values[whose], values["copy"]),
                "x memcpy",
                target="<= 1.8",
                limit=1.0,
            )
            for whose, where in (("restore", "fresh memory"), ("in place", "memory that is there"))
        ),
        bench.measured(
            "", f"checkpoint in memory of {what}", bench.ratios(values["save"], values["copy"]), "x memcpy"
        ),
    ]


def near(nbytes: int, rounds: int) -> Values:
    """Return the seconds on one node."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        state = State(Path(folder), nbytes, None)
        state.save()
        contestants = {
            "restore": state.restore,
            "in place": lambda: timed(state.restore_in_place),
            "copy": state.copy,
            "save": lambda: timed(state.save),
        }
        values = bench.interleaved(contestants, rounds)
        state.close()
    return values


def far_rows(what: str, nbytes: int, rounds: int) -> list[bench.Measurement]:
    """Return the rows of copies to another node and back. They are measured in a process with its own network."""
    command = [sys.executable, str(HERE), "far", str(nbytes), str(rounds)]
    for alone in (["unshare", "--net"], []):
        ran = subprocess.run([*alone, *command], capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            break
    else:
        return [bench.not_measured("checkpoint-peer", f"copies of {what}", ran.stderr[-200:])]
    told = json.loads(ran.stdout.splitlines()[-1])
    values, link = told["values"], told["link"]
    return [
        bench.measured(
            "",
            f"a lost rank's state from a neighbour's memory, {link}, over the same from the shared tier: {what}",
            bench.ratios(values["restore"], values["shared"]),
            "x shared tier",
        ),
        bench.measured(
            "",
            f"training pauses for a checkpoint in memory and a neighbour's, as after each step: {what}, {link}",
            bench.ratios(values["each step"], values["send"]),
            "x raw TCP",
            limit=1.0,
        ),
        *copies(what, values, link),
    ]


def copies(what: str, values: Values, link: str) -> list[bench.Measurement]:
    """Return the rows relative to raw TCP."""
    return [
        bench.measured(
            "checkpoint-peer",
            f"verified {name} a neighbour's memory of {what}, {link}",
            bench.ratios(values[whose], values[limit]),
            "x raw TCP",
            target="<= 1.3",
            limit=1.0,
        )
        for name, whose, limit in (("copy to", "give", "send"), ("restore from", "restore", "receive"))
    ]


def far(nbytes: int, rounds: int) -> None:
    """Print the seconds with a neighbour, as JSON."""
    link = shaped()
    with (
        workplace(bench.OUT / "checkpoint.far") as shared,
        tempfile.TemporaryDirectory(dir=MEMORY) as work,
        neighbour(Path(work) / "there") as (port, raw),
    ):
        here = Path(work) / "here"
        here.mkdir()
        state = State(here, nbytes, port)
        state.save()
        save(shared, state.snapshot(), SingleRank())
        contestants = {
            "give": state.give,
            "each step": lambda: timed(state.save),
            "restore": state.restore_from_peer,
            "shared": when_cold(shared, lambda: None, lambda act: act(), lambda: state.restore_from(shared)),
            "send": lambda: sent(raw, state.data, b"s"),
            "receive": lambda: sent(raw, state.data, b"r"),
        }
        values = bench.interleaved(contestants, rounds)
        state.close()
    print(json.dumps({"values": values, "link": link}))


def shaped() -> str:
    """Limit the loopback of this network namespace to a slow link, if it is a separate one."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "by loopback"
    for command in ("ip link set lo up", f"tc qdisc add dev lo root tbf rate {LINK} burst 4mb latency 20ms"):
        subprocess.run(command.split(), check=True)
    return f"by a link of {LINK}"


class State:
    """One rank with a memory tier, and with a neighbour if there is a port."""

    def __init__(self, folder: Path, nbytes: int, port: int | None) -> None:
        large = (nbytes - SMALL * SMALL_BYTES) // LARGE
        sizes = {f"state/layers.{n}.weight": large for n in range(LARGE)}
        sizes |= {f"state/layers.{n}.bias": SMALL_BYTES for n in range(SMALL)}
        self.data = memoryview(bytearray(os.urandom(1 << 20) * -(-nbytes // (1 << 20))))[: sum(sizes.values())]
        self._room = memoryview(bytearray(self.data.nbytes))
        self._specs = [TensorSpec(name=name, dtype="U8", shape=(size,)) for name, size in sizes.items()]
        self._parts, at = dict[str, memoryview](), 0
        for name, size in sizes.items():
            self._parts[name], at = self.data[at : at + size], at + size
        self._found: Restored | None = None
        self._step = 0
        self._folder = folder
        self._here(port)

    def _here(self, port: int | None) -> None:
        me = Neighbour(node="a", pod="a", host="127.0.0.1", port=1)
        there = Neighbour(node="b", pod="b", host="127.0.0.1", port=port or 1)
        members = frozenset({me, there} if port else {me})
        self._peer = Peer(there, KEY)
        settings = TierSettings(
            folder=self._folder,
            limit=None,
            interval=1,
            peer_interval=1 if port else None,
            per_second=None,
            me=me,
            key=KEY,
        )
        self._tier = MemoryTier()
        self._tier.enter(
            TierWorld(settings=settings, neighbours=members, local_rank=0, exchange=SingleRank(), check=lambda: None)
        )
        self._planner = Planner()
        self._lying: SlotWriter | None = None
        self._record: FileRecord | None = None

    def close(self) -> None:
        """Release the memory."""
        self._tier.close()
        self._peer.close()

    def copy(self) -> float:
        """Return the seconds of a plain copy of all tensors to allocated memory."""
        return timed(lambda: self._room.__setitem__(slice(None), self.data))

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the state at this step."""
        return Snapshot(
            name=CheckpointName(step=self._step, attempt_id=PAIR),
            specs=self._specs,
            read=lambda piece: self._parts[piece.spec.name],
            state={},
            data=None,
            per_rank={},
            numerics={},
        )

    def save(self) -> None:
        """Save a checkpoint, and copy it to the neighbour if there is one."""
        self._step += 1
        staged = plan(self.snapshot(), None, self._planner, rank=0, size=1)
        context = FencingContext(claims=(), job_uid="", resume=Resume.ALWAYS)
        if not self._tier.save(staged, SingleRank(), context).committed:
            raise AssertionError("the checkpoint was not published")

    def restore(self) -> float:
        """Restore the newest checkpoint of this node."""
        return self._restore(MemoryStore(self._folder))

    def restore_in_place(self) -> None:
        """Restore the same into allocated memory."""
        store, file = MemoryStore(self._folder), tensors_file(0)
        name = store.commits()[-1]
        manifest = store.manifest(name)
        begin = min(chunk.offset for tensor in manifest.tensors.values() for chunk in tensor.chunks)
        with closing(Copies(openers=[partial(store.open, name)], records=manifest.files)) as copies:
            everything = [whole_file(file, manifest.files[file])]
            read_into(copies, {file: [Extent.over(begin, self._room)]}, also=everything, threads=store.readers)

    def restore_from_peer(self) -> float:
        """Restore the newest checkpoint of the neighbour."""
        return self._restore(PeerStore(self._peer))

    def restore_from(self, folder: Path) -> float:
        """Restore the newest checkpoint of the shared tier."""
        return self._restore(FolderStore(folder))

    def give(self) -> float:
        """Return the seconds for sending the content of a local slot to the neighbour's slot."""
        file, nbytes = tensors_file(1), self.data.nbytes
        name = CheckpointName(step=1, attempt_id=PAIR)
        if self._lying is None:
            room = space_for([nbytes], 0)
            self._lying = SlotSet(self._folder, "own-1", count=1).begin(name, room, keep=())
            self._record = self._lying.write(file, [self.data], nbytes)
        if self._record is None:
            raise AssertionError("no record")
        copy = Copy(
            owner="other",
            job="",
            name=name,
            keep=(),
            files={file: self._record},
            room=space_for([nbytes], 0),
        )
        lying = self._lying
        return timed(lambda: send(self._peer, copy, [lying.place(file)]))

    def _restore(self, store: CheckpointStore) -> float:
        self._found = None  # the previous result is released first
        at_hand(self.data.nbytes)

        def act() -> None:
            self._found = restore([store], SingleRank())

        seconds = timed(act)
        if self._found is None or self._found.loaded is None:
            raise AssertionError("nothing was restored")
        return seconds


def timed(act: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@contextmanager
def neighbour(folder: Path) -> Iterator[tuple[int, int]]:
    """Start another process, and yield the ports of its memory and of raw bytes."""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(HERE), "neighbour", str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout is None:
            raise AssertionError("no output")
        memory, raw = map(int, process.stdout.readline().split())
        yield memory, raw
    finally:
        process.kill()
        process.wait()


def sent(port: int, data: memoryview, way: bytes) -> float:
    """Return the seconds for all bytes over a plain connection, to the neighbour (`s`) or back (`r`)."""
    room = memoryview(bytearray(CHUNK_BYTES))

    def act() -> None:
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.sendall(way + data.nbytes.to_bytes(_LENGTH, "big"))
            if way == b"s":
                wire.sendall(data)
                wire.recv(1)
            else:
                drain(wire, data.nbytes, room)

    return timed(act)


def drain(wire: socket.socket, nbytes: int, room: memoryview) -> None:
    """Receive this many bytes."""
    while nbytes:
        nbytes -= wire.recv_into(room[: min(nbytes, room.nbytes)])


def serve(folder: Path) -> None:
    """Run the neighbour."""
    server = PeerServer(folder, host="127.0.0.1")
    server.key = KEY
    listener = socket.create_server(("127.0.0.1", 0))
    print(server.port, listener.getsockname()[1], flush=True)
    room = memoryview(bytearray(CHUNK_BYTES))
    while True:
        wire, _ = listener.accept()
        threading.Thread(target=echo, args=(wire, room), daemon=True).start()


def echo(wire: socket.socket, room: memoryview) -> None:
    """Receive or send raw bytes, as requested."""
    with wire, suppress(ConnectionError):
        head = wire.recv(1 + _LENGTH, socket.MSG_WAITALL)
        nbytes = int.from_bytes(head[1:], "big")
        if head[:1] == b"s":
            drain(wire, nbytes, room)
            wire.sendall(b".")
        while head[:1] == b"r" and nbytes:
            piece = room[: min(nbytes, room.nbytes)]
            wire.sendall(piece)
            nbytes -= piece.nbytes


if __name__ == "__main__":
    if sys.argv[1] == "neighbour":
        serve(Path(sys.argv[2]))
    elif sys.argv[1] == "far":
        far(int(sys.argv[2]), int(sys.argv[3]))
