#!/usr/bin/env python3
"""A request to a model through the service gate, beside the same provider asked directly by aiohttp.

    .venv/bin/python benchmarks/service_gate.py [requests]

    direct   aiohttp -> provider, over the loopback
    gate     aiohttp -> agent's link -> the gate's process -> connector's socket -> provider
    first    to the first byte of a stream, both ways
    body     a streamed body of 64 MiB, both ways

One after the other and in turn, over connections that are kept. Namespaces of our own, as root. The provider is a
process of aiohttp. Medians, and the medians of what the gate adds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
from aiohttp import web  # noqa: E402

from sandbox.kernel.net import netns  # noqa: E402
from tests.kernel import gated_models  # noqa: E402

_TEXT = '[providers.local]\nkind = "openai-compatible"\nendpoint = "http://127.0.0.1:{port}/v1"\n'
_EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "' + b"x" * 4000 + b'"}}]}\n\n'
_EVENTS = (64 << 20) // len(_EVENT)


def _provide(ready: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            usage = {"prompt_tokens": 10, "completion_tokens": 10}
            return web.json_response({"choices": [{"message": {"content": "x"}}], "usage": usage})
        made = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await made.prepare(request)
        for _ in range(_EVENTS if body.get("user") == "all" else 1):
            await made.write(_EVENT)
        await made.write(b"data: [DONE]\n\n")
        return made

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        made = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, made).start()
        ready.put(made.getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def _measure(urls: dict[str, str], count: int) -> dict[str, Any]:
    out: dict[str, list[float]] = {f"{name} {what}": [] for name in urls for what in ("answer", "first")}
    body = {"model": "test-1", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Host": "models.covenant"}
    async with aiohttp.ClientSession() as session:
        for number in range(count + 20):
            for name, url in urls.items():
                for what, more in (("answer", {}), ("first", {"stream": True})):
                    begin = time.perf_counter()
                    async with session.post(url, json={**body, **more}, headers=headers) as found:
                        await found.content.readany()
                        took = (time.perf_counter() - begin) * 1000
                        await found.read()
                        assert found.status == 200
                    if number >= 20:
                        out[f"{name} {what}"].append(took)
        rates = {}
        for name, url in urls.items():
            begin, size = time.perf_counter(), 0
            async with session.post(url, json={**body, "stream": True, "user": "all"}, headers=headers) as found:
                async for chunk in found.content.iter_any():
                    size += len(chunk)
            rates[name] = size / (time.perf_counter() - begin) / 1e6
    found_ms = {name: round(statistics.median(values), 3) for name, values in out.items()}
    return {**found_ms, **{f"{name} MB/s": round(rate, 1) for name, rate in rates.items()}}


def main() -> None:
    """Measure and print one JSON document."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    ready: Any = multiprocessing.Queue()
    provider = multiprocessing.Process(target=_provide, args=(ready,), daemon=True)
    provider.start()
    port = ready.get()
    with gated_models.opened(_TEXT.format(port=port)) as gated:
        path = "/v1/chat/completions"
        direct = asyncio.run(_measure({"direct": f"http://127.0.0.1:{port}{path}"}, count))
        through = netns.within(gated.agent, lambda: asyncio.run(_measure({"gate": f"http://192.0.0.1{path}"}, count)))
    provider.terminate()
    found = {**direct, **through}
    added = {
        f"added {what} ms": round(found[f"gate {what}"] - found[f"direct {what}"], 3) for what in ("answer", "first")
    }
    share = round(found["gate MB/s"] / found["direct MB/s"], 3)
    print(json.dumps({**found, **added, "gate / direct MB/s": share}, indent=1))


if __name__ == "__main__":
    main()
