"""Maps tokens to pods by TokenReview for the operator's own audience, with a cache.

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

from holdfast_operator.api.names import TOKEN_AUDIENCE
from holdfast_operator.cluster.agent_hub import PodIdentity
from holdfast_operator.errors import AuthenticationUnavailableError

POD_UID_KEY = "authentication.kubernetes.io/pod-uid"
POD_NAME_KEY = "authentication.kubernetes.io/pod-name"
_SERVICE_ACCOUNT = "system:serviceaccount:"
_REVIEW_SECONDS = 5.0
_RENEW, _KEEP, _KEEP_REFUSAL = 45.0, 120.0, 5.0  # seconds


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    identity: PodIdentity | None
    renew: float
    until: float


class TokenReviews:
    """Maps a bearer token to its pod.

    A result is renewed after 45 s and is valid for two minutes at most. A refusal is kept for seconds, in a separate
    table, so that it evicts no result.
    """

    def __init__(
        self,
        review: Callable[[str], PodIdentity | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        entries: int = 20_000,
        refusals: int = 2_000,
    ) -> None:
        self._review = review
        self._clock = clock
        self._lock = threading.Lock()
        self._verdicts = _Table(entries)
        self._refusals = _Table(refusals)

    def __call__(self, token: str) -> PodIdentity | None:
        """Return the pod, or None if the token is not valid. Raises ``AuthenticationUnavailableError``."""
        key, now = _key(token), self._clock()
        known = self._known(key)
        if known is not None and now < known.renew:
            return known.identity
        identity = self._review(token)
        with self._lock:
            # The time before the call: the result may be as old as the request.
            if identity is not None:
                self._verdicts.put(key, _Verdict(identity=identity, renew=now + _RENEW, until=now + _KEEP))
            else:
                until = now + _KEEP_REFUSAL
                self._verdicts.pop(key, None)
                self._refusals.put(key, _Verdict(identity=None, renew=until, until=until))
        return identity

    def recall(self, token: str) -> PodIdentity | None:
        """Return the pod of a token that was reviewed recently. Never blocks. None means unknown."""
        known = self._known(_key(token))
        return known.identity if known is not None and self._clock() < known.until else None

    def due(self, token: str) -> bool:
        """Return whether the review must be repeated. Never blocks."""
        known = self._known(_key(token))
        return known is None or self._clock() >= known.renew

    def _known(self, key: bytes) -> _Verdict | None:
        with self._lock:
            return self._verdicts.get(key) or self._refusals.get(key)


class _Table(OrderedDict[bytes, _Verdict]):
    """A bounded table; the oldest entry is evicted."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: bytes, verdict: _Verdict) -> None:
        self[key] = verdict
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def reviewer(api: client.AuthenticationV1Api) -> Callable[[str], PodIdentity | None]:
    """Return a ``review`` function that uses the API server."""

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
    """Return the pod in the result of a TokenReview. The token must be bound to one pod and to our audience."""
    uids: list[str] = list(extra.get(POD_UID_KEY) or ())
    names: list[str] = list(extra.get(POD_NAME_KEY) or ())
    if not authenticated or TOKEN_AUDIENCE not in audiences or not username.startswith(_SERVICE_ACCOUNT):
        return None
    if len(uids) != 1 or len(names) != 1:
        return None
    namespace = username.removeprefix(_SERVICE_ACCOUNT).split(":")[0]
    return PodIdentity(namespace=namespace, pod=names[0], pod_uid=uids[0])
