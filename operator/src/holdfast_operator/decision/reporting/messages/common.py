"""Parts of several messages."""

from __future__ import annotations

CERTAIN = (
    "If you are certain that the machine is off, delete its Node object or taint it with"
    " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if necessary."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
