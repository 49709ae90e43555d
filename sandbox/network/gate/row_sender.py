"""A gate's end of the line to its supervisor: each message is one row, and a row that cannot be sent at once waits.

An agent could otherwise ask while the supervisor is busy, and not be counted.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from typing import Any


class RowSender:
    """Sends rows in their order over ``line``, a socket that does not block. The gate ends with its supervisor."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._waiting: deque[bytes] = deque()

    def send(self, row: dict[str, Any]) -> None:
        """Send a row, now or once there is room."""
        self._waiting.append(json.dumps(row, separators=(",", ":")).encode())
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            try:
                self._line.send(self._waiting[0])
            except BlockingIOError:
                loop.add_writer(self._line.fileno(), self._flush)
                return
            except OSError as e:
                raise SystemExit("the supervisor is gone") from e
            self._waiting.popleft()
        loop.remove_writer(self._line.fileno())
