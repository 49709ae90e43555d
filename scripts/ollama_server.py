"""Serve Ollama's HTTP API on the loopback, without weights: each model answers with the last words of its request.

    .venv/bin/python -m scripts.ollama_server --model llama3.2

For the demo and the tests. It prints its endpoint when it is ready. Routes, streams, statistics and errors are those of
Ollama's docs/api.md and docs/openai.md; the texts come from the service gate's own mock. Ollama's client passes it
(tests/kernel/test_model_sdks.py). Models are neither pulled nor made, and `format` is not obeyed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from sandbox.network.service import mock, shapes
from sandbox.network.service.shapes import ModelCall

ROOT = Path(__file__).resolve().parents[1]
_BODY_BYTES = 64 << 20
_ANSWERED = (
    *("/api/chat", "/api/generate", "/api/embed"),
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
)
_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "0B",
    "quantization_level": "F16",
}
# What the client asks before it sends tools or asks for thinking: such a request is refused.
_CAPABILITIES = ("completion", "embedding")
_UNSUPPORTED = {"tools": "tools", "think": "thinking"}


class ApiError(Exception):
    """A request that is refused, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def tagged(name: str) -> str:
    """The name of a model with its tag: `latest` unless it has one."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


class OllamaServer:
    """The routes of one server; ``models`` are the names that it has."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = {tagged(name): name for name in models}
        self.app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_refusals])
        self.app.add_routes([web.post(path, self.answer) for path in _ANSWERED])
        self.app.add_routes(
            [
                web.post("/api/embeddings", self.embeddings),
                web.post("/api/show", self.show),
                web.get("/api/tags", self.tags),
                web.get("/api/ps", self.running),
                web.get("/api/version", self.version),
                web.get("/v1/models", self.listed),
                web.get("/", self.root),
            ]
        )

    # --- models -----------------------------------------------------------------------------------------------

    async def root(self, _: web.Request) -> web.Response:
        """Say that it is there."""
        return web.Response(text="Ollama is running")

    async def version(self, _: web.Request) -> web.Response:
        """The version; of a server without one."""
        return web.json_response({"version": "0.0.0"})

    async def tags(self, _: web.Request) -> web.Response:
        """The models that are here."""
        return web.json_response({"models": [_described(name) for name in self._models]})

    async def running(self, _: web.Request) -> web.Response:
        """The models that are loaded: none ever is."""
        return web.json_response({"models": []})

    async def listed(self, _: web.Request) -> web.Response:
        """The models as OpenAI lists them."""
        return web.Response(body=shapes.listing("openai", tuple(self._models)), content_type="application/json")

    async def show(self, request: web.Request) -> web.Response:
        """One model."""
        described = _described(self._model(await _body(request)))
        shown = {"modified_at": described["modified_at"], "details": _DETAILS, "capabilities": _CAPABILITIES}
        return web.json_response({**shown, "model_info": {"general.architecture": "llama"}})

    def _model(self, body: dict[str, Any]) -> str:
        """The name of a request's model, as the request has it.

        Raises:
            ApiError: the request names none, or one that is not here.
        """
        name = body.get("model") or body.get("name")
        if not isinstance(name, str):
            raise ApiError(400, "model is required")
        if tagged(name) not in self._models:
            raise ApiError(404, f"model '{name}' not found")
        return name

    # --- answers ----------------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for text, or for vectors."""
        begun = time.monotonic_ns()
        call = self._call(request.path, await _body(request))
        if call.route.shape != "ollama":
            return await _sent(request, *mock.answer(call))
        if _only_loads(call):
            documents = [_loaded(call)]
        else:
            documents = _documents(call)
            documents[-1] |= _durations(call, time.monotonic_ns() - begun)
        if call.route.operation == "generate":
            now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
            documents = [{**one, "created_at": now} for one in documents]
        lines = [json.dumps(one).encode() + b"\n" for one in documents]
        return await _sent(request, "application/x-ndjson" if call.stream else "application/json", lines)

    async def embeddings(self, request: web.Request) -> web.Response:
        """One vector, by the older route."""
        body = await _body(request)
        call = self._call("/api/embed", {"model": body.get("model"), "input": body.get("prompt", "")})
        return web.json_response({"embedding": _documents(call)[0]["embeddings"][0]})

    def _call(self, path: str, body: dict[str, Any]) -> ModelCall:
        found, _ = shapes.route("POST", path, anthropic=False)
        name = self._model(body)
        native = found.shape == "ollama"
        for key, what in _UNSUPPORTED.items():
            if native and body.get(key):
                raise ApiError(400, f'"{name}" does not support {what}')
        stream = body.get("stream", native and found.operation == "generate")
        if type(stream) is not bool:
            raise ApiError(400, "json: cannot unmarshal `stream` into a value of type bool")
        return ModelCall(found, path, name, stream, body)


def _documents(call: ModelCall) -> list[dict[str, Any]]:
    return [json.loads(part) for part in mock.answer(call)[1]]


def _only_loads(call: ModelCall) -> bool:
    """Whether a request has nothing to answer: it loads its model, or unloads it."""
    wanted = {"/api/chat": "messages", "/api/generate": "prompt"}.get(call.path)
    return wanted is not None and not call.body.get(wanted)


def _loaded(call: ModelCall) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": ""}} if call.path == "/api/chat" else {"response": ""}
    reason = "unload" if call.body.get("keep_alive") == 0 else "load"
    return {"model": call.model, **said, "done_reason": reason, "done": True}


def _durations(call: ModelCall, total: int) -> dict[str, int]:
    """The durations in the document that ends an answer, in nanoseconds."""
    whole = {"total_duration": total, "load_duration": 0}
    halves = {"prompt_eval_duration": total // 2, "eval_duration": total - total // 2}
    return whole | halves if call.route.operation == "generate" else whole


def _described(name: str) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    modified = "2026-01-01T00:00:00Z"
    return {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": digest, "details": _DETAILS}


# --- requests and answers -------------------------------------------------------------------------------------------


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        raise ApiError(400, "missing request body")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"invalid JSON: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "json: cannot unmarshal the body into a value of type object")
    return body


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an ``ApiError`` in the form of the route's API."""
    try:
        return await handler(request)
    except ApiError as e:
        error: Any = e.message
        if request.path.startswith("/v1/"):
            kind = "not_found_error" if e.status == 404 else "invalid_request_error"
            error = {"message": e.message, "type": kind, "param": None, "code": None}
        return web.json_response({"error": error}, status=e.status)


async def _sent(request: web.Request, kind: str, parts: Sequence[bytes]) -> web.StreamResponse:
    """Send an answer, each part in a chunk of its own."""
    if kind == "application/json":
        return web.Response(body=b"".join(parts), content_type=kind)
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


async def serve(models: Sequence[str], port: int) -> None:
    """Serve until the process ends; print the endpoint when it answers."""
    runner = web.AppRunner(OllamaServer(models).app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def running(*models: str) -> Iterator[str]:
    """Run a server with these models in a process of its own while the block lasts. Yields its endpoint."""
    words = [word for name in models for word in ("--model", name)]
    command = [sys.executable, "-m", "scripts.ollama_server", "--port", "0", *words]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not (endpoint := server.stdout.readline().strip()):
                raise OSError(f"the server of models did not start: status {server.wait()}")
            yield endpoint
        finally:
            server.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="NAME", help="a model that it has (default: llama3.2)")
    parser.add_argument("--port", type=int, default=11434, help="0 takes a free one (default: 11434)")
    words = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(words.model or ["llama3.2"], words.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
