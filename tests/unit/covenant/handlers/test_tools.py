"""Check tool calls over the wire: each needs a grant within its bounds, is metered before and logged after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.providers.tools import Answer, native
from covenant.wire import requests
from covenant.wire.types import ToolSpec
from policy import errors
from tests.mailbox_kit import ADA, World

pytestmark = pytest.mark.anyio

# SHA-256 of {"text":"hi"}, by sha256sum
HI = "e7b995efa755c5ff3b84d2188b58cb4ae916a59470eb3761df8a814f11763500"


@pytest.fixture
def world(tmp_path: Path) -> World:
    tmp_path.chmod(0o700)
    world = World(tmp_path)
    world.server.tools = native(world.clock)
    return world


def call(name: str = "echo", **arguments: Any) -> requests.CallTool:
    return requests.CallTool(name=name, arguments=arguments)


class Broken:
    spec = ToolSpec(name="broken", description="breaks", input_schema={"type": "object"})

    def __init__(self) -> None:
        self.hangs = anyio.Event()

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        if "say" in arguments:
            return Answer(({"type": "text", "text": "no"},), is_error=True)
        if "hang" in arguments:
            self.hangs.set()
            await anyio.sleep_forever()
        raise errors.ToolError("it broke")


async def test_anybody_lists_them(world: World) -> None:
    tools = (await world.ask(ADA, requests.ListTools())).tools
    assert [tool.name for tool in tools] == ["clock", "echo"]
    assert tools[1].model_dump(by_alias=True)["inputSchema"]["required"] == ["text"]
    assert await world.rows("capability_check") == []


async def test_call(world: World) -> None:
    assert (await world.ask(ADA, call(text="hi"))).code == "capability_not_held"
    await world.grant(ADA, "tool.call.echo")
    answer = await world.ask(ADA, call(text="hi"))
    assert (answer.content, answer.is_error) == (({"type": "text", "text": "hi"},), False)
    (row,) = await world.rows("tool_call_completed")
    assert (row["tool"], row["outcome"]) == ("echo", "ok")
    assert row["arguments_hash_hex"] == HI
    # a grant for one tool allows no other tool, and an unknown tool is refused before the grants are checked
    assert (await world.ask(ADA, call("clock"))).code == "capability_not_held"
    assert (await world.ask(ADA, call("nothing"))).code == "no_such_tool"
    await world.grant(ADA, "tool.call.clock")
    bare = requests.CallTool(name="clock")
    assert (await world.ask(ADA, bare)).content[0]["text"] == f'{{"epoch_ms": {world.clock()}}}'


@pytest.mark.parametrize("scope", [{}, {"max_uses": 2}])
async def test_nothing_is_called_for_whom_grant_was_taken_back_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any]
) -> None:
    """The row of the check was written, and the revocation was acknowledged before the call."""
    signature = await world.grant(ADA, "tool.call.echo", **scope)
    write = world.server.audit.append_all

    async def wrote(entries: Any) -> Any:
        found = await write(entries)
        if entries[0].kind == "capability_check":
            await world.server.capabilities.revoke(signature, world.clock())
        return found

    monkeypatch.setattr(world.server.audit, "append_all", wrote)
    assert (await world.ask(ADA, call(text="hi"))).code == "capability_not_held"
    assert await world.rows("tool_call_completed") == []


async def test_arguments_that_do_not_fit_are_written_down(world: World) -> None:
    signature = await world.grant(ADA, "tool.call.echo", max_uses=1)
    answer = await world.ask(ADA, call(text=1))
    assert (answer.code, answer.where) == ("tool_arguments", "/text")
    (row,) = await world.rows("tool_call_schema_rejected")
    assert (row["tool"], row["reason"]) == ("echo", answer.message)
    # the refused call did not use the grant
    grant = world.server.capabilities.get(signature)
    assert grant is not None
    assert grant.used == 0
    assert (await world.ask(ADA, call(text="hi"))).kind == "tool_result"


async def test_arguments_of_scope_and_no_others(world: World) -> None:
    await world.grant(ADA, "tool.call.echo", arguments={"allow": {"text": "hi"}})
    assert (await world.ask(ADA, call(text="hi"))).kind == "tool_result"
    for other in ({"text": "ho"}, {"text": "hi", "more": 1}, {}):
        assert (await world.ask(ADA, call(**other))).code == "capability_scope"
    assert len(await world.rows("capability_scope_rejected")) == 3


async def test_metered_grants_are_counted_before_act(world: World) -> None:
    world.server.tools.add(Broken())
    signature = await world.grant(ADA, "tool.call.broken", max_uses=2)
    assert (await world.ask(ADA, call("broken"))).code == "tool_failed"
    assert (await world.ask(ADA, call("broken", say=1))).is_error is True
    refused = await world.ask(ADA, call("broken"))
    assert refused.code == "capability_exhausted"
    assert await world.rows("capability_budget_exhausted") == [
        {
            "type": "capability_budget_exhausted",
            "signature_b58": signature,
            "action": "tool.call.broken",
            "max_uses": 2,
            "used": 2,
        }
    ]
    assert [row["outcome"] for row in await world.rows("tool_call_completed")] == ["failed", "error"]


async def test_many_at_once_do_not_use_more_than_there_is(world: World) -> None:
    await world.grant(ADA, "tool.call.echo", max_uses=5)
    answers: list[str] = []

    async def one() -> None:
        answers.append((await world.ask(ADA, call(text="hi"))).kind)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(one)
    assert sorted(answers) == ["error"] * 15 + ["tool_result"] * 5


async def test_caller_who_goes_away_leaves_row(world: World) -> None:
    broken = Broken()
    world.server.tools.add(broken)
    await world.grant(ADA, "tool.call.broken")
    async with anyio.create_task_group() as group:
        group.start_soon(world.ask, ADA, call("broken", hang=1))
        with anyio.fail_after(60):
            await broken.hangs.wait()
        group.cancel_scope.cancel()
    assert [row["outcome"] for row in await world.rows("tool_call_completed")] == ["failed"]


async def test_list_has_pages(world: World) -> None:
    for number in range(5):
        tool = Broken()
        tool.spec = ToolSpec(name=f"t{number}", description="", input_schema={"type": "object"})
        world.server.tools.add(tool)
    names, cursor = [], None
    while True:
        page = await world.ask(ADA, requests.ListTools(limit=3, cursor=cursor))
        names.append([tool.name for tool in page.tools])
        # A tool that is gone by the next page hides no other.
        world.server.tools.remove(names[-1][-1])
        if (cursor := page.next_cursor) is None:
            break
    assert names == [["clock", "echo", "t0"], ["t1", "t2", "t3"], ["t4"]]
    whole = await world.ask(ADA, requests.ListTools())
    assert "next_cursor" not in whole.model_dump(mode="json")
    assert (await world.ask(ADA, requests.ListTools(limit=0))).tools == ()


async def test_list_longer_than_a_frame_has_pages(world: World) -> None:
    for number in range(4):
        tool = Broken()
        tool.spec = ToolSpec(name=f"t{number}", description="x" * 3_000_000, input_schema={"type": "object"})
        world.server.tools.add(tool)
    first = await world.ask(ADA, requests.ListTools())
    assert first.next_cursor == first.tools[-1].name == "t1"
    second = await world.ask(ADA, requests.ListTools(cursor=first.next_cursor))
    assert ([tool.name for tool in second.tools], second.next_cursor) == (["t2", "t3"], None)
