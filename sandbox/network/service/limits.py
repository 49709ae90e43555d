"""The limits of a run's requests to its services: requests in a minute, tokens in an hour, credits in all.

At most one request overruns a limit. A request that may cross it waits for the others that are under way, so that no
two cross it together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from sandbox.network.gate import credit_meter
from sandbox.network.service.shapes import RefusedError

MINUTE: Final = 60.0
# Also where the manifest sets no limit: each request is a row of the log.
MOST_REQUESTS: Final = 6000
HOUR: Final = 3600.0


class ModelLimits:
    """Counts the requests of one run."""

    def __init__(self, requests: int | None, tokens: int | None, *, clock: Callable[[], float]) -> None:
        self._requests = min(requests or MOST_REQUESTS, MOST_REQUESTS)
        self._tokens, self._clock = tokens, clock
        self._begun: deque[float] = deque()
        self._used: deque[tuple[float, int]] = deque()
        self._sum = self._reserved = 0
        self._changed = asyncio.Condition()

    async def begin(self, most: int | None) -> int:
        """Wait for a request's turn; ``most`` tokens are its bound, None for none. Returns what it has reserved.

        Raises:
            RefusedError: a limit is reached.
        """
        now = self._clock()
        while self._begun and self._begun[0] <= now - MINUTE:
            self._begun.popleft()
        if len(self._begun) >= self._requests:
            wait = self._begun[0] + MINUTE - now
            raise _over(f"requests_per_minute is {self._requests}", wait)
        self._begun.append(now)
        if self._tokens is None:
            return 0
        wanted = self._tokens if most is None else most
        async with self._changed:
            while True:
                self._forget()
                if self._sum >= self._tokens:
                    raise _over(f"tokens_per_hour is {self._tokens}", self._used[0][0] + HOUR - self._clock())
                if not self._reserved or self._sum + self._reserved + wanted <= self._tokens:
                    self._reserved += wanted
                    return wanted
                await self._changed.wait()

    async def end(self, reserved: int, used: int) -> None:
        """Count the tokens of a request that has ended."""
        if self._tokens is None:
            return
        async with self._changed:
            self._reserved -= reserved
            self._sum += used
            self._used.append((self._clock(), used))
            self._changed.notify_all()

    def _forget(self) -> None:
        while self._used and self._used[0][0] <= self._clock() - HOUR:
            self._sum -= self._used.popleft()[1]


def price(inward: int, outward: int, input_price: int, output_price: int) -> int:
    """Return the credits for tokens in and out, rounded up; prices are for a million."""
    return -(-(inward * input_price + outward * output_price) // 1_000_000)


class CreditLimit:
    """The credits that a run and its children may spend; None for no limit. ``meter`` counts those of all of them.

    One request of each run at most goes beyond the limit, as with tokens.
    """

    def __init__(self, credits_: int | None, meter: int | None = None) -> None:
        self._limit, self._meter = credits_, meter
        self._own = self._reserved = 0
        self._changed = asyncio.Condition()

    async def begin(self, most: int | None) -> int:
        """Wait for the turn of a request that costs at most so much, None for no bound. Returns what it has reserved.

        Raises:
            RefusedError: Raised when the credits are spent.
        """
        if self._limit is None or most == 0:
            return 0
        wanted = self._limit if most is None else most
        async with self._changed:
            while True:
                spent = self._spent()
                if spent >= self._limit:
                    message = f"the budget of this run is spent: {spent} of {self._limit} credits"
                    raise RefusedError(429, "limit", message)
                if not self._reserved or spent + self._reserved + wanted <= self._limit:
                    self._reserved += wanted
                    return wanted
                await self._changed.wait()

    async def end(self, reserved: int, spent: int) -> None:
        """Count the price of a request that has ended."""
        if self._limit is None:
            return
        async with self._changed:
            self._reserved -= reserved
            if self._meter is None:
                self._own += spent
            else:
                credit_meter.add(self._meter, spent)
            self._changed.notify_all()

    def _spent(self) -> int:
        return self._own if self._meter is None else credit_meter.spent(self._meter)


def _over(what: str, wait: float) -> RefusedError:
    seconds = max(1, int(wait) + 1)
    return RefusedError(429, "limit", f"{what}: ask again in {seconds} s", retry_seconds=seconds)
