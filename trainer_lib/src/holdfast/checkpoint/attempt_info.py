"""An attempt to train: its identity, and what is known of the attempts before it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from holdfast.checkpoint.ranks.exchange import Exchange, lead
from holdfast.checkpoint.stores.base import SharedStore
from holdfast.core.attempt import AttemptId, Claim

# The owner of everything that a script creates when no operator started it.
BY_HAND: Final = "by-hand"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The attempt that saves checkpoints.

    `known` has the claims that the membership names. `durable` is the step of the newest checkpoint that the volume
    is known to have had.
    """

    attempt_id: AttemptId
    job_uid: str
    publication: str
    run_id: str
    known: tuple[Claim, ...] = ()
    durable: int = 0


def attempt_by_hand(shared: SharedStore | None, exchange: Exchange, run_id: str = "") -> Attempt:
    """Return the next attempt of a script that no operator started.

    Its generation follows the highest in the shared store.
    """

    def choose() -> dict[str, str | int]:
        highest = 0 if shared is None else shared.highest_generation()
        return {"generation": highest + 1, "publication": uuid4().hex}

    chosen = lead(exchange, choose)
    known: tuple[Claim, ...] = ()
    if shared is not None:
        listed = lead(exchange, lambda: [claim.to_json() for claim in shared.claims()])
        known = tuple(map(Claim.from_json, listed))
    return Attempt(
        attempt_id=AttemptId(int(chosen["generation"]), 1),
        job_uid=BY_HAND,
        publication=str(chosen["publication"]),
        run_id=run_id or BY_HAND,
        known=known,
    )
