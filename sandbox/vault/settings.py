"""The table ``[vault]`` of config.toml: where secrets are, and what opens them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from policy.manifest.permissions import CREDENTIAL_NAME

CREDENTIAL = "credential:"
_SEGMENT = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
_ADDRESS = r"^(https://[A-Za-z0-9.\[\]:-]{1,253}|http://(127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?)/?$"


class Settings(pydantic.BaseModel):
    """``key`` opens the embedded file in a run: the path of a private file of random bytes, or ``credential:NAME`` of
    the supervisor's systemd unit. Without one no run is given a secret. With ``backend = "openbao"`` the secrets lie in
    a KV version 2 store at ``address``: ``mount``/data/``prefix``/<agent id>/<name>, key ``value``; ``token`` is a
    private file, ``ca`` who is believed for the server's certificate. Times in seconds."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: Literal["file", "openbao"] = "file"
    key: str = ""
    # What is not encrypted stays on this machine.
    address: Annotated[str, pydantic.Field(pattern=_ADDRESS)] = "https://127.0.0.1:8200"
    token: Path | None = None
    ca: Path | None = None
    mount: Annotated[str, pydantic.Field(pattern=_SEGMENT)] = "secret"
    prefix: Annotated[str, pydantic.Field(pattern=_SEGMENT)] = "covenant"
    timeout_seconds: int = pydantic.Field(default=5, ge=1, le=60)

    def private_files(self) -> tuple[str, ...]:
        """What opens a vault, where it is a file of the host's: never granted, whoever signs."""
        return tuple(place for place in (self.key, str(self.token or "")) if place.startswith("/"))

    @pydantic.field_validator("token", "ca", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        path = Path(value) if isinstance(value, str) else value
        if path is not None and (not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts):
            raise ValueError("must be an absolute path without `..`")
        return path

    @pydantic.field_validator("key")
    @classmethod
    def _place(cls, value: str) -> str:
        if not value or re.fullmatch(CREDENTIAL + CREDENTIAL_NAME, value):
            return value
        if not value.startswith("/") or ".." in Path(value).parts:
            raise ValueError("must be an absolute path without `..`, or `credential:NAME`")
        return value
