"""How long to wait after failures."""

from collections.abc import Callable


def backoff(failures: int, *, first: float, longest: float, jitter: Callable[[float, float], float]) -> float:
    """A pause that doubles with each failure in a row, jittered so that many sidecars do not come back together."""
    full = min(longest, first * 2 ** min(max(failures - 1, 0), 30))
    return jitter(full / 2, full)
