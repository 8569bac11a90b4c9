"""Recovers the state of an earlier launcher in this pod from the status file that it left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from holdfast.core.attempt import AttemptId, check_version
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.host.run_dir import STATUS_FILE, read_json
from holdfast.launcher.membership.messages import Failure, Incident, Priority, Remedy
from holdfast.launcher.membership.state import State
from holdfast.launcher.status.status_document import Identity

_log = logging.getLogger("holdfast.launcher.memory")


def remembered(run_dir: Path, identity: Identity) -> State:
    """Return the initial state: promises of the earlier launcher persist, and its unexplained end is an incident."""
    fresh = State(me=identity.pod_uid)
    path = run_dir / STATUS_FILE
    if not path.exists():
        return fresh
    try:
        before = read_json(path)
        check_version(before, STATUS_FILE)
        if before.get("podUID") != identity.pod_uid:
            return fresh
        incident = _unexplained(before, identity, path.stat().st_mtime)
        started = AttemptId.from_optional(before.get("started"))
        return State(
            me=identity.pod_uid,
            accepted=AttemptId.from_optional(before.get("accepted")),
            started=started,
            trained=started,
            incidents=() if incident is None else (incident,),
        )
    except (DocumentError, OSError) as error:
        _log.warning("the status of an earlier launcher is not used: %s", error)
        return fresh


def _unexplained(before: dict[str, Any], identity: Identity, last_sign: float) -> Incident | None:
    """Return the incident of an attempt whose end the earlier launcher could not report, or None."""
    world = before.get("world")
    if world is None or before.get("exit") is not None:
        return None
    step = before.get("committedStep")
    failure = Failure(
        cause=Cause.INFRASTRUCTURE,
        reason="LauncherEnded",
        message=f"the launcher of {identity.pod} ended without a report",
        priority=Priority.MEMBER_LOST,
        at=last_sign,
        pod=identity.pod,
        node=identity.node,
        step=step if isinstance(step, int) else None,
    )
    return Incident(attempt_id=AttemptId.from_json(world), failure=failure, action=Remedy.WAIT, detected=last_sign)
