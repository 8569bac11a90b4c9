"""The library's side of the wire: it reads every golden message and file, and says what the golden messages say."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_training import RecordedNumbers, order
from solo_job import Solo, make_solo

from holdfast import Guards
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.launcher_client.agent_client import LauncherClient
from holdfast.training.launcher_client.connection import Parting, Requests
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.protocol.slow_ranks import SlowRank, SlowRanks
from holdfast.training.recovery.replica_sync import ReplicaSync

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "agent_socket.json").read_text())
CLAIM = json.loads((HERE / "claim.json").read_text())

# What a rank may leave out.
OPTIONAL = {"slot", "shard", "source", "lr", "worldSize", "gradNorm", "activities", "outOfMemory"}

TRAIN = """
import torch, holdfast

class Data:
    fingerprint = "golden"
    def __len__(self): return 9
    def __getitem__(self, index): return torch.tensor([float(index)])

job = holdfast.init()
model = torch.nn.Linear(1, 1)
job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))
for batch in job.batches(Data(), global_batch_size=3, micro_batch_size=2, max_steps=4):
    job.step(model(batch).square().mean())
raise ValueError("loss is negative")
"""


class Server:
    """A launcher that says the golden messages and keeps what it hears."""

    def __init__(self, path: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        self.unsaid = {"quiesce", "leave", "world"}
        self.ended = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        # A rank may hang up while this launcher still speaks, or with words of it unread.
        with connection, connection.makefile("r") as lines, contextlib.suppress(ConnectionError):
            self.heard.append(json.loads(lines.readline()))
            for message in GOLDEN["launcher"]:
                if message["type"] not in self.unsaid:
                    connection.sendall(json.dumps({**message, "novelty": 1}).encode() + b"\n")
            connection.sendall(b'{"type":"a message of a later release"}\n')
            for line in lines:
                self.heard.append(json.loads(line))
        self.ended.set()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    serving = Server(tmp_path / "agent.sock")
    yield serving
    serving._listener.close()


def shape(value: Any) -> Any:
    """Names and types: what a golden message settles. Numbers are one type; null goes with anything."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return "list"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


HERE_NOW = RankPlacement(
    rank=0, local_rank=0, world_size=1, local_world_size=1, host="127.0.0.1", port=1, attempt_id=AttemptId(2, 1)
)


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = threading.Event()
    for _ in range(2400):
        if holds():
            return True
        deadline.wait(0.05)
    return False


def test_the_launchers_golden_messages_are_read(server: Server, tmp_path: Path) -> None:
    server.unsaid = {"leave", "world"}
    agent = LauncherClient(tmp_path / "agent.sock", slot=3, place=HERE_NOW)
    golden = {message["type"]: message for message in GOLDEN["launcher"]}
    assert [claim.to_json() for claim in agent.known_claims()] == golden["welcome"]["claims"]
    assert agent.reached == golden["welcome"]["reached"]
    assert agent.durable == golden["welcome"]["durable"]
    assert agent.trained == AttemptId.from_json(golden["welcome"]["trained"])
    assert agent.launcher_failures is not None
    assert agent.launcher_failures.to_json() == golden["welcome"]["books"]
    assert agent.out_of_memory.to_json() == golden["welcome"]["outOfMemory"]
    wanted = Requests(checkpoint=(golden["checkpoint"]["id"],), pause=(golden["quiesce"]["id"],))
    assert eventually(lambda: agent.requests() == wanted), agent.requests()
    agent.answered(wanted)
    assert agent.requests() == Requests()
    agent.close()


def test_the_launcher_sees_at_once_that_a_rank_hung_up(server: Server, tmp_path: Path) -> None:
    """Not only when the process is gone: an interpreter with torch takes its time to end."""
    agent = LauncherClient(tmp_path / "agent.sock", slot=3, place=HERE_NOW)
    agent.known_claims()  # so its reader runs, and waits for more
    assert not server.ended.is_set()
    agent.close()
    assert server.ended.wait(120)


def test_the_golden_leave_is_answered_with_the_golden_left(server: Server, tmp_path: Path) -> None:
    server.unsaid = {"quiesce", "world"}
    agent = LauncherClient(tmp_path / "agent.sock", slot=3, place=HERE_NOW)
    agent.parting = lambda: Parting(step=450, in_doubt=True, keep=True)
    golden = next(message for message in GOLDEN["rank"] if message["type"] == "left")
    assert eventually(lambda: any(message["type"] == "left" for message in server.heard))
    (left,) = (message for message in server.heard if message["type"] == "left")
    assert shape(left) == shape(golden)
    assert (left["generation"], left["attempt"]) == (golden["generation"], golden["attempt"])
    assert agent.enter(HERE_NOW).is_set()
    agent.close()


def test_a_standby_takes_the_golden_world(server: Server, tmp_path: Path) -> None:
    server.unsaid = {"quiesce", "leave", "welcome"}
    agent = LauncherClient(tmp_path / "agent.sock", slot=3, place=None)
    golden = next(message for message in GOLDEN["launcher"] if message["type"] == "world")
    place = agent.next_place()
    assert (place.attempt_id, place.rank, place.world_size) == (AttemptId(2, 2), golden["rank"], golden["worldSize"])
    assert (place.host, place.port) == (golden["masterHost"], golden["masterPort"])
    assert (place.job_uid, place.run_id, place.publication) == (
        golden["jobUID"],
        golden["runID"],
        golden["publication"],
    )
    assert place.torchrun == golden["torchrun"]
    agent.enter(place)
    assert eventually(lambda: server.heard[-1]["type"] == "hello")
    told = {message["type"]: shape(message) for message in GOLDEN["rank"]}
    assert shape(server.heard[0]) == told["standby"]
    assert shape(server.heard[-1]) == told["hello"]
    agent.close()


def test_a_script_says_what_the_golden_messages_say(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "HOLDFAST_AGENT_SOCKET": str(tmp_path / "agent.sock"),
        "HOLDFAST_SLOT": "3",
        "HOLDFAST_GENERATION": "2",
        "HOLDFAST_ATTEMPT": "1",
        "HOLDFAST_PUBLICATION": CLAIM["publication"],
        "HOLDFAST_JOB_UID": CLAIM["jobUID"],
        "HOLDFAST_CHECKPOINT_DIR": str(tmp_path / "tier"),
        "HOLDFAST_CHECKPOINT_INTERVAL": "2",
    }
    ended = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 1, ended.stderr
    assert server.ended.wait(120)
    golden = {message["type"]: message for message in GOLDEN["rank"]}
    heard = {message["type"]: message for message in server.heard}
    unsaid = {"foreignClaims", "quiesced", "peerLost", "account", "standby", "ready", "left", "lastCommit"}
    unsaid |= {"diverged", "skipped", "rolledBack", "slowRanks", "badSamples", "spike", "outOfMemory"}
    assert set(heard) - {"account"} == set(golden) - unsaid  # books are told by the clock
    for kind, message in heard.items():
        expected, got = shape(golden[kind]), shape(message)
        for name in OPTIONAL - set(message):
            expected.pop(name, None)
        if kind == "restored":  # a fresh start: no attempt ID
            expected["fromPair"] = "NoneType"
        if kind == "claim":
            expected["claim"]["fromPair"] = "NoneType"
        assert got == expected, kind
    assert next(m["ids"] for m in server.heard if m["type"] == "checkpoint") == ["touch-1"]
    assert heard["exception"]["traceback"][-1] == "ValueError: loss is negative"
    assert heard["done"]["step"] == 4


class Troubled(RecordedNumbers):
    """Numbers of which one cannot be read, and others give an infinite loss."""

    unreadable = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.unreadable:
            raise OSError("Input/output error")
        return super().__getitem__(index) * (torch.inf if index in self.bad else 1.0)


@pytest.fixture
def troubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Solo:
    """A job with a slow rank, a bad sample, a full GPU memory, a spike of the loss, and a roll-back."""
    places = order(80, 80)
    data = Troubled(80, {places[56], places[60]})  # of the steps 15 and 16, so that the job rolls back
    data.unreadable = places[8]
    guards = Guards(lower_after=1, roll_back_after=2, sample_retries=0, loss_spike="skip", spike_window=10)
    run, full = make_solo(tmp_path, interval="1", guards=guards), [3]
    run.launcher.moves_on = True
    slow = SlowRank(rank=2, seconds=0.41, median_seconds=0.12, activity="compute")
    monkeypatch.setattr(SlowRanks, "look", lambda *_: (slow,))
    model = torch.nn.Linear(2, 1)
    run.job.manage(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

    def forward(batch: torch.Tensor) -> torch.Tensor:
        if run.job.committed_step in full:
            full.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).square().mean() * (1000.0 if run.job.committed_step == 11 else 1.0)

    for batch in run.job.batches(data, global_batch_size=4, micro_batch_size=4, max_steps=16):
        run.job.run_step(lambda batch=batch: forward(batch))
    return run


def test_the_guards_and_the_comparison_of_ranks_say_what_the_golden_messages_say(troubled: Solo) -> None:
    golden = {message["type"]: message for message in GOLDEN["rank"]}
    for kind in ("slowRanks", "badSamples", "outOfMemory", "spike", "skipped", "rolledBack"):
        told = troubled.launcher.of(kind)
        assert told, kind
        assert shape({"type": kind, **told[0]}) == shape(golden[kind]), kind
    assert troubled.launcher.of("slowRanks")[0]["ranks"] == golden["slowRanks"]["ranks"]
    (sample,) = troubled.launcher.of("badSamples")[0]["samples"]
    assert shape(sample) == shape(golden["badSamples"]["samples"][0])


class ThreeReplicas:
    """A group whose middle rank is this one, with other weights than both others."""

    rank, size = 1, 3

    def gather(self, own: Any) -> list[Any]:
        other = dict.fromkeys(own, "other") if isinstance(own, dict) else ["other", True]
        return [other, own, other]


def test_a_replica_that_differs_says_what_the_golden_message_says() -> None:
    golden = next(message for message in GOLDEN["rank"] if message["type"] == "diverged")
    told: list[dict[str, Any]] = []
    agent = SimpleNamespace(send=lambda kind, **body: told.append({"type": kind, **body}))
    state = SimpleNamespace(objects={"model": torch.nn.Linear(1, 1)}, step=golden["step"])
    sync = ReplicaSync(agent, state, stepper=SimpleNamespace(), steps=1)  # type: ignore[arg-type]
    sync.verify(SimpleNamespace(group=ThreeReplicas(), assignment=None))  # type: ignore[arg-type]
    assert [{**message, "tensor": "model/weight"} for message in told] == [golden]


def test_the_golden_claim_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    write_claim(tmp_path, Claim.from_json(CLAIM))
    (file,) = (tmp_path / "claims").iterdir()
    assert file.name == "2.1.json"
    assert json.loads(file.read_text()) == CLAIM
    assert [claim.to_json() for claim in list_claims(tmp_path)] == [CLAIM]
