"""The cause of a failed rank."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from holdfast.core.limits import MAX_TEXT
from holdfast.core.protocol import Cause
from holdfast.launcher.host import termination_log
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.launcher.ranks.exit_cause import FailureContext, RankEnd, judge, not_started, raised, repeated
from holdfast.launcher.ranks.oom_counter import OomCounter
from holdfast.launcher.ranks.supervisor import _recorded as recorded

PLACE = FailureContext(pod="gpt-w1", node="node-2", at=1000.0)


GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:537]"


ALLOCATOR = "RuntimeError: [enforce fail at alloc_cpu.cpp:115] err == 0. DefaultCPUAllocator: can't allocate memory"


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
def test_memory_exception_is_out_of_memory_however_it_is_seen(text: str, is_memory: bool) -> None:
    cause, reason = (Cause.OOM, "OutOfMemory") if is_memory else (Cause.APPLICATION, "Exception")
    frame = '  File "train.py", line 7, in <module>'
    printed = judge(RankEnd(rank=1, pid=31, returncode=1, traceback=(frame, text)), PLACE)
    assert printed is not None
    for failure in (printed, raised(1, text.removeprefix("[rank1]: "), (frame, text), PLACE)):
        assert (failure.cause, failure.reason, failure.priority) == (cause, reason, Priority.EXCEPTION)


@pytest.mark.parametrize(
    ("text", "cause", "reason"),
    [
        ("NonFiniteError: 10 steps in a row were not finite", Cause.NON_FINITE, "NonFinite"),
        ("[rank1]: holdfast.core.errors.NonFiniteError: model.weight holds values", Cause.NON_FINITE, "NonFinite"),
        ("ValueError: NonFiniteError in the data", Cause.APPLICATION, "Exception"),
        ("my.NonFiniteErrors: x", Cause.APPLICATION, "Exception"),
        ("BadSampleError: 3 samples of the dataset cannot be read", Cause.APPLICATION, "BadSamples"),
        ("[rank1]: holdfast.core.errors.BadSampleError: 3 samples", Cause.APPLICATION, "BadSamples"),
        ("ValueError: BadSampleError in the data", Cause.APPLICATION, "Exception"),
    ],
)
def test_errors_of_the_guards_have_causes_and_reasons_of_their_own(text: str, cause: Cause, reason: str) -> None:
    frame = '  File "train.py", line 7, in <module>'
    printed = judge(RankEnd(rank=1, pid=31, returncode=1, traceback=(frame, text)), PLACE)
    assert printed is not None
    for failure in (printed, raised(1, text.removeprefix("[rank1]: "), (frame, text), PLACE)):
        assert (failure.cause, failure.reason, failure.priority) == (cause, reason, Priority.EXCEPTION)


def test_roll_back_is_an_incident_with_its_step() -> None:
    failure = repeated("rolledBack", 1, "the job rolls back", PLACE, step=7)
    assert (failure.cause, failure.reason, failure.step) == (Cause.NON_FINITE, "RolledBack", 7)
    assert (failure.rank, failure.pod, failure.node, failure.message) == (1, "gpt-w1", "node-2", "the job rolls back")


def test_step_that_is_repeated_with_more_memory_is_an_incident_of_the_cause_oom() -> None:
    failure = repeated("outOfMemory", 1, "rank 1 is out of GPU memory", PLACE, step=7)
    assert (failure.cause, failure.reason, failure.step) == (Cause.OOM, "OutOfMemoryRetried", 7)
    assert (failure.priority, failure.exit_code) == (Priority.EXCEPTION, None)


def test_cause_is_the_last_traceback_not_later_framework_output() -> None:
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


def test_warnings_of_torch_at_exit_are_not_the_cause() -> None:
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


@pytest.mark.parametrize("as_text", [True, False])
def test_huge_error_file_and_its_lines_are_cut_to_the_beginning(tmp_path: Path, *, as_text: bool) -> None:
    huge = "ValueError: " + "x" * 300_000
    told = huge if as_text else {"message": huge, "extraInfo": {"py_callstack": f"Traceback\n{huge}"}}
    (tmp_path / "rank-0.json").write_text(json.dumps({"message": told}))
    exception, traceback = recorded(tmp_path / "rank-0.json")
    assert exception == huge[:MAX_TEXT]
    assert traceback == (() if as_text else ("Traceback", huge[:MAX_TEXT]))


def test_a_machine_without_resources_is_no_fault_of_the_script() -> None:
    message = f"cannot start 'python': {os.strerror(errno.EAGAIN)}; pass a program after '--'"
    assert not_started("python", message, PLACE).cause is Cause.INFRASTRUCTURE
    missing = not_started("python", f"cannot start 'python': {os.strerror(errno.ENOENT)}", PLACE)
    assert (missing.cause, missing.exit_code) == (Cause.APPLICATION, 127)
