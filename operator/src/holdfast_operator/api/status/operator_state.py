"""State that only the operator reads, as one string of the status: `status.operatorState`."""

from __future__ import annotations

import json
from typing import Any

from holdfast_operator.api.json import EMPTY, Json, loads

VERSION = 1


def encode(state: Json) -> str:
    """Return the state as compact JSON with its version; parts without a value are left out."""
    kept = {key: value for key, value in state.items() if value or value == 0}
    return json.dumps({"version": VERSION, **kept}, separators=(",", ":"))


def decode(status: Json) -> Json:
    """Return the state in a job's status.

    The result is empty if the string is absent, is not JSON, or has another version. The operator then takes the
    workers from the pods that exist, and keeps the values of the other fields.
    """
    text: Any = status.get("operatorState")
    if not isinstance(text, str):
        return EMPTY
    try:
        state = loads(text.encode(errors="replace"))
    except ValueError:
        return EMPTY
    return state if isinstance(state, dict) and state.get("version") == VERSION else EMPTY
