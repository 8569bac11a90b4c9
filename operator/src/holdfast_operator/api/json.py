"""JSON that others wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """JSON whose every value the API server keeps as it is; raises ``ValueError`` for what is none.

    NaN and infinities are null. Half a surrogate pair would be kept as another letter, differ from what is wanted at
    each pass, and so be written for ever.
    """
    try:
        found = json.loads(raw, parse_constant=lambda _name: None)
        if _SURROGATE.search(raw) is None:
            return found
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
