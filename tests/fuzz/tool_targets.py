"""Tool manifests, their pins, and tool URIs: what is accepted is pinned, placed, and holds no secret."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import digests
from policy.manifest.tools import checks, secret_scan, tool_uri
from policy.manifest.tools import document as tools_document
from policy.manifest.tools import pins as tools_pins
from tests import tools_kit as kit
from tests.fuzz.drive import Target

_PACKAGE = kit.package(kit.FULL)
_WORDS = (
    b'"stdio"', b'"http"', b'"read"', b'"chain"', b'"latest"', b'"1.0"', b'"$env:A"', b'"A=$env:A"', b'"x $env:A"',
    b'"$credential:b"', b'"https://a.com/"', b'"npx"', b'"tools"', b'"input_schema":{}', b'"endpoint":',
    b'"headers":{}', kit.FILLER.encode(), kit.DIGEST.encode(), b"\\u202e", b"null", b"1.5", b'"matrix://agent/x"',
)  # fmt: skip


def document(raw: bytes) -> str:
    """A tool manifest: every tool has a URI of its own, no literal looks like a secret, and verify has an answer."""
    parsed = tools_document.parse(raw)
    uris = [uri for _, uri, _ in parsed.tools()]
    assert len(set(uris)) == len(uris)
    for uri in uris:
        assert tool_uri.parse(str(uri)) == uri
        assert tool_uri.pinned(uri.version)
    for path, _, _ in parsed.tools():
        assert parsed.where(path).startswith("tools.json:")
    for server in parsed.servers:
        words = [server.command or "", *server.args]
        words += [tools_document.split_variable(item)[1] for item in server.env]
        words += [*server.headers.values(), server.endpoint or ""]
        for word in words:
            assert secret_scan.referenced(word) is not None or not secret_scan.looks_secret(word)
    read = kit.changed(_PACKAGE, {"tools.json": raw})
    found = checks.verify(read, kit.manifest(read), parsed)
    assert {finding.code for finding in found} <= set(checks.CODES)
    return " ".join(sorted({finding.code for finding in found}))


def pins(raw: bytes) -> str:
    """A lock: no placeholder, and what `verify` says of it is of the table."""
    lock = tools_pins.parse(raw)
    for server in lock.servers.values():
        assert server.package_digest is None or not digests.filler(server.package_digest)
        assert not any(map(digests.filler, server.tools.values()))
    read = kit.changed(_PACKAGE, {tools_pins.LOCK: raw})
    found = checks.verify(read, kit.manifest(read), tools_document.parse(read.files["tools.json"]))
    assert {finding.code for finding in found} <= {"not_pinned", "pin_changed", "pin_unused"}
    return " ".join(sorted({finding.code for finding in found}))


def uri(raw: bytes) -> str:
    """A tool URI is printed as it was read, and belongs to one form."""
    text = raw.decode("utf-8", "surrogateescape")
    try:
        found = tool_uri.parse(text)
    except PydanticCustomError as e:
        raise errors.ToolsError(str((e.context or {})["message"])) from None
    assert str(found) == text
    assert text.isascii()
    assert (found.kind == "mcp") == text.startswith("matrix://tool/mcp/")
    return found.kind


def _documents() -> Sequence[bytes]:
    return kit.SEED, kit.text(kit.FULL), _PACKAGE.files["tools.json"], json.dumps(kit.FULL).encode()


TARGETS = (
    Target("tool manifest", document, _documents, _WORDS, share=3),
    Target("tool manifest tree", document, _documents, _WORDS, share=3, json=True),
    Target("tool pins", pins, lambda: (_PACKAGE.files[tools_pins.LOCK],), _WORDS, share=3, json=True),
    Target(
        "tool uri",
        uri,
        lambda: [u.encode() for u in (kit.READ, kit.BALANCE)],
        (b"mcp/", b"@", b"@1", b"latest", b"/", b"tool/"),
        share=8,
    ),
)
