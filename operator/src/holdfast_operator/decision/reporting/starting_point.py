"""Where training began: at step 0, or from a checkpoint that an earlier job left in the folder.

The first claim of a job tells: it is written before the first step, with the step and the attempt it goes on from.
The same is said once more after each suspension.
"""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json
from holdfast_operator.api.status import StartingPoint
from holdfast_operator.decision.draft import PlanDraft


def apply(draft: PlanDraft) -> PlanDraft:
    """Say it as soon as the first claim is known."""
    known = draft.status.origin
    if known.pair is not None:
        return draft
    first = _first_claim(draft, known.after)
    if first is None:
        return draft
    pair, claim = first
    step = int(claim.get("fromStep") or 0)
    resumes = parse_pair(claim.get("fromPair")) is not None
    message = _resumes(known, step) if resumes else _starts(draft, known)
    origin = StartingPoint(after=known.after, pair=pair, step=step, message=message)
    return draft.with_status(origin=origin).with_event(
        "ResumesFromCheckpoint" if resumes else "StartsFromNothing", message
    )


def _first_claim(draft: PlanDraft, after: int) -> tuple[AttemptId, Json] | None:
    own = [claim for claim in draft.status.membership.claims if claim.get("jobUID") == draft.seen.job.uid]
    pairs = [(pair, claim) for claim in own if (pair := parse_pair(claim)) is not None and pair.generation > after]
    return min(pairs, key=lambda found: found[0], default=None)


def _resumes(known: StartingPoint, step: int) -> str:
    told = f"training goes on from the checkpoint of step {step}"
    return told if known.after else f"{told} that was in the job's folder (checkpoint.resume: Always)"


def _starts(draft: PlanDraft, known: StartingPoint) -> str:
    if known.after or draft.spec.checkpoint.resume == c.RESUME_ALWAYS:
        return "training starts at step 0: there was no checkpoint to go on from"
    return (
        "training starts at step 0 (checkpoint.resume: Never); checkpoints of earlier jobs stay in the job's folder "
        "and are neither read nor deleted"
    )
