"""Ends the attempt if the checkpoint folder has claims that the membership does not list."""

from __future__ import annotations

from holdfast.core.attempt import Claim
from holdfast.launcher.membership.attempt_end.incidents import close_attempt
from holdfast.launcher.membership.transition import Transition

FOREIGN = "the checkpoint folder has claims of a generation that the membership does not list"


def stop_for(turn: Transition, claims: tuple[Claim, ...]) -> None:
    """Record unknown claims, and end the attempt: no attempt may train alongside them."""
    foreign = _unknown(turn, (*turn.state.foreign, *claims))
    turn.set(foreign=foreign)
    if foreign and turn.attempt is not None:
        close_attempt(turn, FOREIGN)


def _unknown(turn: Transition, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    membership = turn.membership
    if membership is None:
        return tuple(sorted(set(claims)))
    known = frozenset(membership.claims)
    return tuple(sorted({c for c in claims if c not in known and c.attempt_id.generation >= membership.generation}))
