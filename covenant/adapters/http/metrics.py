"""The daemon's metrics in the text format of Prometheus.

They contain only numbers, kinds of requests, error codes and, for the operator, keys of agents and names of what ends:
no text, no path, no token. The number of series is limited, as in ``sandbox.control.metrics``, which has the numbers of
the supervisor's runs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, get_args

import anyio.to_thread

from covenant.handlers import expiry
from covenant.handlers.access import authentication
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state.event_feed import TOPICS
from policy import budget
from sandbox.control import prometheus

CONTENT_TYPE: Final = prometheus.CONTENT_TYPE
# The most buckets with a series of their own: those with the fewest credits.
MAX_AGENTS: Final = 100
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")

_SECONDS: Final = "How long requests took, by kind."

Samples = Iterable[tuple[Mapping[str, str], float]]
Seconds = Iterable[tuple[Mapping[str, str], prometheus.Histogram]]


async def text(server: Server, caller: Caller) -> str:
    """Return all metrics for one scrape; callers other than the operator get no key and no name."""
    process = await anyio.to_thread.run_sync(_process)
    rows = [({"tier": tier}, count) for tier, count in (await server.memory.counts()).items()]
    families: list[tuple[str, str, str, Samples]] = [
        *_requests(server),
        *_stores(server),
        _credits(server, by_agent=caller.operator),
        *await _expiries(server, by_name=caller.operator),
        ("covenant_memory_rows", "gauge", "Records of memory.", rows),
        *process,
    ]
    # A copy, because the loop continues to count while a thread writes the text; its first import takes 110 ms.
    seconds = [({"kind": kind}, copy.deepcopy(one)) for kind, one in sorted(server.meter.seconds.items())]
    return await anyio.to_thread.run_sync(_written, families, seconds)


def _written(families: list[tuple[str, str, str, Samples]], seconds: Seconds) -> str:
    made = [prometheus.family(*one) for one in families]
    return prometheus.text([*made, prometheus.histograms("covenant_request_seconds", _SECONDS, seconds)])


def _requests(server: Server) -> Iterator[tuple[str, str, str, Samples]]:
    meter = server.meter
    outcomes = [({"kind": kind, "outcome": what}, n) for (kind, what), n in sorted(meter.outcomes.items())]
    yield "covenant_requests_total", "counter", "Requests, by kind and by the error's code or `ok`.", outcomes
    running = [({"kind": kind}, n) for kind, n in sorted(meter.running.items()) if n]
    yield "covenant_requests_running", "gauge", "Requests that are being answered.", running
    refused = [({"status": status}, n) for status, n in sorted(meter.refused.items())]
    yield "covenant_http_refusals_total", "counter", "Requests over HTTP that no handler saw, by status.", refused
    # From 0 on: Prometheus sees no increase in a series that begins at 1.
    unwritten = [({"transport": where}, meter.unwritten[where]) for where in get_args(authentication.Transport)]
    about = "Who was not let in and is in the log as a number alone, by transport."
    yield "covenant_refusals_unwritten_total", "counter", about, unwritten
    yield "covenant_streams", "gauge", "Streams that are open.", [({}, server.feed.subscribers)]
    dropped: Samples = [({}, server.feed.dropped)]
    yield "covenant_streams_dropped_total", "counter", "Streams that fell behind and were ended.", dropped


def _stores(server: Server) -> Iterator[tuple[str, str, str, Samples]]:
    yield "covenant_intents_running", "gauge", "Intents that live now.", [({}, len(server.live))]
    ended = [({"status": status}, n) for status, n in sorted(server.live.ended.items())]
    yield "covenant_intents_total", "counter", "Intents that ended, by how.", ended
    said = [({"topic": topic}, server.feed.published[topic]) for topic in TOPICS]
    yield "covenant_events_total", "counter", "Rows of the audit log, records of memory and events of intents.", said


def _credits(server: Server, *, by_agent: bool) -> tuple[str, str, str, Samples]:
    now = server.now_ms()
    buckets = sorted((budget.refill(bucket, now).tokens, key) for key, bucket in server.budget.buckets().items())
    if not by_agent:
        left = sum(tokens for tokens, _ in buckets)
        # Without a budget there is no sum: 0 would say that agents wait.
        total: Samples = [({}, left)] if buckets else []
        return "covenant_budget_credits", "gauge", "Credits that all agents together have left.", total
    shown = [({"agent": key}, tokens) for tokens, key in buckets[:MAX_AGENTS]]
    return "covenant_budget_credits", "gauge", "Credits that an agent has left.", shown


async def _expiries(server: Server, *, by_name: bool) -> list[tuple[str, str, str, Samples]]:
    found = await expiry.found(server)
    if by_name:
        ends = [({"what": one.what, "name": one.name}, one.expires_at_ms / 1000) for one in found[:MAX_AGENTS]]
        about = "When an envelope, a grant or a token ends, as a Unix time; the first to end."
    else:
        # The last that is written for a kind is the first to end.
        first = {one.what: one.expires_at_ms / 1000 for one in reversed(found)}
        ends = [({"what": what, "name": ""}, moment) for what, moment in sorted(first.items())]
        about = "When the first envelope, grant or token ends, as a Unix time."
    behind: Samples = [({}, server.clock.behind_ms / 1000)]
    return [
        ("covenant_expiry_timestamp_seconds", "gauge", about, ends),
        ("covenant_clock_behind_seconds", "gauge", "How far the clock is behind its latest time.", behind),
    ]


def _process() -> list[tuple[str, str, str, Samples]]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    # The command's name may contain spaces and brackets, so split after the last bracket.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    # One of them is the descriptor of this listing.
    descriptors = len(os.listdir("/proc/self/fd")) - 1
    return [
        ("process_resident_memory_bytes", "gauge", "Memory of the daemon.", [({}, resident)]),
        ("process_open_fds", "gauge", "Descriptors that the daemon holds.", [({}, descriptors)]),
        ("process_cpu_seconds_total", "counter", "Processor time of the daemon.", [({}, cpu)]),
    ]
