"""How fast a peer may have things done that cost nothing.

What is let through and costs no credits has its rows all the same: an echo, a tool, a listing under a grant. None of
them is left out of the log; so how many of them there may be is bounded: each identity has a bucket of tokens, however
many connections it has, and whoever finds it empty is told when to ask again. That refusal is counted with the others
(``covenant.handlers.state.refusal_summary``). What is paid for with credits takes none, what leaves no row takes none,
and the operator takes none.
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
    from covenant.handlers.state.refusal_summary import Floods
    from covenant.settings import PeerRate

# Leave no row where they are let through (tests/unit/covenant/handlers/state/test_rate_limit.py), or, intents, are
# admitted where it is known what they cost. What is not named here takes a token.
FREE: Final = frozenset(
    {"ping", "protocol_info", "authenticate", "submit_intent", "resume_intent", "get_intent_result"}
    | {"list_agents", "list_tools", "recent_audit", "recent_debits", "recent_denials", "list_approvals"}
)
# So many buckets are kept before those that are full again are let go of.
_MOST_IDLE: Final = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Rates:
    """The buckets by public key. One per daemon; ``clock`` gives seconds that never go back."""

    def __init__(self, rate: PeerRate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, caller: Caller, refused: Floods, now_ms: int) -> None:
        """Take a token of the caller's.

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
        refused.count(caller, now_ms, error.code, error.message)
        raise error

    def _filled(self, pubkey: str) -> _Bucket:
        now, most = self._clock(), float(self._rate.burst)
        bucket = self._buckets.get(pubkey)
        if bucket is None:
            if len(self._buckets) >= _MOST_IDLE:
                self._forget(now)
            bucket = self._buckets[pubkey] = _Bucket(most, now)
        bucket.tokens = self._at(bucket, now)
        bucket.at = now
        return bucket

    def _at(self, bucket: _Bucket, now: float) -> float:
        return min(float(self._rate.burst), bucket.tokens + (now - bucket.at) * self._rate.requests_per_second)

    def _forget(self, now: float) -> None:
        """Let go of those that are full: a new one is no other."""
        full = [key for key, one in self._buckets.items() if self._at(one, now) >= self._rate.burst]
        for key in full:
            del self._buckets[key]
