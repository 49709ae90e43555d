"""The answers of the main loop to connections that it refuses: constant frames, which cost no thought and no memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from policy import errors
from sandbox import config, unix_wire
from sandbox.serve import overdue

# A hung process keeps the package that it has read, up to 256 MiB, and SIGKILL frees none of it.
MOST_HUNG: Final = 4


def _frame(error: errors.CovenantError) -> bytes:
    return unix_wire.encode(error.to_json())


BUSY: Final = _frame(errors.BusyError("too many requests of this user", hint="let some end, then ask again"))
HUNG: Final = _frame(
    errors.HangingError(f"{MOST_HUNG} processes of this user wait for a file system", hint=overdue.HINT)
)
ENDING: Final = _frame(errors.ServiceError("the supervisor is ending", hint="ask again"))
SLOW: Final = _frame(errors.RequestError("the request is refused: it did not come in time"))


@functools.cache
def not_a_caller(state: Path) -> bytes:
    """Return the frame for a user who is not in ``callers`` of the supervisor with this state."""
    hint = f"have root add your uid to callers in {config.file_of(state)}"
    return _frame(errors.CallerError("this user may not ask the supervisor", hint=hint))
