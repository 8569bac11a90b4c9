"""Limits of messages between processes, of settings, and of the waits between tries."""

from __future__ import annotations

from typing import Final

# Checkpoints in a chain of deltas. If one of them is lost, all later ones are lost.
MOST_FULL_EVERY: Final = 100
# The difference between a restored weight and the saved one. Larger values are typing errors, such as 1e4 for 1e-4.
LARGEST_THRESHOLD: Final = 1.0
# Concurrent writes, parts or connections of any tier. Each needs a thread, and up to 16 MiB of memory.
MOST_IN_FLIGHT: Final = 64
# The length of a line from a rank or another launcher.
MAX_LINE_BYTES: Final = 1 << 20
# The characters of a script's text (an exception's message, a line of a traceback). A line can hold many such texts.
MAX_TEXT: Final = 2000


def backoff(tries: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after `tries` earlier waits.

    Each wait is twice the previous one, up to `longest`.
    """
    return min(longest, first * 2.0 ** min(tries, 30))
