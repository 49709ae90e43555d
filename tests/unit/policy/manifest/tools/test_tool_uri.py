"""Tool URIs: both forms, what is none, and versions that pin nothing; one language for tools.json and agent.toml."""

from __future__ import annotations

import copy
import json

import pytest
from pydantic_core import PydanticCustomError

from policy import errors
from policy.manifest import parse
from policy.manifest.tools import document as tools_document
from policy.manifest.tools import tool_uri
from tests import signing_kit, tools_kit

READ = tool_uri.ToolUri("mcp", "fs", "read_text_file", "2026.1.14")
GOOD = {
    "matrix://tool/mcp/fs/read_text_file@2026.1.14": READ,
    "matrix://tool/chain/balance@1": tool_uri.ToolUri("native", "chain", "balance", "1"),
    "matrix://tool/mcp/mcp/mcp@0": tool_uri.ToolUri("mcp", "mcp", "mcp", "0"),
    "matrix://tool/mcp/-_/.-_@v1.0+b:2": tool_uri.ToolUri("mcp", "-_", ".-_", "v1.0+b:2"),
}
BAD = [
    "", "matrix://tool/mcp/fs/read", "matrix://tool/mcp/fs/read@", "matrix://tool/mcp/FS/read@1",
    "matrix://tool/mcp/balance@1", "matrix://tool/mcp//read@1", "matrix://tool/mcp/fs/re/ad@1", "tool/mcp/fs/read@1",
    "MATRIX://tool/mcp/fs/read@1", "matrix://tool/mcp/fs/read@1 ", "matrix://tool/mcp/fs/read@1\n",
    "matrix://tool/mcp/fs/réad@1", f"matrix://tool/mcp/fs/{'x' * 129}@1", f"matrix://tool/mcp/{'x' * 65}/read@1",
    "matrix://agent/fs", "matrix://tool/mcp/fs/read@1@2", "matrix://tool/mcp/fs/../x@1", "matrix://tool/mcp/fs/a%2fb@1",
]  # fmt: skip
UNPINNED = ["latest", "LATEST", "next", "main", "stable", "x", "1.x", "X.2", "v", "beta", "head"]


@pytest.mark.parametrize(("text", "uri"), GOOD.items())
def test_parsed_and_printed(text: str, uri: tool_uri.ToolUri) -> None:
    assert tool_uri.parse(text) == uri
    assert str(uri) == text
    assert tool_uri.check(text) == text


@pytest.mark.parametrize("text", BAD)
def test_no_uri(text: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        tool_uri.parse(text)
    assert (caught.value.context or {})["hint"] == tool_uri.RULE


@pytest.mark.parametrize("version", UNPINNED)
def test_unpinned(version: str) -> None:
    for text in (f"matrix://tool/mcp/fs/read@{version}", f"matrix://tool/chain/balance@{version}"):
        with pytest.raises(PydanticCustomError, match=r"is (unpinned|a range)"):
            tool_uri.parse(text)


@pytest.mark.parametrize(
    "version", ["1", "0.1.0", "2026.1.14", "v2", "1.0.0-rc.1", "1.0.0+build5", "nightly-2026-01-02"]
)
def test_pinned(version: str) -> None:
    assert tool_uri.pinned(version) == version


@pytest.mark.parametrize("version", ["", "^1.0", "~1", ">=1", "1 ", "*", "1/2"])
def test_version_none(version: str) -> None:
    with pytest.raises(PydanticCustomError, match="not accepted"):
        tool_uri.pinned(version)


def test_agent_toml_speaks_same_language() -> None:
    def skills(uri: str) -> bytes:
        return signing_kit.MANIFEST + f'[permissions.skills]\nallow = ["{uri}"]\n'.encode()

    for text in GOOD:
        assert parse.parse(skills(text)).permissions.skills.allow == (text,)
    for text in (*(b for b in BAD if b.isprintable()), "matrix://tool/mcp/fs/read@latest"):
        with pytest.raises(errors.ManifestError) as caught:
            parse.parse(skills(text))
        assert caught.value.where.endswith(":10")


def test_rule_names_both_forms() -> None:
    assert tool_uri.RULE == (
        "write matrix://tool/mcp/<alias>/<name>@<version> or matrix://tool/<namespace>/<name>@<version>"
    )


@pytest.mark.parametrize("name", ["a..b", "..", ".", "a.", "a...b", "..a", "a.b..c", "a/..", "a/b", "", "x" * 129])
def test_name_of_dots_or_slashes_is_refused(name: str) -> None:
    for uri in (f"matrix://tool/mcp/fs/{name}@1.0", f"matrix://tool/host/{name}@1.0"):
        with pytest.raises(PydanticCustomError, match="tool URI"):
            tool_uri.parse(uri)
    document = copy.deepcopy(tools_kit.FULL)
    document["servers"][0]["tools"][0]["name"] = name
    with pytest.raises(errors.ToolsError) as caught:
        tools_document.parse(json.dumps(document).encode())
    assert caught.value.where.startswith("tools.json:")


@pytest.mark.parametrize("alias", ["a..b", "..", ".", "a.b", "A", "a/b", "", "x" * 65, "a b"])
def test_alias_is_that_of_seed(alias: str) -> None:
    with pytest.raises(PydanticCustomError, match="tool URI"):
        tool_uri.parse(f"matrix://tool/mcp/{alias}/read@1.0")
    document = copy.deepcopy(tools_kit.FULL)
    document["servers"][0]["alias"] = alias
    with pytest.raises(errors.ToolsError):
        tools_document.parse(json.dumps(document).encode())


@pytest.mark.parametrize("name", ["a.b", "a.b.c", ".a", "a-b_c", "A", "0", "x" * 128, "-", "_"])
def test_name_with_dots_inside_is_kept(name: str) -> None:
    uri = f"matrix://tool/mcp/fs/{name}@1.0"
    assert str(tool_uri.parse(uri)) == uri
