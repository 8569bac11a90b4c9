"""The text of conditions and events. No code reads it back: causes and reasons are enums (``api.reasons``).

Each function is one message: what happened, why, what to do. ``messages.golden`` in the tests lists all of them.
Details, such as what is wrong with a field or a pod, come from where they are read.
"""

from holdfast_operator.decision.reporting.messages import (
    capacity,
    checkpoints,
    job,
    membership,
    nodes,
    preflight,
    recovery,
    startup,
    workers,
)

__all__ = ["capacity", "checkpoints", "job", "membership", "nodes", "preflight", "recovery", "startup", "workers"]
