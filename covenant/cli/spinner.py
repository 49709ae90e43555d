"""Show on a terminal that a verb still works: one line that counts the seconds and is erased at the end.

Seven verbs take long and show it, each around a part that prints and asks nothing: `run` (with `dev`), `intent`,
`attest`, `audit verify`, `doctor`, `bench` and `layer`. rich draws the line. The drawing thread imports it after a
second, so that a quick verb does not pay for the import (80 ms).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

from sandbox import progress

AFTER_SECONDS = 1.0
EVERY_SECONDS: Final = 0.25
_FRAMES: Final = "|/-\\"
# INVARIANT: the drawing thread imports and draws under this lock, and a fork waits for it. A forked process that
# continues in Python (a run's keeper) must not inherit a lock of an import or of rich from a thread that it does not
# have.
DRAWING = threading.Lock()
os.register_at_fork(before=DRAWING.acquire, after_in_parent=DRAWING.release, after_in_child=DRAWING.release)


@contextlib.contextmanager
def shown(what: str, *, quiet: bool = False, fd: int = 2) -> Iterator[None]:
    """Show the innermost step of this process during the block, or ``what`` without one.

    Shows nothing if ``quiet``, without a terminal, on a dumb one, and in a forked process.
    """
    if quiet or not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    # Not an Event: the thread could hold its lock at a fork.
    over, end = os.pipe2(os.O_CLOEXEC)
    owner = os.getpid()
    drawing = threading.Thread(target=_draw, args=(fd, over), name="spinner", daemon=True)
    try:
        with progress.step(what):
            # Without a free thread the work continues without a spinner.
            with contextlib.suppress(RuntimeError):
                drawing.start()
            yield
    finally:
        os.close(end)
        if owner == os.getpid() and drawing.ident is not None:
            drawing.join()
        os.close(over)


def _draw(fd: int, over: int) -> None:
    # Signals are handled by the main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if select.select((over,), (), (), AFTER_SECONDS)[0]:
        return
    terminal = _Terminal(fd)
    with DRAWING:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        class Steady(Console):
            """A console that does not hide the cursor: a killed process could not show it again."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        console = Steady(file=terminal, force_terminal=True)
        # Only the spinner goes through rich: it would wrap and colour this process's stdout and stderr.
        live = Live(
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.start()
    for frame in itertools.cycle(_FRAMES):
        step = progress.current()
        if step is not None:
            line = f"{frame} {step.what} ({time.monotonic() - step.began:.0f} s)"
            with DRAWING:
                console.width = terminal.columns()
                # A Text is not parsed as markup.
                live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if select.select((over,), (), (), EVERY_SECONDS)[0]:
            break
    with DRAWING:
        live.stop()


class _Terminal(io.StringIO):
    """A terminal that never blocks: it may be hung up, be held (Ctrl-S), or belong to another job (`&`)."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def write(self, text: str) -> int:
        """Write only the text that the terminal accepts now, and drop the rest."""
        with contextlib.suppress(OSError):
            if select.select((), (self._fd,), (), 0)[1] and not self._is_anothers():
                os.write(self._fd, text.encode())
        return len(text)

    def columns(self) -> int:
        """Return the terminal's present width."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._fd).columns or 80
        return 80

    def _is_anothers(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) != os.getpgrp()
        except OSError:  # not the controlling terminal of this process, so it has no jobs
            return False
