"""Rules (b) and (c) as a table, and the wire format of the launchers' messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import DocumentError, VersionError
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import messages as m
from holdfast.launcher.membership.document import Member, Membership, Previous, Rules
from holdfast.launcher.membership.held_shards import HeldShards, joined
from holdfast.launcher.membership.quorum import largest_world, may_be
from holdfast.launcher.ranks.rank_process import Rank
from holdfast.launcher.ranks.rank_socket import RankMessage

GOLDEN = json.loads((Path(__file__).parents[3] / "contract" / "membership.json").read_text())


def members(uids: str) -> tuple[Member, ...]:
    return tuple(Member(index=index, pod_uid=uid) for index, uid in enumerate(uids))


def membership(generation: int, uids: str, *previous: tuple[int, str], **more: object) -> Membership:
    return Membership(  # type: ignore[arg-type]
        revision=1,
        generation=generation,
        publication="p",
        members=members(uids),
        previous=tuple(Previous(generation=n, publication="", members=frozenset(old)) for n, old in previous),
        **more,
    )


@pytest.mark.parametrize(
    ("uids", "world", "rules", "reason"),
    [
        ("abc", "ab", Rules(), ""),
        ("abcd", "ab", Rules(), "2 of 4 workers are not a majority of generation 1"),
        ("ab", "a", Rules(), "1 of 2 workers are not a majority of generation 1"),
        ("a", "a", Rules(), ""),
        ("abc", "ab", Rules(may_shrink=False), "c missing, and the job may not shrink"),
        ("abc", "abc", Rules(may_shrink=False), ""),
        ("abc", "ab", Rules(min_replicas=3), "2 workers are fewer than minReplicas 3"),
        ("abcd", "abc", Rules(replica_step=2), "3 workers are not a multiple of replicaStep 2"),
        ("abc", "abd", Rules(), "d not in generation 1"),
    ],
)
def test_a_world_is_a_majority_of_the_right_size(uids: str, world: str, rules: Rules, reason: str) -> None:
    verdict = may_be(membership(1, uids, rules=rules), frozenset(world), None)
    assert (verdict.ok, verdict.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("previous", "active", "started", "gone", "fence"),
    [
        ([(1, "abc")], None, None, "", ""),
        ([(1, "cde")], None, None, "", "cde"),
        ([(1, "cde")], None, None, "cd", ""),
        ([(1, "acd")], None, None, "", "cd"),
        ([(1, "ac")], None, None, "", ""),
        ([(1, "cde"), (2, "abc")], AttemptId(2, 1), None, "", ""),
        ([(1, "cde"), (2, "abc")], None, AttemptId(2, 1), "", ""),
        ([(1, "abc"), (2, "cde")], AttemptId(1, 1), None, "", "cde"),
        ([(1, "")], None, None, "", ""),
    ],
)
def test_no_majority_of_an_earlier_generation_is_left_behind(
    previous: list[tuple[int, str]], active: AttemptId | None, started: AttemptId | None, gone: str, fence: str
) -> None:
    document = membership(len(previous) + 1, "abx", *previous, active=active, gone=frozenset(gone))
    verdict = may_be(document, frozenset("abx"), started)
    assert verdict.ok is not bool(fence)
    assert verdict.fence == frozenset(fence)


def test_a_gap_in_the_earlier_generations_holds() -> None:
    verdict = may_be(membership(4, "ab", (1, "ab"), (3, "ab")), frozenset("ab"), None)
    assert verdict.reason == "the membership does not list generation 2, which may still hold a world"


def test_the_largest_world_takes_the_lowest_indexes_in_steps() -> None:
    assert "".join(x.pod_uid for x in largest_world(Rules(replica_step=2), members("abcde"))) == "abcd"


def test_the_golden_membership_is_read() -> None:
    document = Membership.from_json(GOLDEN)
    assert (document.generation, document.active, document.gone) == (2, AttemptId(1, 3), frozenset({"uid-w2"}))
    assert document.rules.may_shrink
    assert document.rules.budgets[0].max_restarts == 3
    assert [member.pod for member in document.members] == ["gpt-w0", "gpt-w1", "gpt-w3"]
    assert "jobKey" not in document.document


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 2}, VersionError, "membership.json has version 2"),
        ({"members": [{}]}, DocumentError, "membership.json cannot be read"),
        ({"settings": {}}, DocumentError, "membership.json cannot be read"),
        ({"restarts": None}, DocumentError, "membership.json cannot be read"),
        ({"restarts": []}, DocumentError, "membership.json cannot be read"),
        ({"claims": ["x"]}, DocumentError, "membership.json cannot be read"),
    ],
)
def test_a_membership_that_cannot_be_read_says_why(
    change: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Membership.from_json({**GOLDEN, **change})


WORLD = m.World(attempt_id=AttemptId(2, 1), publication="p2", members=members("ab"), coordinator="a")
FAILURE = m.Failure(
    cause=Cause.OOM, reason="OOM", message="…", priority=m.Priority.OOM, at=1.5, rank=1, traceback=("x",), step=4
)
INCIDENT = m.Incident(attempt_id=AttemptId(1, 3), failure=FAILURE, action=m.Remedy.SHRINK, detected=1.5)
CLAIM = Claim(
    attempt_id=AttemptId(9, 1), job_uid="old", publication="x", from_step=3, from_attempt_id=AttemptId(8, 1)
)


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(),
        m.Hello(
            generation=2,
            revision=7,
            publication="p2",
            accepted=AttemptId(2, 1),
            started=AttemptId(1, 3),
            world=WORLD,
            left=AttemptId(1, 3),
            ready=True,
            draining=True,
            stays=True,
            notice=m.Notice(node="n1", id="spot-1", reason="terminate", until=2.5),
            done=True,
            failed=AttemptId(1, 3),
            failure=FAILURE,
            foreign=(CLAIM,),
        ),
        m.ShareMembership(membership=Membership.from_json(GOLDEN)),
        m.Propose(world=WORLD, started=AttemptId(1, 3), incident=INCIDENT),
        m.Accept(world=WORLD),
        m.Refuse(attempt_id=AttemptId(2, 1), reason="no", highest=AttemptId(2, 2)),
        m.Start(world=WORLD, master=m.Master(host="10.0.0.1", port=4000)),
        m.Confirm(attempt_id=AttemptId(2, 1)),
        m.Confirmed(attempt_id=AttemptId(2, 1)),
        m.Complete(attempt_id=AttemptId(2, 1)),
        m.GiveUp(incident=INCIDENT, message="spent"),
        m.Hang(attempt_id=AttemptId(2, 1), message="rank 2 has been busy"),
        m.Leaving(code=75),
    ],
    ids=lambda message: message.type,
)
def test_every_message_survives_the_wire(message: m.Message) -> None:
    wire = json.loads(json.dumps(m.to_json(message)))
    assert m.from_json({**wire, "later": "ignored"}) == message


@pytest.mark.parametrize(
    "wire",
    [{"type": "sing"}, {"type": "accept", "world": {}}, {"type": "hello", "foreign": ["x"]}, {"type": "confirm"}],
)
def test_a_message_that_cannot_be_read_is_refused(wire: dict[str, object]) -> None:
    with pytest.raises(DocumentError):
        m.from_json(wire)


def held(*shards: str, attempt: int = 1, count: int = 3) -> dict[str, HeldShards]:
    """Return the shards of a, b, c…, one digit per shard."""
    said = zip("abcdefghi", shards, strict=False)
    return {
        uid: HeldShards(attempt_id=AttemptId(1, attempt), count=count, shards=frozenset(map(int, numbers)))
        for uid, numbers in said
        if numbers
    }


@pytest.mark.parametrize(
    ("step", "shards", "world"),
    [
        (3, ["0", "1", "0", "1", "0", "1", "2"], "abcdeg"),
        (3, ["0", "0", "1", "2"], "acd"),
        (3, ["", "0", "1", "2"], "bcd"),
        (3, ["0", "1", "0", "1"], "abc"),
        (3, ["0", "1", "2", "0", "1"], "abc"),
        (3, ["0", "1", "0", "1", "2"], "abe"),
        (2, ["0", "1", "12"], "ac"),
        (5, ["0", "1", "2"], ""),
    ],
)
def test_the_largest_world_keeps_the_last_holder_of_a_shard(step: int, shards: list[str], world: str) -> None:
    chosen = largest_world(Rules(replica_step=step), members("abcdefghi"[: len(shards)]), held(*shards))
    assert "".join(x.pod_uid for x in chosen) == world


def test_a_shard_of_an_older_state_counts_for_nothing() -> None:
    said = held("2", "0", "1", "2", "1", attempt=2) | {"a": held("2")["a"]}
    assert "".join(x.pod_uid for x in largest_world(Rules(replica_step=4), members("abcde"), said)) == "abcd"
    assert "".join(x.pod_uid for x in largest_world(Rules(replica_step=3), members("abcd"), said)) == "bcd"


@given(
    shards=st.lists(st.sets(st.integers(0, 3), max_size=2), max_size=9),
    step=st.integers(1, 5),
    count=st.integers(1, 4),
)
def test_sharded_world_is_as_large_and_keeps_all_shards(shards: list[set[int]], step: int, count: int) -> None:
    """The world never holds fewer shards than the world that ignores them."""
    rules, everyone = Rules(replica_step=step), members("abcdefghi"[: len(shards)])
    said = held(*("".join(str(x) for x in some if x < count) for some in shards), count=count)
    plain, chosen = largest_world(rules, everyone), largest_world(rules, everyone, said)
    assert plain == everyone[: len(everyone) - len(everyone) % step]
    assert largest_world(rules, everyone, {}) == plain, "of a model that is not sharded nothing changes"
    assert len(chosen) == len(plain)
    assert list(chosen) == sorted(chosen)

    def there(world: tuple[Member, ...]) -> set[int]:
        return {x for member in world if member.pod_uid in said for x in said[member.pod_uid].shards}

    assert chosen == plain or there(chosen) == set(range(count))


def test_what_a_launcher_holds_is_told_and_read() -> None:
    hello = m.Hello(held=HeldShards(attempt_id=AttemptId(1, 2), count=4, shards=frozenset({3, 1})))
    said = json.loads(json.dumps(m.to_json(hello)))
    assert said["held"] == {"pair": {"generation": 1, "attempt": 2}, "count": 4, "shards": [1, 3]}
    assert m.from_json(said) == hello
    older = {name: value for name, value in said.items() if name != "held"}
    assert m.from_json(older) == m.Hello()


def test_launcher_holds_the_shards_its_ranks_have_of_the_newest() -> None:
    parts = [held("0")["a"], *held("1", "2", attempt=2).values()]
    assert joined(parts) == HeldShards(attempt_id=AttemptId(1, 2), count=3, shards=frozenset({1, 2}))
    assert joined([]) is None


def test_rank_holds_the_shard_it_reports_with_its_state() -> None:
    rank = Rank(slot=0, local_rank=0, started_at=0.0, attempt_id=AttemptId(1, 2))
    connection: Any = None
    for shard, wanted in (({"index": 1, "count": 4}, frozenset({1})), (None, None)):
        body = {"step": 3} if shard is None else {"step": 3, "shard": shard}
        rank.handle(RankMessage(connection=connection, attempt_id=AttemptId(1, 2), type="restored", body=body))
        expected = None if wanted is None else HeldShards(attempt_id=AttemptId(1, 2), count=4, shards=wanted)
        assert rank.held == expected
