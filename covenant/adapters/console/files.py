"""The files of the console: read once at the start, and found by whole names, so that no path is ever built.

The policy of the pages lets a browser run, show and connect to nothing but this origin, and refuses text as markup
(Trusted Types): a name or a message of an agent cannot become a script.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

INDEX: Final = "index.html"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


class StaticFile(NamedTuple):
    """The bytes of a file and their media type."""

    body: bytes
    media_type: str


@functools.cache
def load() -> Mapping[str, StaticFile]:
    """Return the files by their names below ``/console/``."""
    return dict(_below(importlib.resources.files(__package__) / "static", ""))


def _below(directory: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found = []
    for one in directory.iterdir():
        if one.is_dir():
            found += _below(one, f"{prefix}{one.name}/")
        elif (suffix := one.name[one.name.rfind(".") :]) in _TYPES:
            found.append((prefix + one.name, StaticFile(one.read_bytes(), _TYPES[suffix])))
    return found
