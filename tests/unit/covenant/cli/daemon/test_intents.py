"""``covenant intent --stream``: the end of a stream says whether an agent answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from covenant.cli.daemon import intents

ECHO = "phase 0 echo (no agent matched): zzz"


def stream(*texts: str, **summary: str) -> list[dict[str, Any]]:
    chunks = [{"kind": "stream_chunk", "chunk": {"text": text, "sources": []}} for text in texts]
    end = {"kind": "stream_end", "summary": {"intent_id": "i", "status": "ok", **summary}}
    return [{"kind": "stream_begin"}, *chunks, end]


def test_agent_that_answers_the_echo_matched(capsys: pytest.CaptureFixture[str]) -> None:
    assert intents._streamed(stream(ECHO, "more", agent_id="parrot"), "zzz", as_json=False)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{ECHO}\nmore\n", "parrot, intent i\n")
    assert intents._streamed(stream(ECHO, agent_id="parrot"), "zzz", as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == stream(ECHO, agent_id="parrot")


def test_echo_without_agent_is_unmatched(capsys: pytest.CaptureFixture[str]) -> None:
    assert not intents._streamed(stream(ECHO), "zzz", as_json=False)
    shown = capsys.readouterr()
    assert (shown.out, "[no_agent_matched]" in shown.err) == ("", True)
    assert not intents._streamed(stream(ECHO), "zzz", as_json=True)
    *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["summary"]["code"] == "no_agent_matched"
