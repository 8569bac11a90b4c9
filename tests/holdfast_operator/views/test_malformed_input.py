"""Whatever a launcher reports, and whatever stands in a status of another version: reading it never fails."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_operator.api.status import Status, operator_state
from holdfast_operator.views import parse_report

GOLDEN = Path(__file__).parents[2] / "contract"
JUNK = [None, 0, -1, 2**70, 1.5, "x", "", [], ["x"], {}, {"x": "y"}, True, [None], [[1]], {"generation": "x"}]
NOON = "2026-01-31T12:00:00.000000Z"
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": NOON, "reason": "x", "message": "y"}],
    "incidentCount": 1,
    "membership": json.loads((GOLDEN / "membership.json").read_text()),
    "incidentsByCause": [{"cause": "OOM", "times": [NOON], "total": 1}],
    "incidents": [{"number": 1, "generation": 1, "attempt": 1, "cause": "OOM", "detectedTime": NOON}],
    "progress": {"step": 1},
    "goodput": {"ratio": 0.9, "productiveSeconds": 9, "lostSeconds": {"startup": 1}, "time": NOON},
    "lastCheckpoint": {"step": 1, "generation": 1, "attempt": 1, "time": NOON},
    "divergences": {"count": 2, "last": {"rank": 1, "node": "n", "step": 4, "tensor": "t", "time": NOON}},
    "avoidedNodes": [{"node": "n", "expirationTime": NOON}],
}
STATE: dict[str, Any] = {
    "incarnations": 2,
    "gang": {"attempts": 1, "waitStartTime": NOON},
    "workers": [{"incarnation": 1, "pair": {"generation": 1, "attempt": 1}, "avoid": ["a"], "booked": [5, 1]}],
    "trouble": {"reason": "x", "message": "y", "since": NOON},
    "divergedNodes": [{"node": "n", "times": [NOON]}],
    "countedBatch": 3,
}


def damaged(node: Any, dice: random.Random) -> Any:
    """The same with some values replaced by others of any kind."""
    if dice.random() < 0.07:
        return dice.choice(JUNK)
    if isinstance(node, dict):
        return {key: damaged(value, dice) for key, value in node.items()}
    if isinstance(node, list):
        return [damaged(value, dice) for value in node]
    return node


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_a_report_of_rubbish_is_read_as_far_as_it_goes(dice: random.Random) -> None:
    golden = json.loads((GOLDEN / "report.json").read_text())
    body = {**{key: damaged(value, dice) for key, value in golden.items()}, "version": 1, "pod": {"uid": "u"}}
    if isinstance(body["launcher"], dict):
        body["launcher"]["version"] = 1
    report = parse_report(body, datetime.now(UTC))
    assert report is not None
    assert report.pod_uid == "u"


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_a_status_of_rubbish_is_read_as_far_as_it_goes(dice: random.Random) -> None:
    state = operator_state.encode({key: damaged(value, dice) for key, value in STATE.items()})
    status = Status.from_json(
        {**{key: damaged(value, dice) for key, value in STATUS.items()}, "operatorState": damaged(state, dice)}
    )
    assert Status.from_json(status.to_json()) == status


def test_a_whole_status_loses_nothing() -> None:
    written = Status.from_json({**STATUS, "operatorState": operator_state.encode(STATE)}).to_json()
    assert Status.from_json(written).to_json() == written
    assert written["membership"]["members"] == STATUS["membership"]["members"]
    assert operator_state.decode(written)["countedBatch"] == 3
    assert operator_state.decode(written)["gang"] == STATE["gang"]


def test_gpu_errors_are_bounded_in_number_and_in_words() -> None:
    error = json.loads((GOLDEN / "report.json").read_text())["gpu"][0]
    many = [{**error, "gpu": "g" * 10_000, "cause": "Magic", "message": "m" * 100_000, "xid": -1}] * 10_000
    body = {"version": 1, "pod": {"uid": "u"}, "launcher": None, "gpu": [{"kind": "Xid"}, *many]}
    report = parse_report(body, datetime.now(UTC))
    assert report is not None
    assert len(report.gpu_errors) == 63  # of the first 64, the one that names no GPU is not heard
    first = report.gpu_errors[0]
    assert (len(first.gpu), len(first.message), first.cause, first.xid) == (64, 1024, None, None)


def test_lists_of_a_report_are_bounded() -> None:
    """The most important entries are kept."""
    body = json.loads((GOLDEN / "report.json").read_text())
    attempt_ids = [{"generation": 1, "attempt": number} for number in reversed(range(15_000))]
    launcher = body["launcher"]
    launcher |= {"incidents": attempt_ids, "foreignClaims": attempt_ids, "lostMembers": [{"podUID": "u"}] * 15_000}
    launcher["quarantined"] = [{"path": f"step-{number}"} for number in range(15_000)]
    launcher["world"]["members"] = ["u"] * 15_000
    launcher["notices"] = body["notices"] = [{"id": str(number)} for number in range(15_000)]
    report = parse_report(body, datetime.now(UTC))
    assert report is not None
    # A launcher drops incidents that are acknowledged: those above these come with its next reports.
    assert [told.attempt_id.attempt for told in report.incidents] == list(range(32))
    assert [claim.attempt_id.attempt for claim in report.foreign_claims] == list(range(15_000 - 64, 15_000))
    assert (len(report.quarantined), len(report.lost_members)) == (20, 1024)
    assert report.world is not None
    assert len(report.world.members) == 1024
    assert [notice.id for notice in report.notices] == [str(number) for number in range(15_000 - 32, 15_000)]


def test_numbers_that_no_status_can_hold_are_not_heard() -> None:
    body = json.loads((GOLDEN / "report.json").read_text())
    huge = {"generation": 2**53 + 1, "attempt": 1}
    launcher = body["launcher"]
    assert launcher["incidents"]
    claim = {**huge, "jobUID": "j", "publication": "p", "fromStep": 1, "fromPair": None}
    launcher |= {"accepted": huge, "started": huge, "highestClaim": claim, "foreignClaims": [claim]}
    launcher["world"] = {**(launcher["world"] or {"members": []}), **huge}
    launcher["incidents"] = [{**incident, **huge} for incident in launcher["incidents"]]
    launcher["checkpoints"] = {tier: {**entry, **huge} for tier, entry in launcher["checkpoints"].items() if entry}
    report = parse_report(body, datetime.now(UTC))
    assert report is not None
    assert report.has_launcher
    assert (report.accepted, report.started, report.world, report.highest_claim) == (None, None, None, None)
    assert (report.foreign_claims, report.incidents, report.checkpoints) == ((), (), ())
