"""The key by which the launchers of one job authenticate each other.

It is derived and never stored: HMAC-SHA256 of the job's UID under the operator's key. The operator creates its key
once and keeps it in a Secret of its namespace, so that a restart changes no job's key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from holdfast_operator.cluster.secrets import SecretStore, ensure
from holdfast_operator.errors import RotationError

KEY_SECRET = "holdfast-key"  # noqa: S105 - a name
KEY_FIELD = "key"
KEY_BYTES = 32


def ensure_operator_key(store: SecretStore) -> bytes:
    """Return the operator's key, which is created at the first start."""
    found = ensure(store, KEY_SECRET, lambda: {KEY_FIELD: secrets.token_bytes(KEY_BYTES)})
    key = found.data.get(KEY_FIELD, b"")
    if len(key) < KEY_BYTES:
        raise RotationError(
            f"Secret {KEY_SECRET} has no usable {KEY_FIELD}: restore it, or delete the Secret while no job runs"
        )
    return key


def job_key(operator_key: bytes, job_uid: str) -> str:
    return hmac.new(operator_key, job_uid.encode(), hashlib.sha256).hexdigest()
