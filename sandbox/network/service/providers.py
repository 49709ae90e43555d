"""The operator's providers of models, searches and agents: providers.toml, a file that only root can write.

    [providers.anthropic]
    kind = "anthropic"
    secret = "anthropic"                 # covenant vault put covenant-providers anthropic

    [providers.local]
    kind = "openai-compatible"
    endpoint = "http://127.0.0.1:8080/v1"

    [fetch."wiki.example.com"]           # in place of what the resolver says of the name
    connect = "10.0.0.5:443"

The order of the tables is the order in which providers of one model are tried. Read from ``COVENANT_STATE``, else from
/etc/covenant, as the supervisor's configuration is.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import pydantic
from msgspec import Struct

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
    "a2a": "http://127.0.0.1:8421",
    "anthropic": "https://api.anthropic.com/v1",
    "brave": "https://api.search.brave.com",
    "gemini": "https://generativelanguage.googleapis.com/v1beta",
    "mock": "http://127.0.0.1/v1",
    "ollama": "http://127.0.0.1:11434",
    "openai": "https://api.openai.com/v1",
    "openai-compatible": None,
    "searxng": None,
    "serpapi": "https://serpapi.com",
}
_KINDS_WITH_KEY = ("anthropic", "brave", "gemini", "openai", "serpapi")
SEARCHES: Final = frozenset({"brave", "mock", "searxng", "serpapi"})

Kind = Literal[
    "a2a", "anthropic", "brave", "gemini", "mock", "ollama", "openai", "openai-compatible", "searxng", "serpapi"
]

_KINDS: Final = f"kinds are {', '.join(get_args(Kind))}"


def _absolute(value: object) -> object:
    path = Path(value) if isinstance(value, str) else value
    if path is not None and (not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts):
        raise ValueError("must be an absolute path without `..`")
    return path


CaFile = Annotated[Path, pydantic.BeforeValidator(_absolute)]


class PageHost(pydantic.BaseModel):
    """One host of pages, as the operator says: ``connect`` is where it is, ``ca`` its file of certificates.

    With ``mock`` its pages are made up, for trials. The operator's place may be private; no other may.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    connect: Annotated[str, pydantic.Field(pattern=r"^(?:[A-Za-z0-9.-]+:[0-9]{1,5})?$")] = ""
    ca: CaFile | None = None
    mock: bool = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.connect.rpartition(":")
        return host, int(port)


class Provider(pydantic.BaseModel):
    """One provider. ``secret`` names its key in the vault; ``ca`` is a file of certificates in place of the system's.

    ``timeout_seconds`` bounds the wait for a connection and for each next part of an answer. Prices are in credits for
    a million tokens, ``request_price`` is for one search; 0 counts and charges nothing.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Kind
    endpoint: str = ""
    secret: Annotated[str, pydantic.Field(pattern=f"^(?:{CREDENTIAL_NAME})?$")] = ""
    timeout_seconds: int = pydantic.Field(default=120, ge=1, le=3600)
    ca: CaFile | None = None
    input_price: int = pydantic.Field(default=0, ge=0, le=10**12)
    output_price: int = pydantic.Field(default=0, ge=0, le=10**12)
    request_price: int = pydantic.Field(default=0, ge=0, le=10**12)

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
        if self.has_agents and not self.secret:
            raise ValueError('needs secret = "NAME": the token of agent ID is the secret NAME.ID of the vault')
        if self.kind in _KINDS_WITH_KEY and not self.secret and not _is_loopback(parts.hostname):
            raise ValueError('needs secret = "NAME", a secret of the vault')
        return self

    @property
    def url(self) -> str:
        """The base URL, without a slash at its end."""
        return (self.endpoint or ENDPOINTS[self.kind] or "").rstrip("/")

    @property
    def searches(self) -> bool:
        """Whether it answers searches."""
        return self.kind in SEARCHES

    @property
    def has_agents(self) -> bool:
        """Whether it is a daemon whose agents are asked over A2A."""
        return self.kind == "a2a"

    @property
    def answers(self) -> bool:
        """Whether it has models."""
        return self.kind == "mock" or not (self.searches or self.has_agents)

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


class Operators(Struct, frozen=True):
    """All of providers.toml: the providers by name in the order of the file, and the hosts of pages."""

    providers: Mapping[str, Provider]
    pages: Mapping[str, PageHost]


def load(state: Path) -> dict[str, Provider]:
    """Return the providers by name, in the order of the file. No file is no provider.

    Raises:
        errors.ConfigError: The file is malformed, too large, or writable by others.
    """
    return dict(load_all(state).providers)


def load_all(state: Path) -> Operators:
    """Return the whole file. No file is no provider.

    Raises:
        errors.ConfigError: The file is malformed, too large, or writable by others.
    """
    for path in (state / FILE, SYSTEM_FILE):
        raw = config.read_private(path)
        if raw is not None:
            return parse_all(raw, file=str(path))
    return Operators({}, {})


def parse(raw: bytes, *, file: str) -> dict[str, Provider]:
    """Parse the providers of a providers.toml; ``file`` is its name in errors.

    Raises:
        errors.ConfigError: The bytes are none.
    """
    return dict(parse_all(raw, file=file).providers)


def parse_all(raw: bytes, *, file: str) -> Operators:
    """Parse a providers.toml; ``file`` is its name in errors.

    Raises:
        errors.ConfigError: The bytes are none.
    """
    try:
        document: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.ConfigError(f"providers are not valid TOML: {text.visible(str(e))}", where=file) from e
    tables, pages = document.get("providers", {}), document.get("fetch", {})
    if set(document) - {"providers", "fetch"} or not isinstance(tables, dict) or not isinstance(pages, dict):
        hint = 'write [providers.NAME] or [fetch."HOST"] in the place of each other table'
        raise errors.ConfigError('only [providers.NAME] and [fetch."HOST"] tables are known', hint=hint, where=file)
    return Operators(
        {name: _table(Provider, "providers", name, table, file) for name, table in tables.items()},
        {host: _table(PageHost, "fetch", host, table, file) for host, table in pages.items()},
    )


_Table = TypeVar("_Table", bound=pydantic.BaseModel)
_NAMES: Final = {
    "providers": (PROVIDER, "NAME", "a-z 0-9 _ -"),
    "fetch": (r"[a-z0-9.-]{1,253}", '"HOST"', "a-z 0-9 . -"),
}


def _table(kind: type[_Table], part: str, name: str, table: object, file: str) -> _Table:
    form, shown, letters = _NAMES[part]
    if not re.fullmatch(form, name) or not isinstance(table, dict):
        message = f"{part} `{text.visible(name)}` is no table of {letters}"
        raise errors.ConfigError(message, hint=f"write [{part}.{shown}]", where=file)
    try:
        return kind(**table)
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False, include_context=False)[0]
        raise _error(kind, (part, name, *map(str, first["loc"])), first, file) from e


def _error(kind: type[_Table], place: tuple[str, ...], fault: Mapping[str, Any], file: str) -> errors.ConfigError:
    """Return the fault of one key, or of a table, in the words of this project."""
    key, hint = text.visible(".".join(place)), ""
    message = fault["msg"].removeprefix("Value error, ").lower()
    if fault["type"] == "extra_forbidden":
        message, hint = f"no key of [{place[0]}.{_NAMES[place[0]][1]}]", config.nearest_key(place[-1], kind)
    elif fault["type"] == "literal_error" and place[-1] == "kind":
        near = text.nearest(str(fault["input"]), get_args(Kind))
        message, hint = "no kind of provider", (f"did you mean `{near}`? " if near else "") + _KINDS
    elif message == "needs an endpoint":
        hint = 'write endpoint = "http://HOST:PORT/v1"'
    return errors.ConfigError(f"`{key}`: {message}", hint=hint, where=file)
