"""Each agent in each of its cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.agents import catalogue, sessions

AGENTS = catalogue.load()


@pytest.mark.parametrize("agent", catalogue.cells("version"))
def test_version_is_shown(agent: str) -> None:
    cell = AGENTS[agent].version
    assert cell is not None
    done = sessions.run(sessions.version(agent))
    assert done.returncode == 0, done.stderr
    assert re.search(cell.shows, done.stdout + done.stderr), (done.stdout, done.stderr)


@pytest.mark.parametrize("agent", catalogue.cells("task"))
def test_task_is_done_and_committed(agent: str) -> None:
    done = sessions.run(sessions.beside(agent, "task", "task", "--no-tty"))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert re.search(r"^STATUS 0\nCOMMITS [^,]+,begin,\nGREETING hello, world$", done.stdout, re.MULTILINE), (
        done.stdout,
        done.stderr,
    )


@pytest.mark.parametrize("agent", catalogue.cells("terminal"))
def test_terminal_is_resized_and_left(agent: str, tmp_path: Path) -> None:
    cell = AGENTS[agent].terminal
    assert cell is not None
    with sessions.screen(tmp_path, sessions.beside(agent, "terminal", "terminal", "--tty")) as screen:
        for pattern, key in cell.keys:
            screen.until(pattern)
            screen.key(key)
        if cell.expected != "ok":
            screen.until(cell.shows)
            screen.until(r"ENDED \d+ SIZE")
            return
        screen.until(cell.ready)
        screen.resize(120, 40)
        screen.until(cell.ready)
        for pattern, key in cell.leave:
            screen.until(pattern)
            screen.key(key)
        assert f"ENDED {cell.status} SIZE 40 120" in screen.until(r"ENDED \d+ SIZE")


@pytest.mark.parametrize("agent", catalogue.cells("acp"))
def test_prompt_of_acp_is_answered(agent: str, tmp_path: Path) -> None:
    cell = AGENTS[agent].acp
    assert cell is not None
    with (tmp_path / "errors").open("wb") as errors:
        client = sessions.Client(sessions.beside(agent, "stream", "acp", "--no-tty"), errors)
        try:
            answer = client.ask("initialize", protocolVersion=1, clientCapabilities={})
            assert answer["protocolVersion"] == 1
            if cell.expected == "ok":
                _prompt(client)
            else:
                with pytest.raises(sessions.RefusedError, match=cell.shows):
                    _prompt(client)
        finally:
            client.close()


def _prompt(client: sessions.Client) -> None:
    session = client.ask("session/new", cwd="/tmp/checkout", mcpServers=[])["sessionId"]
    prompt = [{"type": "text", "text": "Add a greeting and commit it."}]
    assert client.ask("session/prompt", sessionId=session, prompt=prompt)["stopReason"] == "end_turn"
    said = str(client.updates)
    assert "greeting is committed" in said, said
