#!/usr/bin/env python3
"""A request to a model through the service gate, beside the same provider asked directly by aiohttp.

    .venv/bin/python benchmarks/service_gate.py [requests]

    direct   aiohttp -> provider, over the loopback
    gate     aiohttp -> agent's link -> the gate's process -> connector's socket -> provider
    first    to the first byte of a stream, both ways
    nginx    aiohttp -> nginx as a proxy that does not buffer -> provider, where Debian's nginx is installed
    body     a streamed body of 64 MiB, each way
    crowd    200 streams at once, each of 50 events in 5 s; what serves them is held to one processor

One after the other and in turn, over connections that are kept. Namespaces of our own, as root. The provider is a
process of aiohttp. Medians, and the medians of what the gate adds. In a crowd the gate's processes stand beside a proxy
of aiohttp and one of nginx under the same hold: events that were lost, and how late the last event of a stream was.
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

import aiohttp
from aiohttp import web

from sandbox.kernel.net import netns
from tests.kernel import gated_models

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
_STREAMS, _TURNS, _GAP_SECONDS = 200, 50, 0.1
_PATH, _HEADERS = "/v1/chat/completions", {"Host": "models.covenant"}
_BODY = {"model": "test-1", "messages": [{"role": "user", "content": "hi"}]}


def _hold(pid: int, processors: set[int]) -> None:
    """Hold every thread of a process to these processors."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), processors)


def _apart() -> tuple[set[int], set[int]]:
    """Return one processor for what serves the crowd, and the others for its client and its provider."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def _forward(ready: Any, port: int) -> None:
    """Pass requests on by aiohttp alone, and answers part by part."""

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def answer(request: web.Request) -> web.StreamResponse:
                url, body = f"http://127.0.0.1:{port}{request.path}", await request.read()
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as found:
                    made = web.StreamResponse(status=found.status, headers={"Content-Type": found.content_type})
                    await made.prepare(request)
                    async for chunk in found.content.iter_any():
                        await made.write(chunk)
                    return made

            await _listen(answer, ready)

    asyncio.run(main())


async def _listen(answer: Any, ready: Any) -> None:
    app = web.Application()
    app.router.add_post(_PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    made = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, made, backlog=1024).start()
    ready.put(made.getsockname()[1])
    await asyncio.Event().wait()


def _provide(ready: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            usage = {"prompt_tokens": 10, "completion_tokens": 10}
            return web.json_response({"choices": [{"message": {"content": "x"}}], "usage": usage})
        made = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await made.prepare(request)
        if body.get("user") == "crowd":
            begin = time.monotonic()
            for number in range(_TURNS):
                await asyncio.sleep(begin + number * _GAP_SECONDS - time.monotonic())
                delta = {"content": f"{number} "}
                event = json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
                await made.write(b"data: " + event + b"\n\n")
        for _ in range(_EVENTS if body.get("user") == "all" else 1):
            await made.write(_EVENT)
        await made.write(b"data: [DONE]\n\n")
        return made

    asyncio.run(_listen(answer, ready))


async def _stream(session: aiohttp.ClientSession, url: str) -> tuple[int, float]:
    """Read one stream. Returns how many events came in their order, and the seconds to the last of them."""
    begin, said, last = time.perf_counter(), "", 0.0
    async with session.post(url, json={**_BODY, "stream": True, "user": "crowd"}, headers=_HEADERS) as found:
        if found.status != 200:
            return 0, 0.0
        async for line in found.content:
            if line.startswith(b"data: {") and b"xxxx" not in line:
                delta = json.loads(line[6:])["choices"][0]["delta"]
                said, last = said + delta["content"], time.perf_counter() - begin
    came = said.split()
    return sum(one == str(number) for number, one in enumerate(came)), last


async def _crowd(urls: dict[str, str]) -> dict[str, Any]:
    """200 streams at once by each way, in turn."""
    out: dict[str, Any] = {}
    for name, url in urls.items():
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            found = await asyncio.gather(*(_stream(session, url) for _ in range(_STREAMS)), return_exceptions=True)
        whole = [one for one in found if isinstance(one, tuple)]
        late = [last - (_TURNS - 1) * _GAP_SECONDS for count, last in whole if count == _TURNS]
        out[f"crowd {name} streams"] = len(late)
        out[f"crowd {name} events lost"] = _STREAMS * _TURNS - sum(count for count, _ in whole)
        out[f"crowd {name} late s"] = round(statistics.median(late), 3) if late else None
        out[f"crowd {name} latest s"] = round(max(late), 3) if late else None
    return out


async def _measure(urls: dict[str, str], count: int) -> dict[str, Any]:
    out: dict[str, list[float]] = {f"{name} {what}": [] for name in urls for what in ("answer", "first")}
    body, headers = _BODY, _HEADERS
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
def _nginx(port: int) -> Iterator[dict[str, tuple[int, str]]]:
    """Run nginx before the provider of this port. Yields its process and its base URL by its name, if it is there."""
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
                yield {"nginx": (server.pid, f"http://127.0.0.1:{own}")}
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


def _started(target: Any, *words: Any) -> tuple[Any, int]:
    """Start a process that listens. Returns it with its port."""
    ready: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=target, args=(ready, *words), daemon=True)
    process.start()
    return process, ready.get()


def main() -> None:
    """Measure and print one JSON document."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    provider, port = _started(_provide)
    forward, at = _started(_forward, port)
    with gated_models.opened(_TEXT.format(port=port)) as gated, _nginx(port) as more:
        beside = {"aiohttp": (forward.pid, f"http://127.0.0.1:{at}"), **more}
        urls = {name: f"{url}{_PATH}" for name, (_, url) in beside.items()}
        urls = {"direct": f"http://127.0.0.1:{port}{_PATH}", **urls}
        own = {"gate": f"http://192.0.0.1{_PATH}"}
        direct = asyncio.run(_measure(urls, count))
        through = netns.within(gated.agent, lambda: asyncio.run(_measure(own, count)))
        one, others = _apart()
        for pid in (*(each.pid for each in gated.gate.processes), *(pid for pid, _ in beside.values())):
            _hold(pid, one)
        for pid in (os.getpid(), provider.pid):
            _hold(pid, others)
        crowd = asyncio.run(_crowd(urls))
        crowd |= netns.within(gated.agent, lambda: asyncio.run(_crowd(own)))
    for process in (provider, forward):
        process.terminate()
    found = {**direct, **through}
    added = {
        f"added {what} ms": round(found[f"gate {what}"] - found[f"direct {what}"], 3) for what in ("answer", "first")
    }
    shares = {f"gate / {name} MB/s": round(found["gate MB/s"] / found[f"{name} MB/s"], 3) for name in urls}
    print(json.dumps({**found, **added, **shares, **crowd}, indent=1))


if __name__ == "__main__":
    main()
