"""The seeds of each rank's random generators, for each step. Pure.

Before a step, a rank seeds its generators with a hash of its seeds and of the number of completed steps. The numbers
of a step do not depend on the process that draws them, so a rank that replaces a lost one draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.hashing import mix_all
from holdfast.core.json_fields import JsonFields


@dataclass(frozen=True, kw_only=True)
class Seeds(JsonFields):
    """Seeds of one rank's generators. Ranks that seeded a generator alike have the same seed of it."""

    python: int
    numpy: int
    cpu: int
    cuda: int

    def mixed(self, number: int) -> Seeds:
        return Seeds(
            python=mix_all(self.python, number),
            numpy=mix_all(self.numpy, number),
            cpu=mix_all(self.cpu, number),
            cuda=mix_all(self.cuda, number),
        )


@dataclass(frozen=True, kw_only=True)
class Streams(JsonFields):
    """The seeds of all ranks of the world that started the job. Every rank has them all."""

    ranks: tuple[Seeds, ...]

    def at(self, step: int, rank: int) -> Seeds:
        """Return the seeds of a rank for the step after `step`."""
        return self._of(rank).mixed(step)

    def _of(self, rank: int) -> Seeds:
        """Return the seeds of a rank.

        A rank above those that started the job shares a seed that all of them share.
        """
        if rank < len(self.ranks):
            return self.ranks[rank]
        return Seeds(
            python=_further([known.python for known in self.ranks], rank),
            numpy=_further([known.numpy for known in self.ranks], rank),
            cpu=_further([known.cpu for known in self.ranks], rank),
            cuda=_further([known.cuda for known in self.ranks], rank),
        )


def _further(known: Sequence[int], rank: int) -> int:
    return known[0] if len(known) > 1 and len(set(known)) == 1 else mix_all(known[0], rank)
