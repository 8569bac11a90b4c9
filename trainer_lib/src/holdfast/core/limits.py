"""Bounds on what one side may send the other, on what a user may set, and on waits between tries."""

from __future__ import annotations

from typing import Final

# Commits that may stand on each other: what one of them lacks, all above it lack.
MOST_FULL_EVERY: Final = 100
# By how much a restored weight may differ from the saved one. More is a slip of the pen, such as 1e4 for 1e-4.
LARGEST_THRESHOLD: Final = 1.0
# Writes, parts or connections at once, of any tier. Each takes a thread, and up to 16 MiB of memory.
MOST_IN_FLIGHT: Final = 64
# A line that a rank or another launcher may send.
MAX_LINE_BYTES: Final = 1 << 20
# A text of a script (an exception's message, a line of a traceback) in characters: a message with many fits a line.
MAX_TEXT: Final = 2000


def backoff(tries: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `tries` earlier waits: each is twice the one before, up to a bound."""
    return min(longest, first * 2.0 ** min(tries, 30))
