"""The gate's HTTP side under mutated requests: it lives, never answers 500, tells no key, and serves the next request.

COVENANT_FUZZ_SECONDS sets how long, or COVENANT_FUZZ_REQUESTS how many. The file COVENANT_FUZZ_PROGRESS gets the count
as the test goes, so a killed run has said how far it came. A failure names the seed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import random
import threading
import time
from pathlib import Path

from sandbox.kernel.proc import pipes
from tests.kernel import fake_provider, fake_web, gated_models
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.fake_web import Web
from tests.kernel.gated_models import Gated

REQUESTS = int(os.environ.get("COVENANT_FUZZ_REQUESTS", "0"))
SECONDS = float("inf") if REQUESTS else float(os.environ.get("COVENANT_FUZZ_SECONDS", "15"))
PROGRESS = os.environ.get("COVENANT_FUZZ_PROGRESS")
WORKERS = 24 if REQUESTS else 6
TEXT = """
[providers.local]
kind = "mock"
[providers.fake]
kind = "openai-compatible"
endpoint = "{url}"
secret = "k"
[providers.finds]
kind = "searxng"
endpoint = "http://{search}"
secret = "k"
[fetch."mock.example"]
mock = true
"""
MODELS = [{"provider": "fake", "pattern": "big-*"}, {"provider": "local", "pattern": "test-*"}]
WEB = {
    "search": ["finds"],
    "fetch": ["mock.example"],
    "searches_per_minute": None,
    "max_results": 5,
    "fetches_per_minute": None,
}
CHAT = {"model": "test-1", "messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/responses": {"model": "test-1", "input": "hi", "tools": [{"type": "function", "name": "a"}]},
    "/v1/messages": CHAT | {"max_tokens": 5, "system": [{"type": "text", "text": "a"}]},
    "/v1beta/models/test-1:streamGenerateContent?alt=sse": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/api/chat": CHAT | {"options": {"num_predict": 3}},
    "/v1/embeddings": {"model": "big-1", "input": ["a", "b"]},
    "/fake/v1/chat/completions": CHAT | {"model": "big-1"},
}
PIECES = [
    b"\r\n", b"\n", b"\0", b"\xff", b" ", b"%00", b"%2e%2e/", b"//", b"..", b"\\", b'"', b"{", b"[" * 50, b"-1",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\n", b"Host: x\r\n", b"Upgrade: h2c\r\n", b"0\r\n\r\n",
    b"1e999", b"null", b"true", b'"stream": true,', b'"n": 5,', b"HTTP/1.0", b"https://", b"\xe2\x80\xae",
    b"test-1", b"big-1",
]  # fmt: skip


def seeds() -> list[bytes]:
    """Good requests of each API and name."""
    found = []
    for path, body in PATHS.items():
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: models.covenant\r\nContent-Type: application/json\r\n"
        found.append(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        found.append(f"{head}Transfer-Encoding: chunked\r\n\r\n{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n")
    # The sealed gate has no codec for what json takes this for.
    raw = b'\0"model": "test-1", "input": "hi"}'
    found.append(
        b"POST /v1/responses HTTP/1.1\r\nHost: models.covenant\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    found.append(b"GET /v1/models HTTP/1.1\r\nHost: models.covenant\r\n\r\n")
    found.append(b"GET /search?q=two+words&count=3 HTTP/1.1\r\nHost: search.covenant\r\n\r\n")
    found.append(b"GET /fetch?url=https://mock.example/a%3Fb HTTP/1.1\r\nHost: fetch.covenant\r\n\r\n")
    return found


def mutated(draw: random.Random, known: list[bytes]) -> bytes:
    """One request, changed in up to four places."""
    data = bytearray(draw.choice(known))
    for _ in range(draw.randint(0, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + draw.randint(1, 20)]
            case 2:
                data[at:at] = draw.choice(PIECES)
            case 3:
                other = draw.choice(known)
                cut = draw.randrange(len(other))
                data[at:at] = other[cut : cut + draw.randint(1, 60)]
            case _:
                data[at:at] = data[at : at + draw.randint(1, 40)]
    return bytes(data)


def answered(gated: Gated, request: bytes, seconds: float = 0.3) -> bytes:
    """Return the bytes that come back until the gate closes or is silent so long; a request may be a part of one."""
    data = b""
    with gated.connect() as line, contextlib.suppress(OSError):
        line.settimeout(seconds)
        line.sendall(request)
        while part := line.recv(65536):
            data += part
            if data.endswith((b"0\r\n\r\n", b"}", b"]")) or len(data) > 1 << 20:
                break
    return data


class Campaign:
    """State of all workers: the counts of the answers by their first bytes, and when to stop."""

    def __init__(self, first: int) -> None:
        self.first, self.counts = first, collections.Counter[bytes]()
        self._begun, self._lock, self._written = time.monotonic(), threading.Lock(), float("-inf")
        self._failed = False

    def goes_on(self) -> bool:
        """Whether another request is due."""
        enough = REQUESTS and self.counts.total() >= REQUESTS
        return not (self._failed or enough or time.monotonic() - self._begun > SECONDS)

    def count(self, found: bytes) -> None:
        """Count one answer."""
        with self._lock:
            self.counts[found[:12]] += 1

    def fail(self) -> None:
        """Stop all workers: one has found something."""
        self._failed = True

    def __str__(self) -> str:
        with self._lock:
            most = self.counts.most_common(12)
            seconds = time.monotonic() - self._begun
            return f"{self.counts.total()} requests in {seconds:.0f} s from seed {self.first}: {most}"

    def tell(self) -> None:
        """Write the counts down, at most once in 5 s."""
        if PROGRESS and time.monotonic() - self._written > 5:
            self._written = time.monotonic()
            Path(PROGRESS).write_text(f"{self}\n")


def work(gated: Gated, seed: int, campaign: Campaign) -> None:
    draw, known = random.Random(seed), seeds()
    try:
        while campaign.goes_on():
            request = mutated(draw, known)
            found = answered(gated, request)
            campaign.count(found)
            assert KEY.encode() not in found, (seed, request)
            assert not found.startswith(b"HTTP/1.1 500"), (seed, request, found)
    except BaseException:
        campaign.fail()
        raise


def look(gated: Gated, provider: Provider, search: Web, campaign: Campaign) -> None:
    """Take what the gate reports and what its providers were sent, so that nothing grows."""
    for fd, watch in gated.gate.watches.items():
        if pipes.readable(fd, 0):
            assert watch() is None, campaign.first
    gated.codes()
    gated.rows.clear()
    search.seen.clear()
    for _ in range(len(provider.seen)):
        one = provider.seen.pop()
        assert one["headers"].get("authorization") == f"Bearer {KEY}", campaign.first
        assert one["path"] in ("/v1/chat/completions", "/v1/embeddings"), campaign.first
    campaign.tell()


def test_mutated_requests_leave_the_gate_as_it_was() -> None:
    campaign = Campaign(int(os.environ.get("COVENANT_FUZZ_SEED", str(time.time_ns() % 1_000_000))))
    with (
        fake_provider.serving() as provider,
        fake_web.serving() as (search, _),
        concurrent.futures.ThreadPoolExecutor(WORKERS) as pool,
    ):
        text = TEXT.format(url=provider.url, search=search.place)
        names = ["models.covenant", "search.covenant", "fetch.covenant"]
        with gated_models.opened(text, {"fake": KEY, "finds": KEY}, models=MODELS, names=names, web=WEB) as gated:
            working = [pool.submit(work, gated, campaign.first + number, campaign) for number in range(WORKERS)]
            try:
                while not all(one.done() for one in working):
                    time.sleep(0.05)
                    look(gated, provider, search, campaign)
            finally:
                campaign.fail()
            for one in working:
                one.result()
            print(campaign)
            counts = campaign.counts
            assert gated.lives(), campaign.first
            assert counts.total() > max(50, REQUESTS - 1)
            assert b"HTTP/1.1 200" in counts
            assert b"HTTP/1.1 400" in counts
            for good in (seeds()[0], *seeds()[-2:]):
                assert answered(gated, good, 60).startswith(b"HTTP/1.1 200"), (campaign.first, good)
            look(gated, provider, search, campaign)
