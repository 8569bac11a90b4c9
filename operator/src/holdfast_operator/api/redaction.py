"""What looks like a secret in text that containers wrote.

It comes into logs, statuses and events, which more people may read than the pods' own logs. Pure; time grows with the
length of the text and not faster.
"""

from __future__ import annotations

import re

_HIDDEN = "[hidden]"
_NAMES = "token|secret|password|passwd|api[_-]?key|authorization|credential|x-amz-signature"
# What a name announces, its scheme with it; a user in a URL.
_NAMED = re.compile(
    rf"(?<![\w-])((?=[\w-]*?(?:{_NAMES}))[\w-]+[\"']?\s*[=:]\s*)(?:[\"']?(?:bearer|basic|token)\s+)?\S+",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(://)[^/\s@]+(?=@)")
# Bearer tokens and JWTs, AWS's key ids, private keys (a log's tail may begin within one), and bare 256-bit hex (job
# keys; an image digest has its prefix and stays).
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
    """The text with what looks like a secret replaced."""
    text = _BARE.sub(_HIDDEN, text)
    return _URL_USER.sub(rf"\1{_HIDDEN}", _NAMED.sub(rf"\1{_HIDDEN}", text))
