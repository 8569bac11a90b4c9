"""The launcher's side of the golden files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heard_ranks import HeardRanks

from holdfast.checkpoint.policy.retention import Best, Rules
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import DocumentError, VersionError
from holdfast.core.protocol import Cause
from holdfast.launcher.accounting.checkpoint_counters import CheckpointCounters, Failing, Written
from holdfast.launcher.accounting.goodput import GoodputAccounts
from holdfast.launcher.drain.touch_file import TouchFile
from holdfast.launcher.hang.detectors.observation import HangSettings
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.events import How, RankFailed
from holdfast.launcher.membership.messages import Failure, Incident, Priority, Remedy, World
from holdfast.launcher.membership.state import Attempt, Master, Peer, Phase, State
from holdfast.launcher.ranks.environ import RankPlace, world_message
from holdfast.launcher.ranks.progress import Progress, Wish
from holdfast.launcher.ranks.rank_process import Rank
from holdfast.launcher.ranks.rank_socket import AgentSocket, RankMessage
from holdfast.launcher.status.status_document import Identity, status

GOLDEN = Path(__file__).parent
AT = 1769860800.0  # 2026-01-31T12:00:00Z


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def membership() -> Membership:
    return Membership.from_json(golden("membership.json"))


def world() -> World:
    known = membership()
    return World(
        attempt_id=AttemptId(2, 1),
        publication=known.publication,
        members=known.members,
        coordinator=known.members[0].pod_uid,
    )


def incident() -> Incident:
    failure = Failure(
        cause=Cause.INFRASTRUCTURE,
        reason="RankKilled",
        message="rank 1 (pid 31) was ended by SIGKILL",
        priority=Priority.KILLED,
        at=AT,
        pod="gpt-w1",
        node="node-2",
        rank=1,
        exit_code=137,
    )
    return Incident(
        attempt_id=AttemptId(1, 3),
        failure=failure,
        action=Remedy.SHRINK,
        detected=AT,
        part_of=AttemptId(1, 2),
        resumed=AT,
        lost_steps=12,
        restored_from="memory, peer",
    )


def state() -> State:
    return State(
        me="uid-w0",
        ready=True,
        membership=_with_lost_member(membership()),
        accepted=AttemptId(2, 1),
        started=AttemptId(2, 1),
        attempt=Attempt(
            world=world(),
            master=Master(host="10.244.0.7", port=1),
            since=AT,
            step=412,
            restored=400,
            origin="shared, object",
        ),
        phase=Phase.RUNNING,
        message="training with 3 of 3 workers",
        incidents=(incident(),),
        peers={"uid-w2": Peer(up=False, since=AT, how=How.SILENT)},
    )


def _with_lost_member(known: Membership) -> Membership:
    """The golden status reports a lost member that the golden membership no longer lists."""
    return replace(known, members=(*known.members, replace(known.members[0], index=3, pod_uid="uid-w2")))


class _Running:
    pid = 31
    alive = True


def rank() -> Rank:
    place = RankPlace(local_rank=0, local_world_size=1, group_rank=0, group_world_size=3)
    made = Rank(slot=0, local_rank=0, place=place, attempt_id=AttemptId(2, 1), started_at=0.0, phase="step", step=412)
    made.data_seconds, made.compute_seconds = 0.01, 0.11
    made.process = _Running()  # type: ignore[assignment]
    return made


def test_the_status_is_emitted_as_it_is_agreed() -> None:
    wanted = golden("status.json")
    no_room = wanted["checkpointsFailing"]["shared"]["message"]
    progress = Progress(
        committed_step=412,
        committed_at=AT,
        loss=2.125,
        throughput=1536.0,
        step_seconds=0.16,
        gradient_norm=1.25,
        bad_samples=3,
        out_of_memory=2,
        non_finite=Counter(skippedSteps=10, learningRateChanges=1, rollBacks=1, skippedSamples=80, spikes=2),
        checkpoints={"shared": {"step": 400, "generation": 2, "attempt": 1, "time": AT}},
        tallies=CheckpointCounters(
            written={"shared": Written(commits=4, nbytes=8388608, seconds=1.25)},
            failures={"local": Counter({"Full": 2, "IO": 1}), "shared": Counter({"Full": 2})},
            failing={"shared": Failing(since=AT, commits=2, cause="Full", message=no_room)},
            restores=Counter(survivor=2, shared=1),
            fallbacks=1,
        ),
        claims={AttemptId(2, 1): Claim.from_json(golden("claim.json"))},
        quarantined=wanted["quarantined"],
        slow_ranks=wanted["slowRanks"],
    )
    diverged = next(message for message in golden("agent_socket.json")["rank"] if message["type"] == "diverged")
    progress.count_divergence(1, {**diverged, "step": 400}, AT)
    emitted = status(
        identity=Identity(pod_uid="uid-w0", pod="gpt-w0", node="node-1", gpus=tuple(wanted["gpus"])),
        state=state(),
        ranks=[rank()],
        progress=progress,
        control_port=29401,
        store_port=29400,
        notices=wanted["notices"],
        ending=None,
        accounting=wanted["accounting"],
        warm_processes=wanted["warmProcesses"],
        uploads=wanted["uploads"],
        refused_peers=wanted["refusedPeers"],
    )
    assert emitted == wanted


def test_the_accounting_is_emitted_as_it_is_agreed() -> None:
    wanted = golden("status.json")["accounting"]
    moments = iter(range(10_000))
    accounts = GoodputAccounts(lambda: float(next(moments)))
    assert accounts.to_json() is None
    accounts.hello(31, 0)
    accounts.account(31, next(m for m in golden("agent_socket.json")["rank"] if m["type"] == "account"))
    accounts.stepped(31, 412)
    accounts.failed("Infrastructure", 412)
    accounts.hello(31, 0)
    accounts.restored(400)
    accounts.stepped(31, 401)
    emitted = accounts.to_json()
    assert emitted is not None
    assert emitted.keys() == wanted.keys()
    assert emitted["seconds"].keys() == wanted["seconds"].keys()
    assert emitted["activities"] == wanted["activities"]
    assert emitted["recoveries"][0].keys() == wanted["recoveries"][0].keys()
    assert (emitted["lostSteps"], emitted["failures"]) == (wanted["lostSteps"], wanted["failures"])


def test_the_termination_log_is_emitted_as_it_is_agreed() -> None:
    wanted = golden("termination.json")
    ending = Ending(
        code=1,
        cause="Application",
        reason="Exception",
        message="ValueError: loss is negative",
        traceback=tuple(wanted["traceback"]),
        final=True,
    )
    assert ending.to_json() == wanted


def test_the_membership_is_read() -> None:
    known = membership()
    assert (known.generation, known.revision, known.active) == (2, 7, AttemptId(1, 3))
    assert [member.pod_uid for member in known.members] == ["uid-w0", "uid-w1", "uid-w3"]
    assert known.rules.min_replicas == 2
    (rule,) = known.rules.restart.rules
    assert (rule.name, rule.action, rule.cause, rule.exit_codes) == ("bug", "FailJob", Cause.APPLICATION, {2})
    assert known.rules.restart.elsewhere
    assert known.gone == {"uid-w2"}


def test_the_rules_of_retention_are_read() -> None:
    said = golden("membership.json")["settings"]["checkpoint"]["retention"]
    assert Rules.parse(said) == Rules(every=10000, best=(Best(metric="val_loss", count=3),))


def test_hang_detection_settings_are_read() -> None:
    found = HangSettings.from_settings(golden("membership.json")["settings"])
    assert found == HangSettings(step=120.0, startup=300.0)


def test_unknown_fields_are_ignored_and_unknown_versions_refused() -> None:
    document = golden("membership.json")
    Membership.from_json(document | {"added": "later"})
    with pytest.raises(VersionError, match=r"membership\.json has version 2"):
        Membership.from_json(document | {"version": 2})
    with pytest.raises(DocumentError, match="generation"):
        Membership.from_json({key: value for key, value in document.items() if key != "generation"})


def test_the_touch_file_is_read_and_acknowledged(tmp_path: Path) -> None:
    touch = TouchFile(tmp_path)
    (tmp_path / "emergency_checkpoint").write_text((GOLDEN / "emergency_checkpoint.json").read_text())
    request = touch.take()
    assert request is not None
    assert request.drain
    assert request.source == "AWS"
    ack = golden("emergency_checkpoint.ack.json")
    touch.acknowledge(request_id=request.id, step=413, tier="shared", result="Committed", seconds=0.41)
    assert json.loads((tmp_path / "emergency_checkpoint.ack").read_text()) == ack


def test_a_place_in_a_world_is_said_as_it_is_agreed() -> None:
    said = world_message(
        RankPlace(local_rank=0, local_world_size=1, group_rank=0, group_world_size=3),
        replace(world(), attempt_id=AttemptId(2, 2)),
        Master(host="10.244.0.7", port=40123),
        membership(),
        Path("/var/run/holdfast/errors/2.2/rank-0.json"),
    )
    assert said == next(body for body in golden("agent_socket.json")["launcher"] if body["type"] == "world")


def test_a_wish_is_said_as_it_is_agreed() -> None:
    said = {body["type"]: body for body in golden("agent_socket.json")["launcher"]}
    attempt_id = AttemptId(2, 1)
    quiesce = Wish(type="quiesce", attempt_id=attempt_id, id="grow-2.1", reason="a worker joins", commit=False)
    assert quiesce.to_json() == said["quiesce"]
    assert (
        Wish(type="checkpoint", attempt_id=attempt_id, id="touch-1", reason="touch-file").to_json()
        == said["checkpoint"]
    )


@pytest.fixture
def heard_ranks(tmp_path: Path) -> HeardRanks:
    """The rank 0 of the golden world."""
    return HeardRanks(world(), [replace(rank(), attempt_id=None)], tmp_path)


def of_a_rank(kind: str) -> Any:
    return next(body for body in golden("agent_socket.json")["rank"] if body["type"] == kind)


def test_messages_of_the_guards_are_counted(heard_ranks: HeardRanks) -> None:
    for kind in ("skipped", "spike", "rolledBack", "badSamples", "outOfMemory"):
        heard_ranks.hear(of_a_rank(kind))
    progress = heard_ranks.progress
    assert progress.non_finite == {
        "skippedSteps": 1,
        "learningRateChanges": 0,
        "rollBacks": 1,
        "skippedSamples": 80,
        "spikes": 1,
    }
    assert (progress.bad_samples, progress.out_of_memory) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "cause", "reason"),
    [("rolledBack", Cause.NON_FINITE, "RolledBack"), ("outOfMemory", Cause.OOM, "OutOfMemoryRetried")],
)
def test_message_of_a_repeated_step_begins_an_incident(
    heard_ranks: HeardRanks, kind: str, cause: Cause, reason: str
) -> None:
    heard_ranks.hear(of_a_rank(kind))
    (failed,) = [event for event in heard_ranks.events if isinstance(event, RankFailed)]
    assert (failed.failure.cause, failed.failure.reason) == (cause, reason)
    assert failed.failure.message == of_a_rank(kind)["message"]


def test_slow_ranks_are_shown_as_it_is_agreed(heard_ranks: HeardRanks) -> None:
    heard_ranks.hear(of_a_rank("slowRanks"))
    assert heard_ranks.progress.slow_ranks == golden("status.json")["slowRanks"]


def test_every_message_of_a_rank_is_understood(tmp_path: Path) -> None:
    import asyncio

    async def play() -> list[RankMessage]:
        heard: list[RankMessage] = []
        server = AgentSocket(tmp_path / "agent.sock", heard.append)
        await server.start()
        _, writer = await asyncio.open_unix_connection(tmp_path / "agent.sock")
        for body in golden("agent_socket.json")["rank"]:
            writer.write(json.dumps(body).encode() + b"\n")
        async with asyncio.timeout(240):
            while not heard or heard[-1].type != "done":
                await asyncio.sleep(0.01)
        await server.close()
        writer.close()
        return heard

    heard = asyncio.run(play())
    assert [message.type for message in heard] == [body["type"] for body in golden("agent_socket.json")["rank"]]
    assert {(message.connection.slot, message.connection.rank) for message in heard} == {(3, 0)}
