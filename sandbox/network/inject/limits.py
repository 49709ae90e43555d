"""The bound on requests with a secret: each is a row of the log, and a question to the vault."""

from __future__ import annotations

import time
from typing import Final

from sandbox.network.inject.judge import RequestRefusedError
from sandbox.rate_limit import Tokens

PER_SECOND: Final = 50
BURST: Final = 400


class RequestRate:
    """Counts the requests of one run."""

    def __init__(self) -> None:
        self._tokens = Tokens(PER_SECOND, BURST, time.monotonic())

    def take(self) -> None:
        """Take one request.

        Raises:
            RequestRefusedError: there are more than the bound.
        """
        if not self._tokens.take(time.monotonic()):
            raise RequestRefusedError(429, "limit", f"more than {PER_SECOND} requests a second with a secret")
