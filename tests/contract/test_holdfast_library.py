"""The library's side of the wire: it reads every golden message and file, and says what the golden messages say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.claims import list_claims, write_claim
from holdfast.place import from_message
from holdfast.rank_agent import RankAgent, Requests
from holdfast.worlds import Claim

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "agent_socket.json").read_text())
CLAIM = json.loads((HERE / "claim.json").read_text())

# What a rank may leave out.
OPTIONAL = {"lr", "worldSize"}

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
        self.ended = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("r") as lines:
            self.heard.append(json.loads(lines.readline()))
            for message in GOLDEN["launcher"]:
                if message["type"] not in ("quiesce", "leave", "world"):
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


def test_the_launchers_golden_messages_are_read(server: Server, tmp_path: Path) -> None:
    golden = {message["type"]: message for message in GOLDEN["launcher"]}
    world = from_message({**golden["world"], "attempt": 1})
    agent = RankAgent(tmp_path / "agent.sock", slot=3, place=world)
    agent.enter(agent.next_place())
    assert [claim.to_json() for claim in agent.known_claims()] == golden["welcome"]["claims"]
    wanted = Requests(checkpoint=(golden["checkpoint"]["id"],))
    deadline = threading.Event()
    for _ in range(200):
        if agent.requests() == wanted:
            break
        deadline.wait(0.05)
    assert agent.requests() == wanted
    agent.answered(wanted)
    assert agent.requests() == Requests()
    agent.close()


def test_a_script_says_what_the_golden_messages_say(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environ = {
        "PATH": "/usr/bin:/bin",
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
    ended = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1, ended.stderr
    assert server.ended.wait(30)
    golden = {message["type"]: message for message in GOLDEN["rank"]}
    heard = {message["type"]: message for message in server.heard}
    unsaid = {"foreignClaims", "quiesced", "peerLost", "account", "standby", "ready", "left"}
    assert set(heard) - {"account"} == set(golden) - unsaid  # books are told by the clock
    for kind, message in heard.items():
        expected, got = shape(golden[kind]), shape(message)
        for name in OPTIONAL - set(message):
            expected.pop(name, None)
        if kind == "restored":  # a fresh start: no pair
            expected["fromPair"] = "NoneType"
        if kind == "claim":
            expected["claim"]["fromPair"] = "NoneType"
        assert got == expected, kind
    assert next(m["ids"] for m in server.heard if m["type"] == "checkpoint") == ["touch-1"]
    assert heard["exception"]["traceback"][-1] == "ValueError: loss is negative"
    assert heard["done"]["step"] == 4


def test_the_golden_claim_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    write_claim(tmp_path, Claim.from_json(CLAIM))
    (file,) = (tmp_path / "claims").iterdir()
    assert file.name == "2.1.json"
    assert json.loads(file.read_text()) == CLAIM
    assert [claim.to_json() for claim in list_claims(tmp_path)] == [CLAIM]
