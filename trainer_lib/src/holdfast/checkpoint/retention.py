"""Which commits may be deleted. Pure.

Invariant: what is deleted is older than the newest `keep_last` verified commits that can still be read, is not
needed by the attempt, and belongs to no attempt above its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.checkpoint.fencing import Commit, order
from holdfast.worlds import Claim, Pair


def expired(
    commits: Iterable[Commit],
    claims: Iterable[Claim],
    *,
    job_uid: str,
    own: Pair,
    verified: Collection[tuple[int, Pair]],
    keep_last: int,
) -> list[Commit]:
    """Commits to delete, the oldest first. `verified` are those that this attempt wrote or read back whole."""
    commits = tuple(commits)
    lineage = order(commits, claims, job_uid=job_uid)
    good = [commit for commit in lineage if (commit.step, commit.pair) in verified]
    if len(good) < keep_last or keep_last < 1:
        return []
    oldest = good[keep_last - 1]
    readable = {(commit.step, commit.pair) for commit in lineage}

    def may_go(commit: Commit) -> bool:
        fenced = (commit.step, commit.pair) not in readable
        return commit.pair <= own and (fenced or commit.step < oldest.step)

    return sorted(filter(may_go, commits), key=lambda commit: (commit.step, commit.pair))
