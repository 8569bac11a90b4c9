"""Parts of several messages."""

from __future__ import annotations

CERTAIN = (
    "If you are certain that the machine is off, delete its Node object or taint it with"
    " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
)


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it belongs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
