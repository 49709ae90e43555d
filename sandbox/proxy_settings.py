"""The table [proxy] of the supervisor's configuration: the operator's proxy, by which all gates connect."""

from __future__ import annotations

import re
from typing import Self

import pydantic

from policy import errors
from policy.grants.sets import hostnames
from policy.manifest import text


class ProxySettings(pydantic.BaseModel):
    """The proxy of all connections of agents, by CONNECT (RFC 9110, section 9.3.6). Without ``url``, none.

    ``url`` is `http://HOST:PORT`, or `https://HOST:PORT` for a proxy that is spoken to over TLS. ``secret`` is the name
    of `USER:PASSWORD` among the secrets of covenant-providers, and ``direct`` are hosts that are reached without it.
    With ``by_name`` the proxy looks granted names up itself. ``resolves`` are the names that it alone can look up, each
    as a name, `*.DOMAIN` or `*`: the DNS gate answers for a granted one by itself.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    url: str = ""
    secret: str = ""
    direct: tuple[str, ...] = ()
    by_name: bool = False
    resolves: tuple[str, ...] = ()

    @pydantic.field_validator("direct", "resolves", mode="before")
    @classmethod
    def _hosts(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @pydantic.field_validator("url")
    @classmethod
    def _place(cls, value: str) -> str:
        found = re.fullmatch(r"https?://([A-Za-z0-9._-]{1,253}):([0-9]{1,5})", value)
        if value and (found is None or not 0 < int(found[2]) < 65536):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        return value

    @pydantic.field_validator("resolves")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for one in value:
                _ = one == hostnames.EVERY or hostnames.check(one)
        except errors.ManifestError as e:
            raise ValueError("must be names in lower case, `*.DOMAIN` or `*`") from e
        return value

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> Self:
        for name in self.direct:
            if not {name, *hostnames.above(name)}.isdisjoint(self.resolves):
                raise ValueError(f"`{text.visible(name)}` is in `direct`, and `resolves` has the proxy look it up")
        return self

    @property
    def tls(self) -> bool:
        """Whether the proxy is spoken to over TLS."""
        return self.url.startswith("https:")

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the proxy."""
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)
