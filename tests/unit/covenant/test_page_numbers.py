"""The numbers that the pages of the daemon say are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covenant.adapters.http import gateway
from covenant.handlers import identity, paging
from covenant.handlers.intents import budget
from covenant.handlers.memory import records
from covenant.handlers.state import event_feed
from covenant.runtime import packages
from covenant.stores.capabilities import book
from covenant.stores.mailbox.interface import Limits
from covenant.stores.memory import durable
from covenant.stores.memory.index import ranking
from covenant.wire import frames
from policy.capabilities import chain
from policy.data import price_table

_MIB = 1024 * 1024
_HTTP = gateway.HttpBounds()
_BUYS = price_table.prices()
_COUNTS = ["no", "one", "two", "three", "four", "five", "six"]

SAID = [
    ("daemon.md", f"at {paging.ROOM // _MIB} MiB of rows"),
    ("http.md", f"One JSON object of at most {frames.MAX_BYTES // _MIB} MiB"),
    ("http.md", f"whole within {_HTTP.body_seconds:.0f} s"),
    ("http.md", f"streams of one caller ({_HTTP.streams_of_one})"),
    ("http.md", f"wrong tokens in one second ({_HTTP.wrong_tokens})"),
    ("http.md", f"that is {event_feed.DEPTH:,} events behind"),
    ("http.md", f"comes every {_COUNTS[int(_HTTP.pace.idle_seconds)]} seconds"),
    ("intents.md", f"Up to {packages.MOST_PACKAGES:,} are known and up to {packages.MOST_REFUSED} listed"),
    ("memory.md", f"at most {records.MAX_RECORDS:,} records"),
    ("memory.md", f"at most {records.MAX_RECORD_BYTES // _MIB} MiB on the wire"),
    ("memory.md", f"its text {records.MAX_TEXT_BYTES // _MIB} MiB"),
    ("memory.md", f"have {records.MAX_OWN.records:,} records and {records.MAX_OWN.bytes // _MIB // 1024} GiB"),
    ("memory.md", f"more than {ranking.COMMON:,} of the records"),
    ("memory.md", f"in {ranking.MOST_RANKED:,} records together"),
    ("memory.md", f"more than {durable.MOST_WARM_BYTES // _MIB} MiB; a search"),
    ("memory.md", f"the first {ranking.MAX_WORDS} words"),
    ("capabilities.md", f"A chain has at most {chain.MAX_DEPTH} links"),
    ("capabilities.md", f"below one grant stand at most {book.MAX_BELOW:,}"),
    ("capabilities.md", f"has at most {book.MAX_PER_ACTION} of one action"),
    ("capabilities.md", f"`ts` within {_COUNTS[identity.MAX_SKEW_MS // 60_000]} minutes"),
    ("budget.md", f"Debits older than {budget.KEPT_MS // 86_400_000} days"),
    ("budget.md", f"| {_BUYS.cpu_ms // 1000} s | of one processor |"),
    ("budget.md", f"| 1 GiB for {_BUYS.memory_byte_ms // 2**30 // 1000} s | of memory"),
    ("budget.md", f"| {_BUYS.wall_ms // 60_000} min | of wall time |"),
    ("budget.md", f"| {_BUYS.stored_bytes // 1024} KiB | of text kept in memory"),
    ("command-line.md", f"at most {_COUNTS[Limits().max_attempts]} times"),
]


@pytest.mark.parametrize(("page", "text"), SAID)
def test_page_says_what_code_does(clone: Path, page: str, text: str) -> None:
    said = " ".join((clone / "docs" / page).read_text().split())
    assert re.search(re.escape(text), said, re.IGNORECASE), text
