"""What the status always says, and what it leaves out."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import Cause, FailureReason
from holdfast_operator.api.status.incidents import Incident
from holdfast_operator.api.status.membership import EarlierGeneration

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)
BARE = Incident(
    number=0,
    attempt_id=AttemptId(generation=1, attempt=1),
    cause=Cause.INFRASTRUCTURE,
    action="",
    reason=FailureReason.UNKNOWN,
    message="",
    pod=None,
    rank=None,
    node=None,
    detected=NOON,
)


def test_an_incident_always_has_what_people_read() -> None:
    """The values are those that a broken entry is read with: they are written all the same."""
    assert BARE.to_json() == {
        "number": 0,
        "generation": 1,
        "attempt": 1,
        "cause": "Infrastructure",
        "action": "",
        "reason": "Unknown",
        "message": "",
        "detectedTime": "2026-11-28T12:00:00.000000Z",
    }
    assert Incident.from_json(BARE.to_json()) == BARE


def test_a_skipped_generation_has_no_members_and_no_publication() -> None:
    skipped = EarlierGeneration(generation=3, publication="", members=())
    assert skipped.to_json() == {"generation": 3, "publication": "", "members": []}
    assert EarlierGeneration.from_json(skipped.to_json()) == skipped
