"""A provider without a model: it answers in each API with the last words that it was sent. For tests and trials."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sandbox.network.service.shapes import ModelCall


def answer(call: ModelCall) -> tuple[str, list[bytes]]:
    """Return the content type of the answer, and its parts: more than one for a stream."""
    text = f"mock: {_last(call)}"
    counted = (_tokens(json.dumps(call.body)), _tokens(text))
    if call.route.operation == "count":
        count = {"input_tokens": counted[0]} if call.route.shape == "anthropic" else {"totalTokens": counted[0]}
        return "application/json", [_json(count)]
    if call.route.operation == "embed":
        return "application/json", [_json(_embedding(call, counted[0]))]
    if call.route.operation == "version":
        return "application/json", [_json({"version": "0.0.0"})]
    make = {"openai": _openai, "anthropic": _anthropic, "gemini": _gemini, "ollama": _ollama}[call.route.shape]
    if call.route.shape == "openai" and call.path == "/v1/responses":
        make = _responses
    documents = list(make(call, text, counted))
    if not call.stream:
        return "application/json", [_json(documents[0][1])]
    if call.route.shape == "ollama":
        return "application/x-ndjson", [_json(document) + b"\n" for _, document in documents]
    named = call.route.shape == "anthropic" or call.path == "/v1/responses"
    parts = [_event(name if named else "", one) for name, one in documents]
    if call.route.shape == "openai" and not named:
        parts.append(b"data: [DONE]\n\n")
    return "text/event-stream", parts


Documents = Iterator[tuple[str, dict[str, Any]]]


def _openai(call: ModelCall, text: str, counted: tuple[int, int]) -> Documents:
    usage = {"prompt_tokens": counted[0], "completion_tokens": counted[1], "total_tokens": sum(counted)}
    chat = call.path == "/v1/chat/completions"
    kind = "chat.completion" if chat else "text_completion"
    base = {"id": "mock-1", "object": kind, "created": 0, "model": call.model}
    if not call.stream:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        yield "", {**base, "choices": [{"index": 0, "finish_reason": "stop", **said}], "usage": usage}
        return
    base["object"] = f"{kind}.chunk" if chat else kind
    for index, word in enumerate(_words(text)):
        first: dict[str, Any] = {"role": "assistant"} if index == 0 else {}
        part: dict[str, Any] = {"delta": {**first, "content": word}} if chat else {"text": word}
        yield "", {**base, "choices": [{"index": 0, "finish_reason": None, **part}]}
    last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    yield "", {**base, "choices": [{"index": 0, "finish_reason": "stop", **last}]}
    if call.body.get("stream_options", {}).get("include_usage"):
        yield "", {**base, "choices": [], "usage": usage}


def _responses(call: ModelCall, text: str, counted: tuple[int, int]) -> Documents:
    usage = {
        "input_tokens": counted[0],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counted[1],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sum(counted),
    }
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    base = {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "model": call.model,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    if not call.stream:
        yield "", whole
        return
    number = 0
    opening = {**base, "status": "in_progress", "output": []}
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": opening},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **at, "delta": word, "logprobs": []} for word in _words(text)),
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    for number, event in enumerate(events):
        yield event["type"], {**event, "sequence_number": number}


def _anthropic(call: ModelCall, text: str, counted: tuple[int, int]) -> Documents:
    base = {"id": "msg_mock", "type": "message", "role": "assistant", "model": call.model, "stop_sequence": None}
    if not call.stream:
        usage = {"input_tokens": counted[0], "output_tokens": counted[1]}
        block = {"type": "text", "text": text}
        yield "", {**base, "content": [block], "stop_reason": "end_turn", "usage": usage}
        return
    begun = {"input_tokens": counted[0], "output_tokens": 1}
    start: dict[str, Any] = {**base, "content": [], "stop_reason": None, "usage": begun}
    yield "message_start", {"type": "message_start", "message": start}
    block = {"type": "text", "text": ""}
    yield "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
    for word in _words(text):
        delta = {"type": "text_delta", "text": word}
        yield "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}
    yield "content_block_stop", {"type": "content_block_stop", "index": 0}
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": stop, "usage": {"output_tokens": counted[1]}}
    yield "message_stop", {"type": "message_stop"}


def _gemini(call: ModelCall, text: str, counted: tuple[int, int]) -> Documents:
    usage = {
        "promptTokenCount": counted[0],
        "candidatesTokenCount": counted[1],
        "totalTokenCount": sum(counted),
    }
    parts = _words(text) if call.stream else [text]
    for index, word in enumerate(parts):
        last = index == len(parts) - 1
        content = {"role": "model", "parts": [{"text": word}]}
        candidate = {"content": content, "index": 0, **({"finishReason": "STOP"} if last else {})}
        yield "", {"candidates": [candidate], "usageMetadata": usage, "modelVersion": call.model}


def _ollama(call: ModelCall, text: str, counted: tuple[int, int]) -> Documents:
    base = {"model": call.model, "created_at": "1970-01-01T00:00:00Z"}
    counts = {"prompt_eval_count": counted[0], "eval_count": counted[1]}
    parts = [*_words(text), ""] if call.stream else [text]
    for index, word in enumerate(parts):
        said = {"message": {"role": "assistant", "content": word}} if call.path == "/api/chat" else {"response": word}
        last = index == len(parts) - 1
        yield "", {**base, **said, "done": last, **({"done_reason": "stop", **counts} if last else {})}


def _embedding(call: ModelCall, tokens: int) -> dict[str, Any]:
    vectors = [[round(ord(c) % 16 / 16, 4) for c in f"{text:8.8}"] for text in _texts(call)]
    if call.route.shape == "openai":
        rows = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": rows, "model": call.model, "usage": usage}
    if call.route.shape == "ollama":
        return {"model": call.model, "embeddings": vectors, "prompt_eval_count": tokens}
    if "requests" in call.body:
        return {"embeddings": [{"values": one} for one in vectors]}
    return {"embedding": {"values": vectors[0]}}


def _texts(call: ModelCall) -> list[str]:
    """The texts to embed: a list of them has a vector each."""
    found = call.body.get("requests") or call.body.get("input")
    if isinstance(found, list) and all(isinstance(one, str | dict) for one in found):
        return [_text(one) for one in found]
    return [_last(call)]


def _event(name: str, document: dict[str, Any]) -> bytes:
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + _json(document) + b"\n\n"


def _last(call: ModelCall) -> str:
    """The last text of a request."""
    body = call.body
    names = ("messages", "contents", "content", "input", "prompt")
    return _text(next((body[name] for name in names if body.get(name)), ""))


def _text(found: Any) -> str:
    """The last text in a part of a request."""
    while isinstance(found, list | dict):
        if isinstance(found, list):
            found = found[-1] if found else ""
        else:
            found = found.get("content") or found.get("parts") or found.get("text") or ""
    return found if isinstance(found, str) else ""


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [word if index == 0 else f" {word}" for index, word in enumerate(words)]


def _tokens(text: str) -> int:
    return max(1, len(text.split()))


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
