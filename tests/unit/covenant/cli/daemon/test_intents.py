"""``covenant intent --stream``: the end of a stream says whether an agent answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from covenant.cli.daemon import client, intents

ECHO = "phase 0 echo (no agent matched): zzz"


def stream(*texts: str, **summary: str) -> list[dict[str, Any]]:
    chunks = [{"kind": "stream_chunk", "chunk": {"text": text, "sources": []}} for text in texts]
    end = {"kind": "stream_end", "summary": {"intent_id": "i", "status": "ok", **summary}}
    return [{"kind": "stream_begin"}, *chunks, end]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parts that a daemon answers."""
    answered: list[dict[str, Any]] = []

    class Daemon:
        def stream(self, kind: str, **fields: object) -> Iterator[dict[str, Any]]:
            yield from answered

    monkeypatch.setattr(client, "daemon", lambda: contextlib.nullcontext(Daemon()))
    return answered


def test_agent_that_answers_the_echo_matched(parts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    parts += stream(ECHO, "more", agent_id="parrot")
    assert intents.intent.main(["--stream", "zzz"], standalone_mode=False) is None
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{ECHO}\nmore\n", "parrot, intent i\n")
    assert intents.intent.main(["--stream", "--json", "zzz"], standalone_mode=False) is None
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == parts


def test_echo_without_agent_is_unmatched(parts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    parts += stream(ECHO)
    assert intents.intent.main(["--stream", "zzz"], standalone_mode=False) == 3
    shown = capsys.readouterr()
    assert (shown.out, "[no_agent_matched]" in shown.err) == ("", True)
    assert intents.intent.main(["--stream", "--json", "zzz"], standalone_mode=False) == 3
    *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["summary"]["code"] == "no_agent_matched"
