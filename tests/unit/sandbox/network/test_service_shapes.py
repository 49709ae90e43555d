"""The pure parts of the service gate: what is passed on, how answers are counted, and how limits are kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sandbox.network.service import mock, shapes
from sandbox.network.service.limits import ModelLimits
from sandbox.network.service.shapes import ModelCall, RefusedError
from sandbox.network.service.usage import StreamReader, TokenCount


def call(path: str, body: dict[str, Any], method: str = "POST") -> ModelCall:
    route, named = shapes.route(method, path, anthropic=False)
    return shapes.read(route, path, named, json.dumps(body).encode())


def anthropic(block: dict[str, Any]) -> dict[str, Any]:
    """A message with one block."""
    return {"model": "a", "messages": [{"role": "user", "content": [block]}]}


GEMINI = "/v1beta/models/test-1"
GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"model": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ),
    (
        "/v1/chat/completions",
        {"model": "a", "messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    ("/v1/responses", {"model": "a", "input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
    (
        "/v1/responses",
        {"model": "a", "input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
    ),
    ("/v1/embeddings", {"model": "a", "input": "x"}),
    ("/v1/messages", {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"model": "a", "messages": [], "tools": [{"type": "bash_20250124", "name": "bash"}]}),
    (f"{GEMINI}:generateContent", {"contents": [{"parts": [{"text": "x"}]}]}),
    ("/v1/models/test-1:generateContent", {"contents": [{"parts": [{"text": "x"}]}]}),
    (f"{GEMINI}:streamGenerateContent", {"contents": [], "tools": [{"functionDeclarations": []}]}),
    ("/api/chat", {"model": "a", "messages": [], "options": {"num_predict": 3}}),
]
anthropic_file = {"type": "document", "source": {"type": "file", "file_id": "x"}}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"model": "a", "input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"model": "a", "input": "x", "previous_response_id": "r"}),
    ("/v1/responses", {"model": "a", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]}),
    ("/v1/responses", {"model": "a", "input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://x"}]}]}),
    ("/v1/messages", {"model": "a", "messages": [], "mcp_servers": []}),
    ("/v1/responses", {"model": "a", "input": "x", "tools": [{"type": "mcp", "server_url": "https://example.com"}]}),
    ("/v1/responses", {"model": "a", "input": "x", "tools": [{"type": "namespace", "tools": [{"type": "mcp"}]}]}),
    ("/v1/responses", {"model": "a", "input": "x", "tools": [{"type": "namespace", "tools": [{"type": "namespace"}]}]}),
    ("/v1/messages", anthropic({"type": "image", "source": {"type": "url", "url": "x"}})),
    (
        "/v1/messages",
        anthropic({"type": "tool_result", "content": [anthropic_file]}),
    ),
    (f"{GEMINI}:generateContent", {"contents": [{"parts": [{"fileData": {"fileUri": "https://x"}}]}]}),
    (f"{GEMINI}:generateContent", {"contents": [], "cachedContent": "x"}),
    (f"{GEMINI}:generateContent", {"contents": [], "model": "models/other"}),
    ("/api/chat", {"model": "a", "messages": [], "tools": [{"type": "web"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_request_is_passed_on(path: str, body: dict[str, Any]) -> None:
    assert call(path, body).body == body


SEARCH, FUNCTION = {"type": "web_search"}, {"type": "function", "name": "f"}
FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
LEFT_OUT: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        "/v1/responses",
        {"tools": [SEARCH, FUNCTION, {"type": "image_generation"}], "tool_choice": "auto"},
        {"tools": [FUNCTION], "tool_choice": "auto"},
        ("image_generation", "web_search"),
    ),
    (
        "/v1/responses",
        {"tools": [SEARCH, FUNCTION], "tool_choice": "required"},
        {"tools": [FUNCTION], "tool_choice": "required"},
        ("web_search",),
    ),
    ("/v1/responses", {"tools": [SEARCH], "tool_choice": "auto"}, {}, ("web_search",)),
    (
        "/v1/messages",
        {"messages": [], "tools": [FETCH], "tool_choice": {"type": "auto"}},
        {"messages": []},
        ("web_fetch_20250910",),
    ),
    (
        f"{GEMINI}:generateContent",
        {"contents": [], "tools": [{"googleSearch": {}, "functionDeclarations": []}, {"url_context": {}}]},
        {"contents": [], "tools": [{"functionDeclarations": []}]},
        ("googleSearch", "url_context"),
    ),
]


@pytest.mark.parametrize(("path", "body", "passed", "left_out"), LEFT_OUT)
def test_tool_of_provider_is_left_out(
    path: str, body: dict[str, Any], passed: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    more = {} if path.startswith(GEMINI) else {"model": "a"}
    found = call(path, {**body, **more})
    assert found.body == {**passed, **more}
    assert found.left_out == left_out


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"tools": [SEARCH], "tool_choice": "required"}),
        ("/v1/responses", {"tools": [SEARCH, FUNCTION], "tool_choice": {"type": "web_search"}}),
        ("/v1/responses", {"tools": [SEARCH, FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [SEARCH]}}),
        ("/v1/messages", {"messages": [], "tools": [FETCH], "tool_choice": {"type": "any"}}),
        (
            f"{GEMINI}:generateContent",
            {"contents": [], "tools": [{"googleSearch": {}}], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        ),
    ],
)
def test_tool_of_provider_that_must_be_used(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="runs at the provider"):
        call(path, {**body, **({} if path.startswith(GEMINI) else {"model": "a"})})


@pytest.mark.parametrize(("path", "body"), BAD)
def test_request_for_more_is_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        call(path, body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/chat/completions", {"model": "a", "messages": []}, {"max_tokens": 10}),
        ("/v1/chat/completions", {"model": "a", "messages": [], "max_tokens": 99}, {"max_tokens": 10}),
        ("/v1/chat/completions", {"model": "a", "messages": [], "max_completion_tokens": 5},
         {"max_completion_tokens": 5}),
        ("/v1/messages", {"model": "a", "messages": [], "max_tokens": -1}, {"max_tokens": 10}),
        ("/v1/responses", {"model": "a", "input": "x"}, {"max_output_tokens": 10}),
        (f"{GEMINI}:generateContent", {"contents": []}, {"generationConfig": {"maxOutputTokens": 10}}),
        (
            f"{GEMINI}:generateContent",
            {"contents": [], "generation_config": {"max_output_tokens": 99}},
            {"generationConfig": {"maxOutputTokens": 10}},
        ),
        ("/api/chat", {"model": "a", "messages": [], "options": {"num_predict": -1}}, {"options": {"num_predict": 10}}),
    ],
)  # fmt: skip
def test_answer_is_bounded(path: str, body: dict[str, Any], found: dict[str, Any]) -> None:
    one = call(path, body)
    shapes.bound_output(one, 10)
    assert {name: one.body[name] for name in found} == found
    assert shapes.output_limit(one) == min(10, next(iter(found.values())) if path.startswith("/v1/") else 10)


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-16-le", "utf-32", "utf-8-sig"])
def test_body_is_utf_8_alone(encoding: str) -> None:
    route, named = shapes.route("POST", "/v1/chat/completions", anthropic=False)
    raw = json.dumps({"model": "a", "messages": []})
    assert shapes.read(route, "/v1/chat/completions", named, raw.encode()).model == "a"
    with pytest.raises(RefusedError) as refused:
        shapes.read(route, "/v1/chat/completions", named, raw.encode(encoding))
    assert (refused.value.status, refused.value.code) == (400, "malformed")


def test_several_answers_are_not_bounded() -> None:
    with pytest.raises(RefusedError):
        shapes.bound_output(call("/v1/chat/completions", {"model": "a", "messages": [], "n": 2}), 10)


@pytest.mark.parametrize(
    ("shape", "lines", "counts"),
    [
        ("openai", ['data: {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}'], (3, 4)),
        ("openai", ['data: {"response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}'], (3, 4)),
        (
            "anthropic",
            [
                'data: {"message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 2}}}',
                'data: {"type": "message_delta", "usage": {"output_tokens": 9}}',
            ],
            (5, 9),
        ),
        ("gemini", ['data: {"usageMetadata": {"promptTokenCount": 3, "thoughtsTokenCount": 3}}'], (3, 3)),
        ("ollama", ['{"done": false}', '{"done": true, "prompt_eval_count": 3, "eval_count": 4}'], (3, 4)),
        ("openai", ["data: {", "data: [DONE]", "", ": comment"], (0, 0)),
        ("openai", ['data: {"usage": {"prompt_tokens": -1, "completion_tokens": true}}'], (0, 0)),
    ],
)  # fmt: skip
def test_stream_is_counted(shape: shapes.Shape, lines: list[str], counts: tuple[int, int]) -> None:
    text = "\n\n".join(lines).encode() + b"\n\n"
    for size in (1, 7, 1000):
        count = TokenCount(shape)
        reader = StreamReader(count, strip=False)
        passed = b"".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size)) + reader.end()
        assert (count.input, count.output) == counts
        assert passed == text


def test_counts_that_were_not_asked_for_are_left_out() -> None:
    first, last = b'data: {"choices": [{"delta": {}}]}\n\n', b"data: [DONE]\n\n"
    only = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
    for size in (1, 5, 1000):
        count = TokenCount("openai")
        reader = StreamReader(count, strip=True)
        text = first + only + last
        passed = b"".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size)) + reader.end()
        assert passed == first + last
        assert (count.input, count.output, count.known) == (3, 4, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), GOOD)
def test_mock_answers_in_each_api(path: str, body: dict[str, Any], stream: bool) -> None:
    if "embed" in path:
        return
    one = call(path, body if "/models/" in path else {**body, "stream": stream})
    kind, parts = mock.answer(one)
    count = TokenCount(one.route.shape)
    reader = StreamReader(count, strip=False)
    shapes.with_usage(one)
    kind, parts = mock.answer(one)
    for part in parts:
        reader.feed(part)
    reader.end()
    assert count.known
    assert (kind == "application/json") == (not one.stream)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute_are_counted() -> None:
    async def main() -> None:
        clock = Clock()
        limits = ModelLimits(2, None, clock=clock)
        await limits.begin(None)
        clock.now = 30
        await limits.begin(None)
        with pytest.raises(RefusedError) as refused:
            await limits.begin(None)
        assert (refused.value.status, refused.value.retry_seconds) == (429, 31)
        clock.now = 60
        await limits.begin(None)

    asyncio.run(main())


def test_tokens_are_overrun_by_one_request() -> None:
    async def main() -> None:
        clock = Clock()
        limits = ModelLimits(None, 100, clock=clock)
        first = await limits.begin(60)
        # The second could cross the limit together with the first, and waits for it.
        second = asyncio.create_task(limits.begin(60))
        await asyncio.sleep(0)
        assert not second.done()
        await limits.end(first, 90)
        reserved = await second
        third = asyncio.create_task(limits.begin(1))
        await asyncio.sleep(0)
        assert not third.done()
        await limits.end(reserved, 60)
        with pytest.raises(RefusedError):
            await third
        clock.now = 3601
        await limits.begin(None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("shape", "lines", "counted"),
    [
        ("openai", [b'data: {"choices":[1],"usage":null}', b'data: {"usage" : {"prompt_tokens":3}}'], (3, 0)),
        ("openai", [b'data: {"choices":[{"delta":{"content":"\\"usage\\": {"}}]}'], None),
        ("anthropic", [b"event: x", b'data: {"message":{"usage":{"input_tokens":4}}}', b'data: {"delta":"a"}'], (4, 0)),
        ("gemini", [b'data: {"usageMetadata": {"promptTokenCount":5,"candidatesTokenCount":6}}'], (5, 6)),
        ("ollama", [b'{"response":"a","done":false}', b'{"done":true,"prompt_eval_count":7,"eval_count":8}'], (7, 8)),
        ("ollama", [b'{"done":true,"eval_count":8}'], (0, 8)),
    ],
)
def test_counts_are_found_in_streams(shape: Any, lines: list[bytes], counted: tuple[int, int] | None) -> None:
    whole = b"".join(line + b"\n\n" for line in lines)
    for size in (1, 7, len(whole)):
        count = TokenCount(shape)
        read = StreamReader(count, strip=False)
        passed = b"".join(read.feed(whole[at : at + size]) for at in range(0, len(whole), size)) + read.end()
        assert passed == whole
        assert ((count.input, count.output) if count.known else None) == counted
