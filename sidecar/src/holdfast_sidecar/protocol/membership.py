"""The membership document. The sidecar stores it unchanged and reads its revision only."""

from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.protocol.document import parse_document


def membership_revision(data: bytes) -> int:
    """Return the revision of a membership document.

    Raises `ContractError` if the launcher could not use the document.
    """
    document = parse_document(data, "membership")
    revision = document.get("revision")
    if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
        raise MalformedError(f"membership has revision {revision!r}")
    if not isinstance(document.get("generation"), int) or not isinstance(document.get("members"), list):
        raise MalformedError("membership has no generation or no members")
    return revision
