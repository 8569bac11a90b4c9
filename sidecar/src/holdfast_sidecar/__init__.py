"""Holdfast's sidecar: one small process next to each launcher.

It reports the launcher's state to the operator, stores the membership that the operator publishes, and turns a
cloud's interruption notice into a request for a checkpoint. It makes no decisions about membership.
"""

__version__ = "0.1.0"
