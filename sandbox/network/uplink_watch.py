"""Keep a live run's way out whole while the operator changes the host's network.

A VPN makes its interface anew, `nft flush ruleset` deletes the table of all runs, `sysctl --system` switches forwarding
off. The next start would make these parts again (``uplink``). A live run does the same within a second or two, with the
rights that it keeps for its end anyway.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

from policy import errors
from sandbox.network import uplink


class UplinkWatch:
    """Looks at the shared parts of the uplink for one run, and mends them in a thread: nft(8) may take its time.

    Every call comes from a thread in the supervisor's network namespace.

    Args:
        device: the operator's interface.
        own: the run's device on the host.
        binary: nft(8).

    Raises:
        errors.KernelError: Raised when the kernel does not answer.
    """

    def __init__(self, device: str, own: str, binary: Path) -> None:
        self._device, self._own, self._binary = device, own, binary
        self._thread: threading.Thread | None = None
        self._known = uplink.held_table()

    def look(self) -> None:
        """Begin to mend the parts if one is missing. A failed attempt is repeated by the next call."""
        if self._thread is not None and self._thread.is_alive():
            return
        # A kernel without memory says nothing about the parts; the next call asks again.
        with contextlib.suppress(errors.CovenantError, OSError, RuntimeError):
            if (found := uplink.whole(self._device, self._own, self._known)) is not None:
                self._known = found
            else:
                thread = threading.Thread(target=self._mend, name="uplink")
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Wait for an attempt under way."""
        if self._thread is not None:
            self._thread.join()

    def _mend(self) -> None:
        # Signals are the main thread's, as in netns.aside.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(errors.CovenantError, OSError):
            uplink.mend(self._device, self._own, self._known, self._binary)
