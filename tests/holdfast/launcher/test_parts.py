"""The small parts of the launcher, one by one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import DocumentError
from holdfast.core.limits import MAX_TEXT
from holdfast.core.log_format import LogContext, configure
from holdfast.core.protocol import Cause
from holdfast.launcher.drain.touch_file import TouchFile
from holdfast.launcher.host import termination_log
from holdfast.launcher.host.membership_file import MembershipFile
from holdfast.launcher.host.run_dir import read_json
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.messages import Failure, Incident, Master, Priority, Remedy
from holdfast.launcher.membership.quorum import missing_generation
from holdfast.launcher.membership.state import State
from holdfast.launcher.network import tcp_store
from holdfast.launcher.network.tcp_store import StoreHost
from holdfast.launcher.options import RunOptions
from holdfast.launcher.process import child
from holdfast.launcher.process.child import ChildProcess, ProcessExit
from holdfast.launcher.ranks.exit_cause import FailureContext, RankEnd, judge, not_started, raised
from holdfast.launcher.ranks.oom_counter import OomCounter
from holdfast.launcher.ranks.progress import Progress
from holdfast.launcher.ranks.rank_socket import AgentSocket
from holdfast.launcher.ranks.supervisor import _recorded as recorded
from holdfast.launcher.rendezvous.roster import GONE_SECONDS, Joined, Record, Roster, RunRequest
from holdfast.launcher.status import status_document
from holdfast.launcher.status.status_file import StatusFile

PLACE = FailureContext(pod="gpt-w1", node="node-2", at=1000.0)
DEADLINE = 240.0


@pytest.mark.parametrize(
    ("end", "cause", "reason"),
    [
        ({"returncode": -9}, Cause.INFRASTRUCTURE, "RankKilled"),
        ({"returncode": -9, "oom": True}, Cause.OOM, "OutOfMemory"),
        ({"returncode": -11}, Cause.APPLICATION, "Signal"),
        ({"returncode": 1, "exception": "ValueError: x"}, Cause.APPLICATION, "Exception"),
        ({"returncode": 3}, Cause.APPLICATION, "ExitCode"),
        ({"returncode": 0, "greeted": True}, Cause.APPLICATION, "EndedEarly"),
        ({"returncode": 1, "peer_lost": "closed"}, Cause.INFRASTRUCTURE, "PeerLost"),
        ({"returncode": 76, "greeted": True}, Cause.INFRASTRUCTURE, "PeerLost"),
    ],
)
def test_a_cause_is_decided_from_what_was_seen(end: dict[str, object], cause: Cause, reason: str) -> None:
    failure = judge(RankEnd(rank=1, pid=31, **end), PLACE)  # type: ignore[arg-type]
    assert failure is not None
    assert (failure.cause, failure.reason, failure.rank, failure.pod) == (cause, reason, 1, "gpt-w1")


GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:537]"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (f"{GLOO} Read error [127.0.0.1]:3021: Connection reset by peer", "PeerLost"),
        (f"{GLOO} Connection closed by peer [127.0.0.1]:3021", "PeerLost"),
        (f"{GLOO} Timed out waiting 1800000ms for recv operation to complete", "PeerLost"),
        ("RuntimeError: Gloo connectFullMesh failed: connection refused", "PeerLost"),
        ("torch.distributed.DistNetworkError: Broken pipe", "PeerLost"),
        ("torch.distributed.DistStoreError: Socket Timeout", "PeerLost"),
        (
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
            "PeerLost",
        ),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.", "PeerLost"),
        ("ncclRemoteError: NCCL error: remote process exited or there was a network error", "PeerLost"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "Exception"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "Exception"),
        ("ValueError: the feature store is broken", "Exception"),
        (f"{GLOO} op.preamble.length <= op.nbytes. 8 vs 4", "Exception"),
    ],
)
def test_only_torchs_own_communication_tells_of_a_lost_peer(last: str, reason: str) -> None:
    failure = judge(RankEnd(rank=1, pid=31, returncode=1, traceback=("Traceback", last)), PLACE)
    assert failure is not None
    assert failure.reason == reason
    assert failure.cause is (Cause.INFRASTRUCTURE if reason == "PeerLost" else Cause.APPLICATION)


@pytest.mark.parametrize(
    ("lines", "reason", "message"),
    [
        ((), "ExitCode", "rank 1 (pid 31) ended with 3"),
        (("train.py: error: give --data",), "ExitCode", "rank 1 (pid 31) ended with 3: train.py: error: give --data"),
        (('  File "train.py", line 7, in <module>', "Stopped: no data"), "Exception", "Stopped: no data"),
        (("[rank1]: Traceback (most recent call last):", "[rank1]: Stopped"), "Exception", "[rank1]: Stopped"),
        (
            ("torch.OutOfMemoryError: CUDA out of memory",),
            "OutOfMemory",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
    ],
)
def test_last_words_that_are_no_tracebacks_tell_of_no_exception(
    lines: tuple[str, ...], reason: str, message: str
) -> None:
    failure = judge(RankEnd(rank=1, pid=31, returncode=3, traceback=lines), PLACE)
    assert failure is not None
    assert (failure.reason, failure.message) == (reason, message)


ALLOCATOR = "RuntimeError: [enforce fail at alloc_cpu.cpp:115] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("MemoryError", True),
        ("[rank1]: MemoryError: ", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB", True),
        (ALLOCATOR, True),
        ("RuntimeError: std::bad_alloc", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", True),
        ("OutOfMemoryError: HIP out of memory", True),
        ("ValueError: MemoryError in the data", False),
        ("KeyError: 'OutOfMemoryError'", False),
    ],
)
def test_an_exception_for_want_of_memory_counts_as_out_of_memory_however_it_was_seen(
    text: str, is_memory: bool
) -> None:
    cause, reason = (Cause.OOM, "OutOfMemory") if is_memory else (Cause.APPLICATION, "Exception")
    frame = '  File "train.py", line 7, in <module>'
    printed = judge(RankEnd(rank=1, pid=31, returncode=1, traceback=(frame, text)), PLACE)
    assert printed is not None
    for failure in (printed, raised(1, text.removeprefix("[rank1]: "), (frame, text), PLACE)):
        assert (failure.cause, failure.reason, failure.priority) == (cause, reason, Priority.EXCEPTION)


def test_the_cause_is_the_last_tracebacks_exception_and_not_what_a_framework_prints_after_it() -> None:
    traceback = ["Traceback (most recent call last):", '  File "train.py", line 5, in <module>', "    run()"]
    error = ["RuntimeError: the device is not there", "its message has two lines"]
    advice = ["", "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."]
    first = [
        *traceback,
        "KeyError: 'lr'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
    ]
    assert termination_log.error_lines([*traceback, *error, *advice])[-1] == error[0]
    assert termination_log.error_lines([*first, *traceback, *error, *advice])[-1] == error[0]
    ranked = [f"[rank1]: {line}" for line in [*traceback, *error]]
    assert termination_log.error_lines([*ranked, *advice])[-1] == f"[rank1]: {error[0]}"
    assert termination_log.error_lines(advice) == (advice[-1],)
    assert termination_log.error_lines(traceback) == tuple(traceback), "what ended within a traceback"


@pytest.mark.parametrize(
    ("text", "line", "mistake"),
    [
        ("NameError: name 'x' is not defined", 7, "NameError at train.py:7"),
        ("[rank1]: holdfast.core.errors.UsageError: give it all", 9, "UsageError at train.py:9"),
        ("RuntimeError: CUDA error: device-side assert", 7, ""),
        ("OSError: [Errno 5] Input/output error", 7, ""),
        ("requests.exceptions.ConnectionError: reset", 7, ""),
    ],
)
def test_a_mistake_of_the_program_is_known_by_its_type_and_place(text: str, line: int, mistake: str) -> None:
    lines = ('  File "a.py", line 1, in f', f'  File "train.py", line {line}, in <module>', text)
    failure = judge(RankEnd(rank=1, pid=31, returncode=1, traceback=lines), PLACE)
    assert failure is not None
    assert failure.mistake == mistake
    assert Failure.from_json(failure.to_json()) == failure


def test_what_torch_warns_of_as_a_process_ends_is_not_why_it_does() -> None:
    warning = "[W1124 21:40:48.798360530 socket.cpp:207] [c10d] The hostname of the client socket is not known."
    assert termination_log.last_lines(["ValueError: x", warning, f"[rank0]:{warning}"]) == ("ValueError: x",)


@pytest.mark.parametrize(
    "end",
    [
        {"returncode": 0},
        {"returncode": 0, "greeted": True, "done": True},
        {"returncode": -9, "sent": frozenset({signal.SIGKILL})},
        {"returncode": 1, "sent": frozenset({signal.SIGTERM})},
    ],
)
def test_an_end_that_is_nobodys_fault(end: dict[str, object]) -> None:
    assert judge(RankEnd(rank=1, pid=31, **end), PLACE) is None  # type: ignore[arg-type]


def test_the_root_cause_comes_before_what_it_caused() -> None:
    killed = judge(RankEnd(rank=1, pid=31, returncode=-9), PLACE)
    echo = judge(RankEnd(rank=0, pid=30, returncode=1, peer_lost="closed"), PLACE)
    assert killed is not None
    assert echo is not None
    assert killed.rank_of_root < echo.rank_of_root
    assert echo.priority is Priority.PEER_LOST


@pytest.mark.parametrize(
    ("line", "name", "template"),
    [
        ("0::/", "memory.events", "low 0\noom {n}\noom_kill {n}\n"),
        ("4:memory:/pod", "memory/pod/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {n}\n"),
    ],
)
def test_the_cgroup_tells_of_a_kill_once(tmp_path: Path, line: str, name: str, template: str) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text(line + "\n")
    file = tmp_path / "fs" / name
    file.parent.mkdir(parents=True)
    file.write_text(template.format(n=1))
    counter = OomCounter(root=tmp_path / "fs", membership=membership)
    assert not counter.grew()
    file.write_text(template.format(n=2))
    assert counter.grew()
    assert not counter.grew()


def test_without_a_cgroup_nothing_is_blamed_on_memory(tmp_path: Path) -> None:
    assert not OomCounter(root=tmp_path, membership=tmp_path / "none").grew()


def test_the_termination_log_keeps_no_secret_and_its_size(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    lines = tuple(f"line {n} " + "x" * 1000 for n in range(50))
    message = "cannot reach https://me:hunter2@store: token=abc123 Authorization: Bearer s3cret"
    termination_log.write(log, Ending(code=1, cause="Application", message=message, traceback=lines, final=True))
    text = log.read_text()
    assert len(text) <= 4096
    assert json.loads(text)["traceback"][-1].startswith("line 49")
    assert [secret for secret in ("hunter2", "abc123", "s3cret") if secret in text] == []


def test_the_status_keeps_no_secret_and_its_size() -> None:
    text = "cannot pull https://t0ken@hub/x, https://me:hunter2@store: token=abc123 " + "x" * 5000
    failure = Failure(cause=Cause.APPLICATION, reason="Exception", message=text, priority=Priority.EXCEPTION)
    incident = Incident(pair=AttemptId(1, 1), failure=failure, action=Remedy.WAIT, detected=1.0)
    shown = status_document.status(
        identity=status_document.Identity(pod_uid="a", pod="w0", node="n"),
        state=State(me="a", message=text, incidents=(incident,)),
        ranks=(),
        progress=Progress(),
        control_port=1,
        store_port=2,
        notices=(),
        ending=None,
    )
    assert [secret for secret in ("t0ken", "hunter2", "abc123") if secret in json.dumps(shown)] == []
    for message in (shown["message"], shown["incidents"][0]["message"]):
        assert message.startswith("cannot pull https://***@hub/x, https://***@store: token=*** x")
        assert len(message) == 1000


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Basic s3cret",
        "{'authorization': 'Basic s3cret'}",
        "sent Bearer s3cret",
        "the claim eyJhbGciOiJSUzI1NiJ9.s3cret.c2ln",
        "id AKIA" + "IOSFODNN7EXAMPLE",
    ],
)
def test_credentials_are_redacted_whatever_their_scheme(text: str) -> None:
    shown = termination_log.redact(text)
    assert "***" in shown
    assert "s3cret" not in shown
    assert "IOSFODNN7EXAMPLE" not in shown


def test_of_many_incidents_without_an_operator_the_oldest_are_told_first() -> None:
    failure = Failure(cause=Cause.APPLICATION, reason="Exception", message="", priority=Priority.EXCEPTION)
    pairs = [AttemptId(1, number) for number in range(1, 100)]
    incidents = tuple(Incident(pair=pair, failure=failure, action=Remedy.WAIT, detected=1.0) for pair in pairs)
    shown = status_document.status(
        identity=status_document.Identity(pod_uid="a", pod="w0", node="n"),
        state=State(me="a", incidents=incidents[::-1]),
        ranks=(),
        progress=Progress(),
        control_port=1,
        store_port=2,
        notices=(),
        ending=None,
    )
    assert [told["attempt"] for told in shown["incidents"]] == list(range(1, 33))


def test_without_a_termination_log_nothing_happens(tmp_path: Path) -> None:
    termination_log.write(tmp_path / "none" / "termination-log", Ending(code=0))
    assert list(tmp_path.iterdir()) == []


def test_a_touch_file_fires_once(tmp_path: Path) -> None:
    touch = TouchFile(tmp_path)
    assert touch.take() is None
    (tmp_path / "emergency_checkpoint").touch()
    first = touch.take()
    assert first is not None
    assert not first.drain
    assert touch.take() is None


@pytest.mark.parametrize(
    ("deadline", "ends_at"),
    [
        ("2026-01-31T12:00:00.000000Z", 1769860800.0),
        ("2026-01-31T13:00:00+01:00", 1769860800.0),
        ("2026-01-31T12:00:00", 1769860800.0),
        ("soon", None),
        (7, None),
        (None, None),
    ],
)
def test_a_touch_file_says_when_the_machine_goes(tmp_path: Path, deadline: object, ends_at: float | None) -> None:
    request = {"version": 1, "id": "aws-1", "source": "AWS", "drain": True, "deadline": deadline}
    (tmp_path / "emergency_checkpoint").write_text(json.dumps(request))
    taken = TouchFile(tmp_path).take()
    assert taken is not None
    assert (taken.node_goes, taken.ends_at()) == (True, ends_at)


def test_only_a_sidecars_drain_is_for_the_whole_node(tmp_path: Path) -> None:
    for request in ({"drain": True}, {"source": "AWS"}):
        (tmp_path / "emergency_checkpoint").write_text(json.dumps({"version": 1, **request}))
        taken = TouchFile(tmp_path).take()
        assert taken is not None
        assert not taken.node_goes


def test_a_touch_file_that_cannot_be_read_still_asks(tmp_path: Path) -> None:
    touch = TouchFile(tmp_path)
    (tmp_path / "emergency_checkpoint").write_text("please!")
    request = touch.take()
    assert request is not None
    assert "not JSON" in request.reason


def test_a_membership_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, object]] = []
    file = MembershipFile(tmp_path, seen.append)
    assert not file.look()
    (tmp_path / "membership.json").write_text("{")
    assert not file.look()
    assert "membership.json is not JSON" in file.problem
    (tmp_path / "new").write_text('{"version": 1}')
    (tmp_path / "new").rename(tmp_path / "membership.json")
    assert file.look()
    assert seen == [{"version": 1}]
    assert not file.look()


def test_a_document_nested_beyond_reason_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "membership.json").write_text("[" * 200_000)
    with pytest.raises(DocumentError, match=r"membership\.json is not JSON"):
        read_json(tmp_path / "membership.json")


def test_a_rank_that_sends_a_line_nested_beyond_reason_is_disconnected_and_others_are_heard(
    short_path: Path,
) -> None:
    async def play() -> None:
        heard: list[int] = []
        unhandled: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
        agent = AgentSocket(short_path / "agent.sock", lambda message: heard.append(message.connection.rank))
        await agent.start()
        reader, writer = await asyncio.open_unix_connection(short_path / "agent.sock")
        writer.write(b"[" * 200_000 + b"\n")
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
        hello = {"type": "hello", "rank": 3, "localRank": 0, "pid": 7, "generation": 1, "attempt": 1}
        _, other = await asyncio.open_unix_connection(short_path / "agent.sock")
        other.write(json.dumps(hello).encode() + b"\n")
        async with asyncio.timeout(DEADLINE):
            while not heard:
                await asyncio.sleep(0.01)
        assert (heard, unhandled) == ([3], [])
        await agent.close()

    asyncio.run(play())


@pytest.mark.parametrize("as_text", [True, False])
def test_of_a_huge_error_file_and_of_its_lines_the_beginning_is_kept(tmp_path: Path, *, as_text: bool) -> None:
    huge = "ValueError: " + "x" * 300_000
    told = huge if as_text else {"message": huge, "extraInfo": {"py_callstack": f"Traceback\n{huge}"}}
    (tmp_path / "rank-0.json").write_text(json.dumps({"message": told}))
    exception, traceback = recorded(tmp_path / "rank-0.json")
    assert exception == huge[:MAX_TEXT]
    assert traceback == (() if as_text else ("Traceback", huge[:MAX_TEXT]))


def test_the_status_is_written_only_when_it_changed(tmp_path: Path) -> None:
    async def play() -> None:
        document = {"version": 1, "step": 1}
        status = StatusFile(tmp_path, lambda: dict(document))
        status.flush()
        first = (tmp_path / "status.json").stat()
        status.flush()
        assert (tmp_path / "status.json").stat().st_ino == first.st_ino
        document["step"] = 2
        status.flush()
        assert json.loads((tmp_path / "status.json").read_text())["step"] == 2
        os.utime(tmp_path / "status.json", (0, 0))
        status.alive()
        assert (tmp_path / "status.json").stat().st_mtime > 0

    asyncio.run(play())


def test_a_store_outlives_the_proposals_of_others_for_as_long_as_its_attempt_trains() -> None:
    """Closed by the first of them, it would be missed by the commit that the attempt ends with."""

    def connect(master: Master) -> Any:
        return dist.TCPStore(
            master.host, master.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE)
        )

    async def play() -> tuple[list[bytes], list[tuple[AttemptId, str]]]:
        lost: list[tuple[AttemptId, str]] = []
        host = StoreHost(lambda pair, message: lost.append((pair, message)))
        trains = host.open(AttemptId(1, 2), "127.0.0.1")
        held = await asyncio.to_thread(connect, trains)
        for attempt in (1, 2):
            host.open(AttemptId(2, attempt), "127.0.0.1", beside=AttemptId(1, 2))
        held.set("said", "here")
        again = await asyncio.to_thread(connect, trains)
        heard = [await asyncio.to_thread(again.get, "said")]
        last = host.open(AttemptId(2, 3), "127.0.0.1")
        newest = await asyncio.to_thread(connect, last)
        newest.set("said", "new")
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(again.get, "said")
        heard.append(newest.get("said"))
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        await _until(lambda: bool(lost))
        return heard, lost

    heard, lost = asyncio.run(play())
    assert heard == [b"here", b"new"]
    assert [pair for pair, _ in lost] == [AttemptId(2, 3)]


def test_a_store_is_served_beside_a_file_with_the_name_of_a_standard_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)

    async def play() -> bytes:
        host = StoreHost(lambda pair, message: pytest.fail(message))
        master = host.open(AttemptId(1, 1), "127.0.0.1")
        patience = timedelta(seconds=DEADLINE)
        client = await asyncio.to_thread(
            lambda: dist.TCPStore(master.host, master.port, is_master=False, wait_for_workers=False, timeout=patience)
        )
        client.set("said", "here")
        said: bytes = client.get("said")
        host.close()
        return said

    assert asyncio.run(play()) == b"here"


def test_a_store_that_never_comes_to_be_ends_the_launcher_and_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tcp_store, "own_program", lambda *_: [sys.executable, "-c", "import sys; sys.exit('no torch')"]
    )

    async def play() -> tuple[int, str]:
        lost: list[str] = []
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = StoreHost(lambda _, message: lost.append(message), on_broken=broken.set_result)
        for attempt in range(1, 4):
            host.open(AttemptId(1, attempt), "127.0.0.1")
            await _until(lambda: len(lost) == attempt)  # noqa: B023  (awaited at once)
        return len(lost), await broken

    times, why = asyncio.run(play())
    assert times == 3
    assert why.startswith("the store's process ended with 1 no torch, 3 times in a row")


async def _until(condition: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + DEADLINE
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_a_child_is_heard_to_its_last_line() -> None:
    async def play() -> ProcessExit:
        ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        code = "import sys; sys.stderr.write(''.join(f'{n}\\n' for n in range(100)) + 'end'); sys.exit(7)"
        ChildProcess(argv=[sys.executable, "-c", code], environ={}, on_exit=ended.set_result)
        return await asyncio.wait_for(ended, DEADLINE)

    end = asyncio.run(play())
    assert end.returncode == end.exit_code == 7
    assert end.stderr_tail[-2:] == ("99", "end")
    assert len(end.stderr_tail) <= 40


def test_a_child_whose_words_find_no_room_is_read_to_its_end() -> None:
    """A pipe without a reader would end it."""
    read, write = os.pipe()
    os.write(write, b"first\nlast\n")
    os.close(write)
    tail: deque[str] = deque()
    with Path("/dev/full").open("wb", buffering=0) as full:
        child._copy(os.fdopen(read, "rb"), full.fileno(), "w0: ", tail)
    assert list(tail) == ["first", "last"]


def test_a_pause_of_the_launcher_takes_no_time_from_who_copies_last_words() -> None:
    """While nobody here has a CPU one wait goes by, and the copier needs another one."""

    class Copier:
        waits = 0

        def join(self, _: float) -> None:
            self.waits += 1

    copier: Any = Copier()
    child._join([copier])
    assert copier.waits > 1


ORPHANS = """
import os, time
read, write = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        os.write(write, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = int(os.read(read, 20))
while True:
    try:
        os.kill(orphan, 0)
    except ProcessLookupError:
        os._exit(5)
    time.sleep(0.01)
"""
AS_PID_1 = """
import asyncio, os, sys
from holdfast.launcher.process.child import ChildProcess, Reaper

async def main():
    ended = asyncio.get_running_loop().create_future()
    own = ChildProcess(argv=[sys.executable, "-c", sys.argv[1]], environ={}, on_exit=ended.set_result)
    reaper = Reaper(lambda pid: pid == own.pid)
    orphans = []
    while not ended.done():
        orphans += reaper.reap()
        await asyncio.sleep(0.02)
    print(os.getpid(), ended.result().returncode, len(orphans), own.pid in orphans)

asyncio.run(main())
"""


def test_as_pid_1_orphans_are_reaped_and_own_children_left_alone() -> None:
    """In a PID namespace of its own, where the launcher is the one that orphans are handed to. The child makes an
    orphan, and ends once nothing is left of that."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to make a PID namespace")
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", AS_PID_1, ORPHANS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout.split() == ["1", "5", "1", "False"], done.stderr


def joined(uid: str) -> Joined:
    return Joined.of(uid=uid, name=uid, host="127.0.0.1", control=1, store=2, node="n")


def roster(low: int, high: int) -> Roster:
    return Roster(terms=RunRequest(options=RunOptions(nodes=(low, high)), run_id="run"), publication="x")


def test_only_a_launcher_that_was_asked_for_the_same_may_join() -> None:
    here = RunRequest(options=RunOptions(nodes=(2, 4), processes=2), run_id="run-1")
    assert here.asked() == {"--nproc-per-node": "2", "--nnodes": "2:4"}
    assert here.refusal(here.asked()) is None
    assert here.refusal({}) is None
    assert here.refusal({"--of-the-future": "1"}) is None

    def other(**changes: Any) -> RunRequest:
        return replace(here, options=replace(here.options, **changes))

    for there, option in (
        (other(processes=3), "--nproc-per-node is 3 here and 2 at"),
        (other(nodes=(2, 3)), "--nnodes is 2:3 here and 2:4 at"),
        (other(nodes=(4, 4)), "--nnodes is 4 here and 2:4 at"),
        (replace(other(run_name="mine"), run_id="mine"), "--rdzv-id is mine here and run-1 at"),
    ):
        said = here.refusal(there.asked())
        assert said is not None
        assert said.startswith(option)
        assert "give the same on every host" in said
    assert here.refusal(replace(here, run_id="run-2").asked()) is None, "a name that nobody gave"


def test_a_roster_waits_for_all_then_for_the_last_call() -> None:
    partial = roster(1, 2).joined(joined("a"), 0.0)
    assert partial.publish(1.0).published == ()
    assert len(partial.publish(31.0).published) == 1
    full = partial.joined(joined("b"), 2.0).publish(2.0)
    assert [member.uid for member in full.published[0].members] == ["a", "b"]


def test_a_shrink_that_the_launchers_make_is_not_published_and_any_other_is() -> None:
    three = roster(1, 3).joined(joined("a"), 0).joined(joined("b"), 0).joined(joined("c"), 0).publish(0)
    two = three.left("c", 5.0).publish(5.0)
    assert len(two.published) == 1
    one = two.left("b", 6.0).publish(6.0)
    assert [member.uid for member in one.published[1].members] == ["a"]
    assert one.gone(7.0) == []
    assert one.gone(7.0 + GONE_SECONDS) == ["b", "c"]


def test_previous_generations_are_listed_from_the_one_that_started() -> None:
    grown = roster(1, 2).joined(joined("a"), 0).publish(40.0).joined(joined("b"), 41.0).publish(41.0)
    document = grown.document(Record(started=AttemptId(1, 4)), now=41.0, revision=3)
    assert document["generation"] == 2
    assert [old["generation"] for old in document["previous"]] == [1]
    later = grown.document(Record(started=AttemptId(2, 1), acknowledged=(AttemptId(1, 4),)), now=41.0, revision=4)
    assert later["previous"] == []
    assert later["acknowledged"] == [{"generation": 1, "attempt": 4}]


def test_claims_of_another_run_are_left_behind_by_a_generation_above_them() -> None:
    claim = Claim(pair=AttemptId(4, 2), job_uid="older", publication="p", from_step=7)
    alone = roster(1, 1).joined(joined("a"), 0).publish(0).found([claim]).publish(1.0)
    document = alone.document(Record(started=AttemptId(1, 1)), now=1.0, revision=2)
    assert document["generation"] == 5
    assert document["claims"] == [claim.to_json()]
    assert [(old["generation"], old["members"]) for old in document["previous"]] == [(1, ["a"]), (2, [])]
    assert document["previous"][1]["through"] == 4
    read = Membership.from_json(document)
    assert missing_generation(read, AttemptId(1, 1)) is None
    assert alone.publish(2.0) == alone


def test_a_full_pipe_does_not_stop_who_logs() -> None:
    reader, writer = os.pipe()
    with open(reader) as source, open(writer, "w") as stream:  # noqa: PTH123  (descriptors, not paths)
        logger = configure(LogContext(), stream=stream, background=True)
        for n in range(3000):
            logger.info("line %d %s", n, "x" * 100)
        lines = [json.loads(source.readline())["msg"].split()[1] for _ in range(3000)]
        assert lines == [str(n) for n in range(3000)]
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()
        logger.propagate = True


def test_a_machine_without_resources_is_no_fault_of_the_script() -> None:
    message = f"cannot start 'python': {os.strerror(errno.EAGAIN)}; give a program after '--'"
    assert not_started("python", message, PLACE).cause is Cause.INFRASTRUCTURE
    missing = not_started("python", f"cannot start 'python': {os.strerror(errno.ENOENT)}", PLACE)
    assert (missing.cause, missing.exit_code) == (Cause.APPLICATION, 127)
