"""Tool manifests on arbitrary input: one refusal of its own kind, or a document that keeps its promises."""

from __future__ import annotations

import copy
import json
import unicodedata
from typing import Any

import jsonschema
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from policy import errors, package
from policy.manifest import digests
from policy.manifest.reference import json_schema
from policy.manifest.tools import checks, pins, secret_scan, tool_uri
from policy.manifest.tools import document as tools_document
from tests import tools_kit as kit

SCHEMA = jsonschema.Draft202012Validator(json_schema.for_tools())
PART = {name: st.from_regex(chars, fullmatch=True) for name, (chars, _) in tool_uri.PARTS.items()}


def attempt(raw: bytes) -> tools_document.ToolManifest | None:
    """A tool manifest, which the published schema accepts too, or None for a refusal that is well-formed."""
    try:
        accepted = tools_document.parse(raw)
    except errors.ToolsError as e:
        refusal = e
    else:
        assert [e.message for e in SCHEMA.iter_errors(json.loads(raw))] == []
        return accepted
    assert refusal.where.startswith("tools.json")
    assert refusal.message
    shown = str(refusal) + refusal.hint + str(refusal.to_json())
    assert not any(unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Cn") for ch in shown)
    return None


def assert_keeps_its_promises(m: tools_document.ToolManifest) -> None:
    uris = [uri for _, uri, _ in m.tools()]
    assert len(set(uris)) == len(uris)
    assert all(tool_uri.parse(str(uri)) == uri for uri in uris)
    assert len({server.alias for server in m.servers}) == len(m.servers)
    assert [server.transport for server in m.servers].count("daemon") <= 1
    for server in m.servers:
        assert (server.command is not None) == (server.transport == "stdio") == (server.package_digest is not None)
        assert (server.endpoint is not None) == (server.transport == "http")
        assert server.tools
        for word in (server.command or "", *server.args):
            assert "$env:" not in word
            assert not secret_scan.looks_secret(word)
        contents = [*(tools_document.split_variable(item)[1] for item in server.env), *server.headers.values()]
        for content in contents:
            assert secret_scan.referenced(content) is not None or not secret_scan.looks_secret(content)
    read = kit.changed(kit.package(kit.FULL), {"tools.json": m.places.document.encode()})
    assert all(finding.code in checks.CODES for finding in checks.verify(read, kit.manifest(read), m))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(raw: bytes) -> None:
    assert attempt(raw) is None


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2**70), st.text(max_size=12), st.builds(list), st.builds(dict),
    st.sampled_from(
        ["read", "chain", "stdio", "http", "daemon", "latest", "1.0", kit.FILLER, kit.DIGEST, "$env:A", "$credential:b",
         "x $env:A", "https://a.com/x", "npx", "fs", "weather", "mcp", "\u202e", "matrix://agent/x"]
    ),
    st.lists(st.sampled_from(["read", "write", "A=1", "$env:B", "x", "LD_PRELOAD=x"]), max_size=3),
    st.dictionaries(st.sampled_from(["A", "Authorization", "name"]), st.sampled_from(["x", "$env:A"]), max_size=2),
)  # fmt: skip


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in ((*at, key), *paths(inner, (*at, key)))]


PATHS = paths(kit.FULL)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutations(data: st.DataObject) -> None:
    document = copy.deepcopy(kit.FULL)
    for _ in range(data.draw(st.integers(1, 2))):
        *around, last = data.draw(st.sampled_from(PATHS))
        place: Any = document
        try:
            for part in around:
                place = place[part]
            match data.draw(st.integers(0, 3)):
                case 0:
                    del place[last]
                case 1 if isinstance(place, dict):
                    place[data.draw(st.text(max_size=4))] = data.draw(VALUES)
                case _:
                    place[last] = data.draw(VALUES)
        except (LookupError, TypeError):
            return
    m = attempt(json.dumps(document).encode())
    if m is not None:
        assert_keeps_its_promises(m)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1, max_size=3), st.integers(0, len(kit.SEED)), st.integers(0, 3))
def test_bytes_pushed_into_seeds_example(noise: bytes, at: int, cut: int) -> None:
    m = attempt(kit.SEED[:at] + noise + kit.SEED[at + cut :])
    if m is not None:
        assert_keeps_its_promises(m)


def test_unspoiled_documents_keep_their_promises() -> None:
    for raw in (kit.SEED, kit.text(kit.FULL)):
        m = attempt(raw)
        assert m is not None
        assert_keeps_its_promises(m)


# --- URIs -------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(tool_uri.FORMS)), PART["space"], PART["name"], PART["version"])
def test_what_is_printed_is_parsed_to_same(kind: tool_uri.Kind, space: str, name: str, version: str) -> None:
    uri = tool_uri.ToolUri(kind, space, name, version)
    try:
        found = tool_uri.parse(str(uri))
    except PydanticCustomError:
        assert space == tool_uri.RESERVED or not _is_pin(version)
    else:
        assert found == uri


def _is_pin(version: str) -> bool:
    try:
        tool_uri.pinned(version)
    except PydanticCustomError:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(st.from_regex(r"matrix://tool/(mcp/)?[a-z_/-]{0,6}/?[A-Za-z0-9_.@/-]{0,8}@?[A-Za-z0-9.@]{0,5}", fullmatch=True))
@example("matrix://tool/mcp/mcp/mcp@1")
def test_what_is_parsed_is_printed_as_it_was(text: str) -> None:
    try:
        uri = tool_uri.parse(text)
    except PydanticCustomError:
        return
    assert str(uri) == text
    assert uri.space != tool_uri.RESERVED or uri.kind == "mcp"


# --- digests ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1))
def test_no_digest_of_anything_is_filler(data: bytes) -> None:
    assert digests.filler(digests.of(data)) == ""


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.data())
def test_every_repetition_is_filler(period: int, data: st.DataObject) -> None:
    piece = data.draw(st.text("0123456789abcdef", min_size=period, max_size=period))
    assert digests.filler(f"sha256:{piece * (64 // period)}")


# --- pins -------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([None, 0, 1, 4, "\t"]),
    st.booleans(),
    st.dictionaries(st.sampled_from("abc"), st.binary(), min_size=1),
)
def test_pin_changes_digest_and_nothing_else(indent: Any, ascii_only: bool, files: dict[str, bytes]) -> None:
    raw = json.dumps(kit.FULL, indent=indent, ensure_ascii=ascii_only).encode()
    read = kit.package(raw, pin=False, files={f"tools/fs/{name}": data for name, data in files.items()})
    before = tools_document.parse(raw)
    pinned, lock = pins.pin(read, before)
    digest = str(pins.package_digest(read, "fs"))
    assert pinned == raw.replace(kit.FILLER.encode(), digest.encode())
    again = package.Package({**read.files, "tools.json": pinned, "tools.lock.json": lock})
    assert checks.verify(again, kit.manifest(again), tools_document.parse(pinned)) == ()
    assert pins.pin(again, tools_document.parse(pinned)) == (pinned, lock)
