"""The content of the touch-file, and the join of two requests. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError, MalformedError
from holdfast_sidecar.protocol.document import Document, parse_document, parse_time


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The new content of the touch-file, and the reason."""

    request: Document
    reason: str


def merge(existing: bytes, new: Document) -> Merge:
    """Join a new request with one that the launcher has not consumed yet.

    One checkpoint answers both, so they become one request. It drains if either does, by the earlier deadline. It has
    the ID of the one that drains, else of the existing one; `supersedes` lists the other ID.
    """
    if not existing.strip():
        return Merge(request=new, reason="a request made by hand has no content to keep")
    try:
        old = parse_document(existing, c.TOUCH_FILE)
    except ContractError as error:
        return Merge(request=new, reason=f"what was there cannot be read ({error})")
    if old.get("id") == new["id"]:
        return Merge(request=old, reason="the same request is there")
    keeps_old = old.get("drain") is True or not new["drain"]
    kept, other = (old, new) if keeps_old else (new, old)
    deadlines = [text for request in (old, new) if (text := _deadline(request)) is not None]
    request = {
        **kept,
        "drain": old.get("drain") is True or new["drain"],
        "deadline": min(deadlines, key=parse_time),
        "supersedes": [
            *request_ids(kept.get("supersedes")),
            *request_ids(other.get("supersedes")),
            *request_ids([other.get("id")]),
        ],
    }
    return Merge(request=request, reason=f"joined with {other.get('id')!r}")


def _deadline(request: Mapping[str, Any]) -> str | None:
    text = request.get("deadline")
    try:
        parse_time(text if isinstance(text, str) else "")
    except MalformedError:
        return None
    return str(text)


def request_ids(values: object) -> list[str]:
    """Return the IDs in an untrusted value."""
    return [name for name in values if isinstance(name, str)] if isinstance(values, list) else []
