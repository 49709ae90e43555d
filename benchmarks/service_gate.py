#!/usr/bin/env python3
"""A request to a model through the service gate, beside the same provider asked directly by aiohttp.

    .venv/bin/python benchmarks/service_gate.py [requests]

    direct   aiohttp -> provider, over the loopback
    gate     aiohttp -> agent's link -> the gate's process -> connector's socket -> provider
    first    to the first byte of a stream, both ways
    nginx    aiohttp -> nginx as a proxy that does not buffer -> provider, where Debian's nginx is installed
    body     a streamed body of 64 MiB, each way

One after the other and in turn, over connections that are kept. Namespaces of our own, as root. The provider is a
process of aiohttp. Medians, and the medians of what the gate adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
_NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream provider {{ server 127.0.0.1:{port}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{own};
        location / {{
            proxy_pass http://provider;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""
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


@contextlib.contextmanager
def _nginx(port: int) -> Iterator[dict[str, str]]:
    """Run nginx before the provider of this port, and yield its base URL by its name; nothing without nginx."""
    if (program := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        print("nginx is not installed: apt-get install nginx-light", file=sys.stderr)
        yield {}
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nginx.conf").write_text(_NGINX.format(folder=folder, own=own, port=port))
        words = ["-p", folder, "-e", "stderr", "-c", f"{folder}/nginx.conf"]
        with subprocess.Popen([program, *words], stdin=subprocess.DEVNULL) as server:
            try:
                _await_port(own, server)
                yield {"nginx": f"http://127.0.0.1:{own}"}
            finally:
                server.terminate()


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"nginx does not answer: status {server.poll()}")


def main() -> None:
    """Measure and print one JSON document."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    ready: Any = multiprocessing.Queue()
    provider = multiprocessing.Process(target=_provide, args=(ready,), daemon=True)
    provider.start()
    port = ready.get()
    with gated_models.opened(_TEXT.format(port=port)) as gated, _nginx(port) as more:
        path = "/v1/chat/completions"
        urls = {name: f"{url}{path}" for name, url in {"direct": f"http://127.0.0.1:{port}", **more}.items()}
        direct = asyncio.run(_measure(urls, count))
        through = netns.within(gated.agent, lambda: asyncio.run(_measure({"gate": f"http://192.0.0.1{path}"}, count)))
    provider.terminate()
    found = {**direct, **through}
    added = {
        f"added {what} ms": round(found[f"gate {what}"] - found[f"direct {what}"], 3) for what in ("answer", "first")
    }
    shares = {f"gate / {name} MB/s": round(found["gate MB/s"] / found[f"{name} MB/s"], 3) for name in urls}
    print(json.dumps({**found, **added, **shares}, indent=1))


if __name__ == "__main__":
    main()
