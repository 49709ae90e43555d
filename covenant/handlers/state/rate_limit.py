"""Limit the rate of a peer's requests that cost no credits.

Such requests still write rows: an echo, a tool, a listing under a grant. No row is left out of the log, so the number
of requests is limited. Each identity has a token bucket for all its connections, and a caller with an empty bucket is
told when to retry. That refusal is counted with the others (``covenant.handlers.state.refusal_summary``). Requests that
cost credits or write no row take no token, and the operator takes none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.state.refusal_summary import RefusalSummary
    from covenant.settings import PeerRate

# These write no row when allowed (tests/unit/covenant/handlers/state/test_rate_limit.py) or, for intents, are admitted
# once their cost is known. All other requests take a token.
FREE: Final = frozenset(
    {"ping", "protocol_info", "authenticate", "submit_intent", "resume_intent", "get_intent_result"}
    | {"list_agents", "list_tools", "recent_audit", "recent_debits", "recent_denials", "list_approvals"}
)
# The number of buckets above which full ones are dropped.
MOST_IDLE: Final = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Rates:
    """The buckets by public key. One per daemon; ``clock`` gives monotonic seconds."""

    def __init__(self, rate: PeerRate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, caller: Caller, refused: RefusalSummary, now_ms: int) -> None:
        """Take a token of the caller.

        Raises:
            errors.BusyError: the caller has no token left. ``refused`` counts the refusal at ``now_ms``.
        """
        if caller.operator:
            return
        bucket = self._filled(caller.agent.pubkey)
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return
        error = errors.BusyError(
            f"more than {self._rate.requests_per_second} requests a second of yours cost nothing",
            hint=f"ask again in {math.ceil((1 - bucket.tokens) / self._rate.requests_per_second)} s; "
            "COVENANT_PEER_REQUESTS_PER_SECOND and _BURST say how many may be",
        )
        refused.suppress(caller, now_ms, error.code, error.message)
        raise error

    def _filled(self, pubkey: str) -> _Bucket:
        now, most = self._clock(), float(self._rate.burst)
        bucket = self._buckets.get(pubkey)
        if bucket is None:
            if len(self._buckets) >= MOST_IDLE:
                self._forget(now)
            bucket = self._buckets[pubkey] = _Bucket(most, now)
        bucket.tokens = self._at(bucket, now)
        bucket.at = now
        return bucket

    def _at(self, bucket: _Bucket, now: float) -> float:
        return min(float(self._rate.burst), bucket.tokens + (now - bucket.at) * self._rate.requests_per_second)

    def _forget(self, now: float) -> None:
        """Drop full buckets: a new one is equal."""
        full = [key for key, one in self._buckets.items() if self._at(one, now) >= self._rate.burst]
        for key in full:
            del self._buckets[key]
