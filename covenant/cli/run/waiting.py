"""Ask for a run again while another one writes the same path, or a command uses its volume (``--wait``, ADR 0079)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from covenant.cli import common
from policy import errors

Answer = TypeVar("Answer")

# Refusals that end by themselves.
_CODES: Final = frozenset({errors.PathInUseError.code, errors.VolumeBusyError.code})
_FIRST_SECONDS: Final = 0.2
# Each refusal is a row of the audit log.
_LONGEST_SECONDS: Final = 5.0


def until_free(
    seconds: float,
    ask: Callable[[], Answer],
    *,
    quiet: bool = False,
    again: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Call ``ask`` until it is not refused for a path in use, for at most so many seconds.

    The first refusal is shown on stderr unless ``quiet``. ``again`` says whether it can still be asked again.

    Raises:
        errors.CovenantError: as ``ask``; the last refusal when the time is over.
    """
    until, pause, shown = clock() + seconds, _FIRST_SECONDS, quiet
    while True:
        try:
            return ask()
        except errors.CovenantError as e:
            left = until - clock()
            # Not `left <= 0`: NaN is no time to wait.
            if e.code not in _CODES or not left > 0 or not again():
                raise
            if not shown:
                common.say(f"waiting: {common.visible(e.message)}", err=True)
                shown = True
        sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_SECONDS)
