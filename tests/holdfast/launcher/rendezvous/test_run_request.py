"""The settings of a run, and the generations that its roster publishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.attempt import AttemptId, Claim
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.quorum import missing_generation
from holdfast.launcher.options import RunOptions
from holdfast.launcher.rendezvous.roster import GONE_SECONDS, Joined, Record, Roster, RunRequest


def joined(uid: str) -> Joined:
    return Joined.of(uid=uid, name=uid, host="127.0.0.1", control=1, store=2, node="n")


def roster(low: int, high: int) -> Roster:
    return Roster(terms=RunRequest(options=RunOptions(nodes=(low, high)), run_id="run"), publication="x")


def test_only_a_launcher_that_was_asked_for_the_same_may_join() -> None:
    here = RunRequest(options=RunOptions(nodes=(2, 4), processes=2), run_id="run-1")
    assert here.shared_options() == {"--nproc-per-node": "2", "--nnodes": "2:4"}
    assert here.refusal(here.shared_options()) is None
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
        said = here.refusal(there.shared_options())
        assert said is not None
        assert said.startswith(option)
        assert "set the same on every host" in said
    assert here.refusal(replace(here, run_id="run-2").shared_options()) is None, "a name that nobody gave"


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        ("Auto", {"mode": "Enabled"}),
        ("90", {"mode": "Enabled", "stepTimeoutSeconds": 90}),
        ("Off", {"mode": "Disabled"}),
    ],
)
def test_hang_timeout_becomes_hang_detection_settings(timeout: str, expected: dict[str, Any]) -> None:
    found = RunRequest(options=RunOptions(hang_timeout=timeout), run_id="run").settings()["hangDetection"]
    assert found == {**expected, "startupTimeoutSeconds": 1200.0}


def test_a_roster_waits_for_all_then_for_the_last_call() -> None:
    partial = roster(1, 2).joined(joined("a"), 0.0)
    assert partial.publish(1.0).published == ()
    assert len(partial.publish(31.0).published) == 1
    full = partial.joined(joined("b"), 2.0).publish(2.0)
    assert [member.uid for member in full.published[0].members] == ["a", "b"]


def test_shrink_by_the_launchers_is_not_published_others_are() -> None:
    three = roster(1, 3).joined(joined("a"), 0).joined(joined("b"), 0).joined(joined("c"), 0).publish(0)
    two = three.left("c", 5.0).publish(5.0)
    assert len(two.published) == 1
    one = two.left("b", 6.0).publish(6.0)
    assert [member.uid for member in one.published[1].members] == ["a"]
    assert one.gone(7.0) == []
    assert one.gone(7.0 + GONE_SECONDS) == ["b", "c"]


def test_previous_generations_start_with_the_one_that_started() -> None:
    grown = roster(1, 2).joined(joined("a"), 0).publish(40.0).joined(joined("b"), 41.0).publish(41.0)
    document = grown.document(Record(started=AttemptId(1, 4)), now=41.0, revision=3)
    assert document["generation"] == 2
    assert [old["generation"] for old in document["previous"]] == [1]
    later = grown.document(Record(started=AttemptId(2, 1), acknowledged=(AttemptId(1, 4),)), now=41.0, revision=4)
    assert later["previous"] == []
    assert later["acknowledged"] == [{"generation": 1, "attempt": 4}]


def test_generation_starts_above_the_claims_of_another_run() -> None:
    claim = Claim(attempt_id=AttemptId(4, 2), job_uid="older", publication="p", from_step=7)
    alone = roster(1, 1).joined(joined("a"), 0).publish(0).found([claim]).publish(1.0)
    document = alone.document(Record(started=AttemptId(1, 1)), now=1.0, revision=2)
    assert document["generation"] == 5
    assert document["claims"] == [claim.to_json()]
    assert [(old["generation"], old["members"]) for old in document["previous"]] == [(1, ["a"]), (2, [])]
    assert document["previous"][1]["through"] == 4
    read = Membership.from_json(document)
    assert missing_generation(read, AttemptId(1, 1)) is None
    assert alone.publish(2.0) == alone
