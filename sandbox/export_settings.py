"""The table [export] of the supervisor's configuration: where audit rows go, and where the telemetry of agents does."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Final

import pydantic

from policy import errors

_COLLECTOR: Final = (
    r"^(https://[A-Za-z0-9._-]{1,253}|https?://(localhost|127\.0\.0\.1|\[::1\]))"
    r"(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]{0,200})?$|^$"
)
_MOST_HEADER_BYTES: Final = 16 * 1024


class ExportSettings(pydantic.BaseModel):
    """The targets of ``covenant export``. ``otlp`` is the address of a collector, ``headers`` a private file of header
    lines for it, ``ca`` the authorities that are trusted for it. ``ocsf`` and ``proofs`` are files.

    ``agents`` is the collector for the telemetry of agents, with ``agents_headers`` and ``agents_ca``.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    # What is not encrypted stays on this machine.
    otlp: Annotated[str, pydantic.Field(pattern=_COLLECTOR)] = ""
    headers: Path | None = None
    ca: Path | None = None
    ocsf: Path | None = None
    proofs: Path | None = None
    agents: Annotated[str, pydantic.Field(pattern=_COLLECTOR)] = ""
    agents_headers: Path | None = None
    agents_ca: Path | None = None

    @pydantic.field_validator("headers", "ca", "ocsf", "proofs", "agents_headers", "agents_ca", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        path = Path(value) if isinstance(value, str) else value
        if path is not None and (not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts):
            raise ValueError("must be an absolute path without `..`")
        return path


def headers(path: Path) -> dict[str, str]:
    """Read header lines from a file that its owner alone can read.

    Raises:
        errors.ConfigError: it is no such file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        hint = "write lines `Name: value` there, with mode 0600"
        raise errors.ConfigError(f"headers `{path}`: {e.strerror}", hint=hint, where=str(path)) from e
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid not in {0, os.geteuid()}:
            raise errors.ConfigError(
                f"headers `{path}` can be read by others", hint=f"chmod 0600 {path}", where=str(path)
            )
        raw = stream.read(_MOST_HEADER_BYTES + 1)
    # Never a part of a credential, nor one with other characters.
    if len(raw) > _MOST_HEADER_BYTES or not raw.isascii():
        raise errors.ConfigError(
            f"headers `{path}`: more than {_MOST_HEADER_BYTES} bytes, or not ASCII alone", where=str(path)
        )
    text, found = raw.decode("ascii"), dict[str, str]()
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, value = line.partition(":")
        if not colon or not name.replace("-", "").isalnum() or not value.strip().isprintable():
            raise errors.ConfigError(f"headers `{path}`: a line is not `Name: value`", where=str(path))
        found[name] = value.strip()
    return found
