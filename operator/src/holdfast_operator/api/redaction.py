"""Removes probable secrets from text that containers wrote.

Such text appears in logs, statuses and events, which more users may read than the pods' own logs. Pure; the time is
linear in the length of the text.
"""

from __future__ import annotations

import re

_HIDDEN = "[hidden]"
_NAMES = "token|secret|password|passwd|api[_-]?key|authorization|credential|x-amz-signature"
# Values after a telling name, with their scheme, and the user in a URL.
_NAMED = re.compile(
    rf"(?<![\w-])((?=[\w-]*?(?:{_NAMES}))[\w-]+[\"']?\s*[=:]\s*)(?:[\"']?(?:bearer|basic|token)\s+)?\S+",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(://)[^/\s@]+(?=@)")
# Bearer tokens, JWTs, AWS's key IDs, private keys (a log's tail may start inside one), and 256-bit hex without a
# prefix, such as job keys. An image digest has a prefix and stays.
_BARE = re.compile(
    r"(?i:\bbearer)\s+[\w.~+/=-]+"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\A[\w+/=\s]*-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?<![0-9a-f:])[0-9a-f]{64}(?![0-9a-f])",
    re.DOTALL,
)


def hide_secrets(text: str) -> str:
    """Return the text with probable secrets replaced."""
    text = _BARE.sub(_HIDDEN, text)
    return _URL_USER.sub(rf"\1{_HIDDEN}", _NAMED.sub(rf"\1{_HIDDEN}", text))
