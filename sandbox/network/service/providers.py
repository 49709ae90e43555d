"""The operator's providers of models: providers.toml, a file that only root can write.

    [providers.anthropic]
    kind = "anthropic"
    secret = "anthropic"                 # covenant vault put covenant-providers anthropic

    [providers.local]
    kind = "openai-compatible"
    endpoint = "http://127.0.0.1:8080/v1"

The order of the tables is the order in which providers of one model are tried. Read from ``COVENANT_STATE``, else from
/etc/covenant, as the supervisor's configuration is.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import pydantic

from policy import errors
from policy.manifest import text
from policy.manifest.permissions import CREDENTIAL_NAME
from policy.manifest.services import PROVIDER
from sandbox import config

FILE: Final = "providers.toml"
SYSTEM_FILE: Final = Path("/etc/covenant/providers.toml")
# The owner of the providers' keys in the vault. No manifest may have this id.
SYSTEM_CA: Final = config.SYSTEM_CA
# The endpoint of each kind where the file names none; None where it must.
ENDPOINTS: Final[Mapping[str, str | None]] = {
    "anthropic": "https://api.anthropic.com/v1",
    "gemini": "https://generativelanguage.googleapis.com/v1beta",
    "mock": "http://127.0.0.1/v1",
    "ollama": "http://127.0.0.1:11434",
    "openai": "https://api.openai.com/v1",
    "openai-compatible": None,
}
_KINDS_WITH_KEY = ("anthropic", "gemini", "openai")

Kind = Literal["anthropic", "gemini", "mock", "ollama", "openai", "openai-compatible"]


class Provider(pydantic.BaseModel):
    """One provider. ``secret`` names its key in the vault; ``ca`` is a file of certificates in place of the system's.

    ``timeout_seconds`` bounds the wait for a connection and for each next part of an answer. Prices are in credits for
    a million tokens; 0 counts tokens and charges nothing.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Kind
    endpoint: str = ""
    secret: Annotated[str, pydantic.Field(pattern=f"^(?:{CREDENTIAL_NAME})?$")] = ""
    timeout_seconds: int = pydantic.Field(default=120, ge=1, le=3600)
    ca: Path | None = None
    input_price: int = pydantic.Field(default=0, ge=0, le=10**12)
    output_price: int = pydantic.Field(default=0, ge=0, le=10**12)

    @pydantic.field_validator("ca", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        path = Path(value) if isinstance(value, str) else value
        if path is not None and (not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts):
            raise ValueError("must be an absolute path without `..`")
        return path

    @pydantic.model_validator(mode="after")
    def _reachable(self) -> Provider:
        found = self.url
        if found == "":
            raise ValueError("needs an endpoint")
        parts = urlsplit(found)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("the endpoint must be http(s)://HOST[:PORT][/PATH]")
        if parts.query or parts.fragment or not re.fullmatch(r"[A-Za-z0-9._~/-]*", parts.path):
            raise ValueError("the endpoint must have a plain path, and no query")
        if parts.scheme == "http" and self.secret and not _is_loopback(parts.hostname):
            raise ValueError("a key is sent to another machine by https alone")
        if self.kind in _KINDS_WITH_KEY and not self.secret and not _is_loopback(parts.hostname):
            raise ValueError('needs secret = "NAME", a secret of the vault')
        return self

    @property
    def url(self) -> str:
        """The base URL, without a slash at its end."""
        return (self.endpoint or ENDPOINTS[self.kind] or "").rstrip("/")

    @property
    def tls(self) -> bool:
        """Whether it is reached by TLS."""
        return self.url.startswith("https:")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.tls else 80)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load(state: Path) -> dict[str, Provider]:
    """Return the providers by name, in the order of the file. No file is no provider.

    Raises:
        errors.ConfigError: Raised when the file is malformed, too large, or writable by others.
    """
    for path in (state / FILE, SYSTEM_FILE):
        raw = config.read_private(path)
        if raw is not None:
            return parse(raw, file=str(path))
    return {}


def parse(raw: bytes, *, file: str) -> dict[str, Provider]:
    """Parse a providers.toml; ``file`` is its name in errors.

    Raises:
        errors.ConfigError: Raised when the bytes are none.
    """
    try:
        document: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.ConfigError(f"providers are not valid TOML: {text.visible(str(e))}", where=file) from e
    tables = document.get("providers", {})
    if set(document) - {"providers"} or not isinstance(tables, dict):
        raise errors.ConfigError("only [providers.NAME] tables are known", where=file)
    found = {}
    for name, table in tables.items():
        if not re.fullmatch(PROVIDER, name) or not isinstance(table, dict):
            raise errors.ConfigError(
                f"provider `{text.visible(name)}` is no table of a-z 0-9 _ -", hint="write [providers.NAME]", where=file
            )
        try:
            found[name] = Provider(**table)
        except pydantic.ValidationError as e:
            first = e.errors(include_url=False, include_context=False)[0]
            key = text.visible(".".join(("providers", name, *(str(part) for part in first["loc"]))))
            message = first["msg"].removeprefix("Value error, ").lower()
            raise errors.ConfigError(f"`{key}`: {message}", where=file) from e
    return found
