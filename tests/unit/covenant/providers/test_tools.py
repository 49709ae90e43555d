"""The registry: sorted, no name twice, arguments checked in full and without a network, no wait without an end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import anyio
import jsonschema_rs
import pytest

from covenant.providers.tools import Answer, ToolRegistry, native
from covenant.wire.types import ToolSpec
from policy import errors

pytestmark = pytest.mark.anyio


class Fake:
    def __init__(self, name: str, schema: dict[str, Any] | None = None, does: Any = None) -> None:
        self.spec = ToolSpec(name=name, description=f"does {name}", input_schema=schema or {"type": "object"})
        self.does = does
        self.calls: list[Any] = []

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        self.calls.append(arguments)
        if self.does is not None:
            await self.does()
        return Answer(({"type": "text", "text": self.spec.description},))


async def test_native_tools() -> None:
    tools = native(lambda: 42)
    assert [spec.name for spec in tools.specs()] == ["clock", "echo"]
    assert (await tools.call("echo", {"text": "ä\n"})).content == ({"type": "text", "text": "ä\n"},)
    (block,) = (await tools.call("clock", {})).content
    assert json.loads(block["text"]) == {"epoch_ms": 42}


async def test_sorted_and_no_name_twice(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Fake("b"), Fake("b")
    second.spec = second.spec.model_copy(update={"description": "in its place"})
    with caplog.at_level(logging.WARNING):
        tools = ToolRegistry([first, Fake("c"), Fake("a"), second])
    assert [spec.name for spec in tools.specs()] == ["a", "b", "c"]
    assert (await tools.call("b", {})).content[0]["text"] == "does b"
    assert caplog.messages == ["a second tool `b` was ignored"]


async def test_invalid_schema_is_not_registered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ToolRegistry().add(Fake("bad", {"type": "text"})) is False
    assert "its schema is invalid" in caplog.text


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "multipleOf": 2},
        "who": {"$ref": "#/$defs/name"},
        "list": {"type": "array", "prefixItems": [{"const": "first"}], "uniqueItems": True},
        "a/b": {"type": "null"},
    },
    "required": ["n"],
    "unevaluatedProperties": False,
    "dependentRequired": {"who": ["list"]},
    "$defs": {"name": {"type": "string", "pattern": "^[a-z]+$"}},
}


@pytest.mark.parametrize(
    ("arguments", "where", "keyword"),
    [
        ({}, "/", "required"),
        ([], "/", "type"),
        ("text", "/", "type"),
        ({"n": 3}, "/n", "multipleOf"),
        ({"n": 0}, "/n", "minimum"),
        ({"n": True}, "/n", "type"),
        ({"n": 2, "more": 1}, "/", "unevaluatedProperties"),
        ({"n": 2, "who": "x"}, "/", "dependentRequired"),
        ({"n": 2, "who": "Ada", "list": []}, "/who", "pattern"),
        ({"n": 2, "list": ["second"]}, "/list/0", "const"),
        ({"n": 2, "list": ["first", "first"]}, "/list", "uniqueItems"),
        ({"n": 2, "a/b": 1}, "/a~1b", "type"),
    ],
)
async def test_arguments_are_checked_in_full(arguments: Any, where: str, keyword: str) -> None:
    fake = Fake("t", SCHEMA)
    with pytest.raises(errors.ToolArgumentsError) as refused:
        await ToolRegistry([fake]).call("t", arguments)
    assert refused.value.where == where
    assert f"`{keyword}`" in refused.value.message
    assert fake.calls == []


async def test_what_fits_is_passed_on() -> None:
    fake = Fake("t", SCHEMA)
    fits = {"n": 2, "who": "ada", "list": ["first", 2], "a/b": None}
    await ToolRegistry([fake]).call("t", fits)
    assert fake.calls == [fits]


async def test_refusal_does_not_say_what_arguments_were() -> None:
    with pytest.raises(errors.ToolArgumentsError) as refused:
        await native(lambda: 0).call("echo", {"text": ["hunter2"]})
    assert "hunter2" not in repr((refused.value.message, refused.value.hint, refused.value.where))


async def test_schema_elsewhere_is_refused_and_not_fetched(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert not ToolRegistry().add(Fake("t", schema))
    assert "not present in a registry" in caplog.text
    # The control: a retriever that fetches makes the same schema valid.
    made = jsonschema_rs.Draft202012Validator(schema, retriever=lambda uri: {"const": uri})
    assert made.is_valid("http://127.0.0.1:9/schema.json")


async def test_pattern_of_nested_repeats_does_not_go_back() -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": "^(a+)+$"}}}
    text = "a" * 40 + "!"
    # An engine that goes back takes 2**40 steps here.
    with pytest.raises(errors.ToolArgumentsError) as refused:
        await ToolRegistry([Fake("t", schema)]).call("t", {"p": text})
    assert refused.value.where == "/p"
    assert refused.value.hint == "pattern: ^(a+)+$"
    await ToolRegistry([Fake("t", schema)]).call("t", {"p": "a" * 40})


@pytest.mark.parametrize("pattern", ["(?=a)b", "(a)\\1", "(?<!a)b"])
async def test_pattern_beyond_linear_engine_is_refused(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    # The control: the validator's default engine takes it, and goes back to match it.
    assert jsonschema_rs.Draft202012Validator({"pattern": pattern}).is_valid(1)
    assert not ToolRegistry().add(Fake("t", {"pattern": pattern}))
    assert "regex" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "where", "hint"),
    [
        ({"x": {"n": 1}}, "/x/n", "minimum: 3"),
        ({"x": None}, "/x", "anyOf: [{'type': 'string'}, {'properties': {'n': {'minimum': 3}}, 'type': 'object'}]"),
        ({"x": "s", "y": 1}, "/y", "oneOf: "),
    ],
)
async def test_choice_names_branch_that_got_furthest(arguments: Any, where: str, hint: str) -> None:
    named = {"properties": {"n": {"minimum": 3}}, "type": "object"}
    schema = {
        "type": "object",
        "properties": {
            "x": {"anyOf": [{"type": "string"}, named]},
            "y": {"oneOf": [{"const": 1}, {"type": "integer"}]},
        },
    }
    with pytest.raises(errors.ToolArgumentsError) as refused:
        await ToolRegistry([Fake("t", schema)]).call("t", arguments)
    assert refused.value.where == where
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(hint)


async def test_arguments_without_end() -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"x": deep}
    tools = ToolRegistry([Fake("t", {"type": "object", "properties": {"x": {"$ref": "#"}}})])
    with pytest.raises(errors.ToolArgumentsError, match="deeply"):
        await tools.call("t", deep)


async def test_lone_surrogate_in_arguments_is_refused() -> None:
    with pytest.raises(errors.ToolArgumentsError, match="surrogate"):
        await ToolRegistry([Fake("t", SCHEMA)]).call("t", {"n": 2, "who": "\ud800"})


async def test_unknown_tool() -> None:
    with pytest.raises(errors.NoToolError, match="`nothing`"):
        await native(lambda: 0).call("nothing", {})


async def test_tool_that_does_not_answer_or_fails() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    tools = ToolRegistry([Fake("slow", does=anyio.sleep_forever), Fake("bad", does=fails)], seconds=0.05)
    with pytest.raises(errors.ToolError, match=r"no answer in 0\.05 seconds"):
        await tools.call("slow", {})
    with pytest.raises(errors.ToolError, match="`bad` failed"):
        await tools.call("bad", {})


class ReplacedRegistry(ToolRegistry):
    """Has another tool under the name once the arguments were checked the first time."""

    then: Fake | None = None

    async def check(self, name: str, arguments: Any) -> None:
        await super().check(name, arguments)
        if self.then is not None:
            self.remove(name)
            self.add(self.then)
            self.then = None


async def test_tool_that_is_replaced_gets_no_arguments_of_former_one() -> None:
    first, second = Fake("t"), Fake("t", SCHEMA)
    tools = ReplacedRegistry([first])
    tools.then = second
    with pytest.raises(errors.ToolArgumentsError):
        await tools.call("t", {"n": 3})
    assert (first.calls, second.calls) == ([], [])
    tools.then = first
    await tools.call("t", {"n": 2})
    assert (first.calls, second.calls) == ([{"n": 2}], [])
