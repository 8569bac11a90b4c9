"""Whose token is it: TokenReview for the operator's own audience, remembered for a minute.

Tokens are kept as hashes only and are never logged.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_operator.constants import TOKEN_AUDIENCE
from holdfast_operator.errors import AuthenticationUnavailableError
from holdfast_operator.webhook import PodIdentity

POD_UID_KEY = "authentication.kubernetes.io/pod-uid"
POD_NAME_KEY = "authentication.kubernetes.io/pod-name"
_SERVICE_ACCOUNT = "system:serviceaccount:"
_REVIEW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    identity: PodIdentity | None
    until: float


class TokenReviews:
    """Maps a bearer token to its pod. Verdicts are kept for at most a minute, refusals for seconds."""

    def __init__(
        self,
        review: Callable[[str], PodIdentity | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        keep_seconds: float = 60.0,
        keep_refusal_seconds: float = 5.0,
        entries: int = 20_000,
    ) -> None:
        self._review = review
        self._clock = clock
        self._keep = keep_seconds
        self._keep_refusal = keep_refusal_seconds
        self._entries = entries
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    def __call__(self, token: str) -> PodIdentity | None:
        """The pod, None if the token is not valid; raises ``AuthenticationUnavailableError``."""
        key, now = _key(token), self._clock()
        known = self._known(key, now)
        if known is not None:
            return known.identity
        identity = self._review(token)
        keep = self._keep if identity is not None else self._keep_refusal
        with self._lock:
            # From before the call: the verdict is as old as the question.
            self._verdicts[key] = _Verdict(identity=identity, until=now + keep)
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > self._entries:
                self._verdicts.popitem(last=False)
        return identity

    def recall(self, token: str) -> PodIdentity | None:
        """The pod of a token that was reviewed lately; never blocks. None says nothing of the token."""
        known = self._known(_key(token), self._clock())
        return known.identity if known is not None else None

    def _known(self, key: bytes, now: float) -> _Verdict | None:
        with self._lock:
            known = self._verdicts.get(key)
        return known if known is not None and now < known.until else None


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def reviewer(api: client.AuthenticationV1Api) -> Callable[[str], PodIdentity | None]:
    """A ``review`` function that asks the API server."""

    def review(token: str) -> PodIdentity | None:
        question = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token, audiences=[TOKEN_AUDIENCE]))
        try:
            answer = api.create_token_review(question, _request_timeout=_REVIEW_SECONDS)
        except (ApiException, HTTPError) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            raise AuthenticationUnavailableError(f"TokenReview failed: {reason}") from None
        status = answer.status
        if status is None:
            return None
        return identity_of(
            authenticated=bool(status.authenticated),
            audiences=status.audiences or (),
            username=(status.user.username if status.user else None) or "",
            extra=(status.user.extra if status.user else None) or {},
        )

    return review


def identity_of(
    *, authenticated: bool, audiences: Sequence[str], username: str, extra: Mapping[str, Any]
) -> PodIdentity | None:
    """The pod that a TokenReview's answer names: only a token bound to one pod, for our audience, counts."""
    uids: list[str] = list(extra.get(POD_UID_KEY) or ())
    names: list[str] = list(extra.get(POD_NAME_KEY) or ())
    if not authenticated or TOKEN_AUDIENCE not in audiences or not username.startswith(_SERVICE_ACCOUNT):
        return None
    if len(uids) != 1 or len(names) != 1:
        return None
    namespace = username.removeprefix(_SERVICE_ACCOUNT).split(":")[0]
    return PodIdentity(namespace=namespace, pod=names[0], pod_uid=uids[0])
