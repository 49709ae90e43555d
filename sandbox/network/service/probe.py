"""Ask a provider whether it answers with the operator's key: its list of models, or a search, from the host itself."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from sandbox.network.gate.proxy import Proxy
from sandbox.network.service.providers import SYSTEM_CA, Provider
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.web import search

_PATHS: Final = {"ollama": "/api/tags"}
_QUESTION: Final = search.Question("covenant", 1)
_ANSWER_BYTES: Final = 4 << 20


class ProviderStatus(Struct, frozen=True):
    """Result of one question: ``status`` is HTTP's, ``models`` the number of listed models, ``says`` a message."""

    works: bool
    status: int
    models: int
    says: str


def ask(provider: Provider, key: str, authorities: Sequence[str] = (), proxy: Proxy | None = None) -> ProviderStatus:
    """Return the answer of a provider. The mock answers always.

    ``authorities`` are files that are believed beside the system's, unless the provider names a file of its own.
    ``proxy`` is the operator's.
    """
    if provider.kind == "mock":
        return ProviderStatus(works=True, status=200, models=0, says="answers, as every mock")
    parts, path, headers = urlsplit(provider.url), _PATHS.get(provider.kind, "/models"), _headers(provider, key)
    if provider.searches:
        call = search.call(provider.kind, _QUESTION, key)
        path, headers = f"{call.path}?{urlencode(call.parameters)}", dict(call.headers)
    host, port = place = provider.address
    by = None if proxy is None or host in proxy.direct else proxy
    try:
        line: http.client.HTTPConnection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if provider.tls:
            context = ssl.create_default_context(cafile=str(provider.ca or SYSTEM_CA))
            for one in () if provider.ca else authorities:
                context.load_verify_locations(one)
            line = http.client.HTTPSConnection(host, port, timeout=provider.timeout_seconds, context=context)
        else:
            line = http.client.HTTPConnection(host, port, timeout=provider.timeout_seconds)
        if by is not None:
            made = by.connected(*place, provider.timeout_seconds)
            line.sock = context.wrap_socket(made, server_hostname=host) if provider.tls else made
        line.request("GET", parts.path + path, headers=headers)
        found = line.getresponse()
        raw = found.read(_ANSWER_BYTES)
        line.close()
    except (OSError, http.client.HTTPException) as e:
        return ProviderStatus(works=False, status=0, models=0, says=f"does not answer: {str(e) or type(e).__name__}")
    if found.status != 200:
        gives = "does not search" if provider.searches else "does not give its models"
        why = "refuses the key" if found.status in (401, 403) else gives
        return ProviderStatus(works=False, status=found.status, models=0, says=f"{why} (status {found.status})")
    if provider.searches:
        return _searched(provider, raw)
    try:
        document = json.loads(raw)
        listed = document.get("data", document.get("models"))
        count = len(listed)
    except (ValueError, RecursionError, TypeError, AttributeError):
        return ProviderStatus(works=False, status=200, models=0, says="gives no list of models")
    return ProviderStatus(works=True, status=200, models=count, says=f"answers, with {count} models")


def _searched(provider: Provider, raw: bytes) -> ProviderStatus:
    try:
        count = len(search.results(provider.kind, raw, _QUESTION.count))
    except RefusedError:
        return ProviderStatus(works=False, status=200, models=0, says="gives no list of results")
    return ProviderStatus(works=True, status=200, models=0, says=f"answers a search, with {count} results")


def _headers(provider: Provider, key: str) -> dict[str, str]:
    if not key:
        return {}
    if provider.kind == "anthropic":
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return {"x-goog-api-key": key} if provider.kind == "gemini" else {"Authorization": f"Bearer {key}"}
