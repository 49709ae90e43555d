"""Exhausted resources of the machine, told apart from faults of this program by the kernel's errno."""

from __future__ import annotations

import errno

from policy.errors.base import CovenantError
from policy.errors.machine import MachineError

__all__ = ["DescriptorsExhaustedError", "DiskFullError", "ExhaustedError", "MemoryExhaustedError", "exhausted"]


class ExhaustedError(MachineError):
    """Something of this machine is used up. What was acknowledged before is kept, and nothing of the run is left."""


class DiskFullError(ExhaustedError):
    """No room is left on a disk of this host, or in a quota. Nothing runs whose audit rows cannot be written."""

    code = "disk_full"


class DescriptorsExhaustedError(ExhaustedError):
    """This process, or the whole host, has the maximum of open files."""

    code = "too_many_open_files"


class MemoryExhaustedError(ExhaustedError):
    """The kernel gave no more memory, to the supervisor itself and not to an agent."""

    code = "host_out_of_memory"


_CAUSES: dict[int, tuple[type[ExhaustedError], str]] = {
    errno.ENOSPC: (DiskFullError, "make room on the disk of COVENANT_STATE; the next start clears up what was cut off"),
    errno.EDQUOT: (DiskFullError, "raise the quota of the disk of COVENANT_STATE"),
    errno.EMFILE: (DescriptorsExhaustedError, "raise the limit of open files (ulimit -n, LimitNOFILE=)"),
    errno.ENFILE: (DescriptorsExhaustedError, "raise fs.file-max, or end what holds so many files"),
    errno.ENOMEM: (MemoryExhaustedError, "free memory, or raise the limit that this process runs under"),
}


def exhausted(error: BaseException) -> ExhaustedError | None:
    """The error to report when ``error`` came of something that is used up; None when it did not.

    What went wrong first decides: an error that was met while another was dealt with is looked at after its cause.
    """
    if isinstance(error, ExhaustedError):
        return error
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        number = errno.ENOMEM if isinstance(one, MemoryError) else getattr(one, "errno", None)
        if isinstance(number, int) and number in _CAUSES:
            kind, hint = _CAUSES[number]
            named = getattr(one, "filename", None)
            told = error.message if isinstance(error, CovenantError) else _words(one, number)
            where = error.where if isinstance(error, CovenantError) else str(named or "")
            return kind(told, hint=hint, where=where)
        one = one.__cause__ or one.__context__
    return None


def _words(error: BaseException, number: int) -> str:
    text = getattr(error, "strerror", None) or {errno.ENOMEM: "cannot allocate memory"}.get(number, str(error))
    return text[:1].lower() + text[1:]
