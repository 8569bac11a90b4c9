"""Checks whether the object store is usable with this pod's credentials.

Run as `python -m holdfast.launcher.host.object_store_probe URL NAME`. The last line of its output is the result, also
for errors.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

from holdfast.checkpoint.stores.objects.errors import OF_THE_JOB
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.stores.open import open_store
from holdfast.core.errors import HoldfastError, UnavailableError, UsageError
from holdfast.launcher.host.preflight import Check, Result

# The caller repeats the trial, so an unavailable store should be reported early.
_ATTEMPTS: Final = 3


def rehearse(url: str, name: str) -> Check:
    """List, write, read back and delete an object."""
    try:
        store = open_store(url, attempts=_ATTEMPTS)
        if not isinstance(store, ObjectStore):
            return Check(result=Result.SKIPPED, message=f"{store.url} is a folder, not an object store")
        lacks = store.rehearse(name)
    except HoldfastError as error:
        text = str(error).removesuffix("; nothing was concluded")
        return Check(result=Result.FAILED, message=text, concerns_job=concerns_job(error))
    text = "; ".join([f"{store.url} can list, write, read and delete objects", *lacks])
    return Check(result=Result.PASSED, message=text)


def concerns_job(error: HoldfastError) -> bool:
    """Whether another node would fail too: the job's settings are wrong, or the store refused the request.

    Missing credentials may be the node's fault: they may come from the node's role.
    """
    if isinstance(error, UsageError):
        return True
    answered = hasattr(error.__cause__, "response") or isinstance(error.__cause__, PermissionError)
    return isinstance(error, UnavailableError) and error.cause in OF_THE_JOB and answered


def main() -> int:
    """Print the result as one line of JSON."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    check = rehearse(sys.argv[1], sys.argv[2])
    print(json.dumps({"result": check.result, "message": check.message, "ofTheJob": check.concerns_job}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
