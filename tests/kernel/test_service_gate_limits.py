"""Limits, fallback and broken answers of the service gate, in its real processes before providers on the loopback."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.network.gate import credit_meter
from tests.kernel import fake_provider, gated_models
from tests.kernel.fake_provider import Provider
from tests.kernel.gated_models import Gated
from tests.kernel.live_runs import until

TWO = """
[providers.first]
kind = "openai-compatible"
endpoint = "{first}"
timeout_seconds = 5
[providers.second]
kind = "openai-compatible"
endpoint = "{second}"
"""
GRANTED = [{"provider": "first", "pattern": "test-*"}, {"provider": "second", "pattern": "test-*"}]


@pytest.fixture
def pair() -> Iterator[tuple[Provider, Provider]]:
    with fake_provider.serving() as first, fake_provider.serving() as second:
        yield first, second


def text(first: str, second: str) -> str:
    return TWO.format(first=first, second=second)


def begin(gated: Gated, path: str = "/v1/chat/completions", **more: Any) -> http.client.HTTPResponse:
    """Send a request; its answer has begun."""
    body = json.dumps({"model": "test-1", "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    line = gated.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: models.covenant\r\nContent-Length: {len(body)}\r\n\r\n"
    line.sendall(head.encode() + body)
    found = http.client.HTTPResponse(line)
    line.close()  # the answer has its own hold on it
    found.begin()
    return found


def ask(gated: Gated, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
    found = begin(gated, path, **more)
    return found.status, json.loads(found.read())


def test_failed_provider_falls_back_in_order(pair: tuple[Provider, Provider]) -> None:
    first, second = pair
    with gated_models.opened(text(first.url, second.url), models=GRANTED) as gated:
        assert ask(gated)[1]["choices"][0]["message"]["content"] == f"from {first.server_port}"
        first.status = 503
        assert ask(gated)[1]["choices"][0]["message"]["content"] == f"from {second.server_port}"
        assert gated.codes() == ["provider_failed"]
        assert ask(gated, "/first/v1/chat/completions")[0] == 503
        second.status = 500
        assert ask(gated)[0] == 500
        until(lambda: gated.has(4))  # a row comes after the answer
        assert [(one.provider, one.status) for one in gated.asked] == [
            ("first", 200), ("second", 200), ("first", 503), ("second", 500)
        ]  # fmt: skip


def test_provider_that_is_gone_falls_back(pair: tuple[Provider, Provider]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with gated_models.opened(text(gone, pair[1].url), models=GRANTED) as gated:
            assert ask(gated)[0] == 200
        with gated_models.opened(text(gone, gone), models=GRANTED) as gated:
            status, document = ask(gated)
            assert (status, document["error"]["code"]) == (502, "no_provider")


def test_limits_are_answered_in_the_form_of_the_api() -> None:
    with gated_models.opened(requests_per_minute=2) as gated:
        assert [ask(gated)[0] for _ in range(2)] == [200, 200]
        found = begin(gated)
        document = json.loads(found.read())
        assert (found.status, document["error"]["type"], document["error"]["code"]) == (
            429,
            "rate_limit_exceeded",
            "limit",
        )
        assert 0 < int(found.headers["Retry-After"]) <= 61
        status, document = ask(gated, "/v1/messages", max_tokens=5)
        assert (status, document["type"], document["error"]["type"]) == (429, "error", "rate_limit_error")
        gated.look()
        assert len(gated.asked) == 2


def test_tokens_are_overrun_by_one_request_at_most(pair: tuple[Provider, Provider]) -> None:
    """Each answer is 18 tokens: the third crosses 50, also when twenty come at once."""
    pair[0].gap_seconds = 0.05
    with (
        gated_models.opened(text(pair[0].url, pair[1].url), models=GRANTED, tokens_per_hour=50) as gated,
        concurrent.futures.ThreadPoolExecutor(20) as pool,
    ):
        found = [one.result()[0] for one in [pool.submit(ask, gated) for _ in range(20)]]
        assert (found.count(200), found.count(429)) == (3, 17)
        gated.look()
        assert sum(one.input_tokens + one.output_tokens for one in gated.asked) == 54


def test_credits_are_overrun_by_one_request_at_most(pair: tuple[Provider, Provider]) -> None:
    """Each answer is 11 tokens in and 7 out, 36 credits: the third crosses 100, also when twenty come at once."""
    pair[0].gap_seconds = 0.05
    prices = "input_price = 2_000_000\noutput_price = 2_000_000\n"
    priced = text(pair[0].url, pair[1].url).replace("timeout_seconds = 5\n", prices)
    with (
        gated_models.opened(priced, models=GRANTED, credits=100) as gated,
        concurrent.futures.ThreadPoolExecutor(20) as pool,
    ):
        found = [one.result() for one in [pool.submit(ask, gated) for _ in range(20)]]
        statuses = [status for status, _ in found]
        assert (statuses.count(200), statuses.count(429)) == (3, 17)
        refused = next(document for status, document in found if status == 429)
        assert "the budget of this run is spent: 108 of 100 credits" in refused["error"]["message"]
        assert ask(gated, "/second/v1/chat/completions")[0] == 200  # it has no price
        gated.look()
        assert sum(one.input_tokens + one.output_tokens for one in gated.asked if one.provider == "first") == 54


def test_credits_are_spent_by_all_gates_of_a_tree(pair: tuple[Provider, Provider]) -> None:
    prices = "input_price = 2_000_000\noutput_price = 2_000_000\n"
    priced = text(pair[0].url, pair[1].url).replace("timeout_seconds = 5\n", prices)
    with contextlib.ExitStack() as stack:
        meter = credit_meter.create(stack)
        parent, child = (
            stack.enter_context(gated_models.opened(priced, models=GRANTED, credits=100, meter=meter)) for _ in "12"
        )
        assert [ask(one)[0] for one in (parent, child, child)] == [200] * 3
        until(lambda: credit_meter.spent(meter) == 108)  # a gate counts once its client has the answer
        for one in (parent, child):
            status, document = ask(one)
            assert status == 429
            assert "is spent: 108 of 100 credits" in document["error"]["message"]


def test_answer_is_bounded_at_the_provider(pair: tuple[Provider, Provider]) -> None:
    with gated_models.opened(text(pair[0].url, pair[1].url), models=GRANTED, max_output_tokens=7) as gated:
        ask(gated)
        ask(gated, max_tokens=1000)
        ask(gated, max_completion_tokens=3)
        assert ask(gated, n=2)[0] == 400
    sent = [{name: one["body"].get(name) for name in ("max_tokens", "max_completion_tokens")} for one in pair[0].seen]
    assert sent == [
        {"max_tokens": 7, "max_completion_tokens": None},
        {"max_tokens": 7, "max_completion_tokens": None},
        {"max_tokens": None, "max_completion_tokens": 3},
    ]


def test_200_streams_at_once_lose_nothing(pair: tuple[Provider, Provider]) -> None:
    pair[0].parts, pair[0].gap_seconds = 5, 0.05

    def stream(gated: Gated) -> bytes:
        return begin(gated, stream=True).read()

    with (
        gated_models.opened(text(pair[0].url, pair[1].url), models=GRANTED) as gated,
        concurrent.futures.ThreadPoolExecutor(200) as pool,
    ):
        found = [one.result() for one in [pool.submit(stream, gated) for _ in range(200)]]
    assert all(one.count(b"part") == 5 and one.endswith(b"data: [DONE]\n\n") for one in found)


def test_client_that_leaves_ends_the_provider_s_stream(pair: tuple[Provider, Provider]) -> None:
    pair[0].parts, pair[0].gap_seconds = 1000, 0.02
    with gated_models.opened(text(pair[0].url, pair[1].url), models=GRANTED) as gated:
        found = begin(gated, stream=True)
        assert found.read(10)
        found.close()
        assert pair[0].cut.wait(20)
        until = time.monotonic() + 20
        while not gated.asked and time.monotonic() < until:
            gated.look()
            time.sleep(0.02)
        assert [(one.whole, one.counted) for one in gated.asked] == [(False, False)]
        assert gated.asked[0].output_tokens > 0


def test_gate_that_is_killed_cuts_the_stream_and_has_its_row(pair: tuple[Provider, Provider]) -> None:
    pair[0].parts, pair[0].gap_seconds = 1000, 0.02
    with gated_models.opened(text(pair[0].url, pair[1].url), models=GRANTED) as gated:
        found = begin(gated, stream=True)
        assert found.read(10)
        os.kill(gated.gate.processes[1].pid, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            found.read()
        assert pair[0].cut.wait(20)
        gated.gate.end()
        assert [(one.provider, one.whole) for one in gated.asked] == [("first", False)]
        with pytest.raises(errors.KernelError, match="refused"):
            begin(gated)
