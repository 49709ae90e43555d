#!/usr/bin/env python3
"""A model that follows a script, on loopback beside an agent: it asks once for a shell command, then says it is done.

It speaks OpenAI's chat completions and responses, Anthropic's messages and Gemini's generateContent, each whole or as
server-sent events. The agent's own tools decide how the command is asked for. Without tools its first answer is the
text in MODEL_REPLY. With MODEL_ECHO its last chat completion is what the command printed. Its one argument is the port.
It returns to its caller as soon as it accepts connections.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMAND = os.environ.get("MODEL_COMMAND", "true")
REPLY = os.environ.get("MODEL_REPLY", "The greeting is committed.")
DONE = "The greeting is committed."
ECHO = bool(os.environ.get("MODEL_ECHO"))
# A tool that it asks for in place of a command: its name and arguments.
TOOL: tuple[str, dict[str, Any]] | None = None

# Tools that take a shell command, the likeliest first; then the key of the command in their arguments.
SHELLS = ("shell_command", "exec_command", "shell", "bash", "run_shell_command", "execute_command", "run_commands",
          "execute_shell_command", "run")  # fmt: skip
KEYS = ("command", "cmd", "commands", "code", "script", "shell_command")


def _call(tools: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and arguments of a call that runs the command, by the tools of a request."""
    known = {name.lower(): (name, schema) for name, schema in tools}
    if TOOL is not None:
        return TOOL if TOOL[0] in known else None
    for shell in SHELLS:
        if shell in known:
            name, schema = known[shell]
            return name, _arguments(schema)
    return None


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    fields = schema.get("properties") or {}
    given: dict[str, Any] = {}
    for key in schema.get("required") or []:
        kind = str((fields.get(key) or {}).get("type"))
        given[key] = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}.get(
            kind, "add a greeting"
        )
    key = next((one for one in KEYS if one in fields), "command")
    many = (fields.get(key) or {}).get("type") == "array"
    given[key] = ([COMMAND] if key == "commands" else ["sh", "-c", COMMAND]) if many else COMMAND
    return given


def _sse(events: list[Any], *, named: bool = False, end: bool = False) -> Iterator[bytes]:
    for event in events:
        head = f"event: {event['type']}\n" if named else ""
        yield f"{head}data: {json.dumps(event)}\n\n".encode()
    if end:
        yield b"data: [DONE]\n\n"


class Answer:
    """The answer to one request, before it has the form of a protocol. ``call`` is None where it is only text."""

    replied = False

    def __init__(self, tools: list[tuple[str, dict[str, Any]]], answered: bool, printed: str = "") -> None:
        self.call = None if answered else _call(tools)
        self.text = printed if ECHO and printed else DONE
        if not tools and not Answer.replied:
            Answer.replied = True
            self.text = REPLY


def _printed(message: dict[str, Any]) -> str:
    """Return what a tool's message says that its command printed, or all of it."""
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
    found = re.search(r"^Output: (.*?)\n(?:Error|Exit Code): ", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else text


def chat(body: dict[str, Any]) -> Any:
    """Answer a request of chat completions."""
    messages = body.get("messages") or []
    tools = [
        (t["function"]["name"], t["function"].get("parameters") or {})
        for t in body.get("tools") or []
        if "function" in t
    ]
    roles = [m.get("role") for m in messages]
    answer = Answer(tools, "tool" in roles, "".join(_printed(m) for m in messages if m.get("role") == "tool"))
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    reason = "stop"
    if answer.call:
        name, arguments = answer.call
        one = {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        message, reason = {"role": "assistant", "content": None, "tool_calls": [one]}, "tool_calls"
    usage = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
    base = {"id": "chat_1", "created": 1, "model": body.get("model", "fake")}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
    base["object"] = "chat.completion.chunk"
    chunks = [
        {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {**base, "choices": [], "usage": usage},
    ]
    return _sse(chunks, end=True)


def responses(body: dict[str, Any]) -> Any:
    """Answer a request of the responses API."""
    items = body.get("input") or []
    items = items if isinstance(items, list) else []
    tools = [(t["name"], t.get("parameters") or {}) for t in body.get("tools") or [] if t.get("type") == "function"]
    answered = any(str(i.get("type", "")).endswith("_call_output") for i in items)
    answer = Answer(tools, answered)
    if answer.call:
        name, arguments = answer.call
        item: dict[str, Any] = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name}
        item |= {"status": "completed", "arguments": json.dumps(arguments)}
    else:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 10,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 20}  # fmt: skip
    base = {"id": "resp_1", "object": "response", "created_at": 1, "model": body.get("model", "fake"),
            "parallel_tool_calls": False, "tool_choice": "auto", "tools": []}  # fmt: skip
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    if not body.get("stream"):
        return whole
    begun = {**item, "content": []} if item["type"] == "message" else {**item, "arguments": ""}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**base, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": begun},
    ]
    if item["type"] == "message":
        where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": []}
        events += [
            {"type": "response.content_part.added", **where, "part": empty},
            {"type": "response.output_text.delta", **where, "delta": answer.text},
            {"type": "response.output_text.done", **where, "text": answer.text},
            {"type": "response.content_part.done", **where, "part": {**empty, "text": answer.text}},
        ]
    else:
        where = {"item_id": "fc_1", "output_index": 0}
        events += [
            {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]},
            {"type": "response.function_call_arguments.done", **where, "arguments": item["arguments"]},
        ]
    events += [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return _sse([{**event, "sequence_number": number} for number, event in enumerate(events)], named=True)


def messages(body: dict[str, Any]) -> Any:
    """Answer a request of Anthropic's messages."""
    said = body.get("messages") or []
    blocks = [b for m in said if isinstance(m.get("content"), list) for b in m["content"]]
    tools = [(t["name"], t.get("input_schema") or {}) for t in body.get("tools") or []]
    answered = any(b.get("type") == "tool_result" for b in blocks)
    answer = Answer(tools, answered)
    usage = {"input_tokens": 10, "output_tokens": 10}
    block: dict[str, Any] = {"type": "text", "text": answer.text}
    reason, delta = "end_turn", {"type": "text_delta", "text": answer.text}
    start: dict[str, Any] = {"type": "text", "text": ""}
    if answer.call:
        name, arguments = answer.call
        block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments}
        reason, delta = "tool_use", {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        start = {**block, "input": {}}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model", "fake"),
               "content": [block], "stop_reason": reason, "stop_sequence": None, "usage": usage}  # fmt: skip
    if not body.get("stream"):
        return message
    return _sse(
        [
            {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": start},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ],
        named=True,
    )


def gemini(body: dict[str, Any], *, stream: bool) -> Any:
    """Answer a request of generateContent."""
    contents = body.get("contents") or []
    parts = [p for c in contents for p in c.get("parts") or []]
    declared = [d for t in body.get("tools") or [] for d in t.get("functionDeclarations") or []]
    tools = [(d["name"], d.get("parametersJsonSchema") or d.get("parameters") or {}) for d in declared]
    answer = Answer(tools, any("functionResponse" in p for p in parts))
    text = answer.text
    schema = (body.get("generationConfig") or {}).get("responseJsonSchema")
    if schema and not tools:
        text = json.dumps(_example(schema))
    part = {"functionCall": {"name": answer.call[0], "args": answer.call[1]}} if answer.call else {"text": text}
    found = {
        "candidates": [{"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 10, "totalTokenCount": 20},
        "modelVersion": "fake",
    }
    return _sse([found]) if stream else found


def _example(schema: dict[str, Any]) -> Any:
    """Return a value that a JSON schema allows, for the questions that an agent asks itself."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = str(schema.get("type", "object")).lower()
    if kind == "object":
        return {key: _example(one) for key, one in (schema.get("properties") or {}).items()}
    return {"array": [], "boolean": False, "integer": 1, "number": 1}.get(kind, "model")


def answer_to(path: str, body: dict[str, Any]) -> Any:
    """Return the document or the events that answer a request of this path."""
    path = path.partition("?")[0]
    if path.endswith("/chat/completions"):
        return chat(body)
    if path.endswith("/responses"):
        return responses(body)
    if path.endswith("/messages"):
        return messages(body)
    if path.endswith(("count_tokens", ":countTokens")):
        return {"input_tokens": 10, "totalTokens": 10}
    if re.search(r":(stream)?[gG]enerateContent$", path):
        return gemini(body, stream=":stream" in path)
    return {}


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of the agent."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        model = {"id": "fake", "object": "model", "created": 1, "owned_by": "fake"}
        self._send({"object": "list", "data": [model]})

    def do_HEAD(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        raw = self._body()
        body = json.loads(raw or b"{}")
        self._send(answer_to(self.path, body))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _send(self, found: Any) -> None:
        streamed = isinstance(found, Iterator)
        self.send_response(200)
        raw = b"".join(found) if streamed else json.dumps(found).encode()
        self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """Write nothing: the agent's terminal is not for it."""


def main() -> None:
    """Listen, then leave a child of this process that serves."""
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    if os.fork():
        return
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    server.serve_forever()


if __name__ == "__main__":
    main()
