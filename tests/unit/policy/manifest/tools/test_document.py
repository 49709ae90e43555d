"""tools.json: the seed's example and every key parse; each thing that Matrix lets pass is refused, at its place."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from policy import errors
from policy.manifest.tools import document as tools_document
from tests import tools_corpus
from tests import tools_kit as kit


def refuse(raw: bytes) -> errors.ToolsError:
    with pytest.raises(errors.ToolsError) as caught:
        tools_document.parse(raw)
    return caught.value


def test_seeds_example_parses() -> None:
    m = tools_document.parse(kit.SEED)
    assert (m.schema_version, m.agent_id, m.allowed_side_effects) == (
        1,
        "default",
        ("read", "write", "network", "shell"),
    )
    (server,) = m.servers
    assert (server.alias, server.transport, server.command, server.version) == ("fs", "stdio", "npx", "2026.1.14")
    assert server.args == ("-y", "@modelcontextprotocol/server-filesystem", "/workspace")
    assert [(str(uri), side_effect) for _, uri, side_effect in m.tools()] == [(kit.READ, "read"), (kit.WRITE, "write")]
    assert {tool.timeout_ms for tool in server.tools} == {30_000}


def test_every_key_parses() -> None:
    m = tools_document.parse(kit.text(kit.FULL))
    assert [str(uri) for _, uri, _ in m.tools()] == [kit.READ, kit.WRITE, kit.TODAY, kit.BALANCE]
    assert [side_effect for _, _, side_effect in m.tools()] == ["read", "write", "network", "chain"]
    assert list(m.servers[0].credentials()) == [(("env", 1), "FS_KEY"), (("env", 2), "fs-key")]
    assert list(m.servers[1].credentials()) == [(("headers", "Authorization"), "weather")]
    assert m.servers[0].tools[0].timeout_ms == 5000


def test_what_is_absent_allows_nothing() -> None:
    m = tools_document.parse(kit.text(kit.full("allowed_side_effects", drop=True)))
    assert m.allowed_side_effects == ()


@pytest.mark.parametrize(
    ("path", "value", "message"), tools_corpus.REFUSED, ids=[f"{r[0][-1]}: {r[2]}"[:60] for r in tools_corpus.REFUSED]
)
def test_refused(path: tuple[str | int, ...], value: Any, message: str) -> None:
    document = kit.full(*path, drop=True) if value is tools_corpus.GONE else kit.full(*path, value=value)
    raw = kit.text(document)
    error = refuse(raw)
    assert message in error.message, error.message
    assert error.message == " ".join(error.message.split())
    file, line, column = error.where.split(":")
    assert file == "tools.json"
    row = raw.decode().split("\n")[int(line) - 1]
    assert row[int(column) - 1] not in " ,:"
    assert error.to_json()["errors"][0]["where"] == error.where


def test_place_is_that_of_value_or_key() -> None:
    raw = kit.text(kit.full("servers", 0, "tools", 1, "side_effect_class", value="wirte"))
    error = refuse(raw)
    line, column = map(int, error.where.split(":")[1:])
    assert raw.decode().split("\n")[line - 1][column - 1 :].startswith('"wirte"')
    assert error.hint.startswith("did you mean `write`?")
    raw = kit.text(kit.full("allowed_side_efects", value=[]))
    error = refuse(raw)
    line, column = map(int, error.where.split(":")[1:])
    assert raw.decode().split("\n")[line - 1][column - 1 :].startswith('"allowed_side_efects"')
    assert error.hint.startswith("did you mean `allowed_side_effects`?")


def test_all_findings_in_order_of_file() -> None:
    document = kit.full("servers", 1, "version", value="latest")
    document["servers"][0]["alias"] = "FS"
    error = refuse(kit.text(document))
    assert "alias `FS`" in error.message
    assert error.hint.endswith("(and 1 more: --json lists them)")
    assert ["alias" in f["message"] for f in error.to_json()["errors"]] == [True, False]


@pytest.mark.parametrize(
    ("raw", "message", "where"),
    [
        (b"", "is not JSON at line 1 column 1", "tools.json:1:1"),
        (b"[]", "is an array, not an object", "tools.json:1:1"),
        (b'{"a": 1,\n "a": 2}', "the key `a` stands twice", "tools.json:2:2"),
        (b'{"servers": [{"b": 1, "\\u0062": 2}]}', "the key `b` stands twice", "tools.json:1:23"),
        (b'{\n "a": 1.5}', "`1.5` is not an integer", "tools.json"),
        (b'{"a": NaN}', "`NaN` is not an integer", "tools.json"),
        (b"\xff", "is not UTF-8", "tools.json"),
        (b"\xef\xbb\xbf{}", "is not JSON", "tools.json:1:1"),
        (b'{"a": 1,}', "is not JSON", "tools.json:1:9"),
        (b"{'a': 1}", "is not JSON", "tools.json:1:2"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32 deep", "tools.json"),
        (b"[" * 60_000, "nested too deeply", "tools.json"),
        (b"[" * 100_000, "made of more than 65536 values", "tools.json"),
        (b" " * (1024 * 1024 + 1), "larger than 1048576 bytes", "tools.json"),
    ],
)
def test_bytes_no_document(raw: bytes, message: str, where: str) -> None:
    error = refuse(raw)
    assert message in error.message
    assert error.where == where


def test_rules_hold_without_parser() -> None:
    document = tools_document.parse(kit.text(kit.FULL)).model_dump()
    document["servers"][0]["command"] = None
    with pytest.raises(pydantic.ValidationError, match="contradict"):
        tools_document.ToolManifest.model_validate(document)


def test_empty_keys_of_other_transport_are_no_matter() -> None:
    document = kit.full("servers", 1, "args", value=[])
    document["servers"][1]["env"] = []
    assert tools_document.parse(kit.text(document)).servers[1].args == ()


def test_endpoints() -> None:
    for good in (
        "https://example.com",
        "https://example.com/",
        "https://[2001:db8::1]:8443/mcp",
        "https://192.0.2.1/a/b",
    ):
        assert (
            tools_document.parse(kit.text(kit.full("servers", 1, "endpoint", value=good))).servers[1].endpoint == good
        )


def test_numbers_of_schema_are_kept() -> None:
    schema = {"type": "object", "properties": {"n": {"maximum": 10**30, "enum": [None, True, "é"]}}}
    raw = json.dumps(kit.full("servers", 0, "tools", 0, "input_schema", value=schema)).encode()
    assert tools_document.parse(raw).servers[0].tools[0].input_schema == schema
