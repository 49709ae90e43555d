"""The checks of each cell of an agent: the same for `make agents` and for the light agents of `make longer`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.agents import catalogue, provider, sessions


def version(agent: str) -> None:
    """Check that the program starts and shows its version."""
    cell = catalogue.load()[agent].version
    assert cell is not None
    done = sessions.run(sessions.version(agent))
    assert done.returncode == 0, done.stderr
    assert re.search(cell.shows, done.stdout + done.stderr), (done.stdout, done.stderr)


def task(agent: str) -> None:
    """Check that the agent runs the command that its model asks for, which ends in a commit."""
    _committed(sessions.run(sessions.beside(agent, "task", "task", "--no-tty")))


def gate(agent: str) -> None:
    """Check that the same is done with a provider of the host, whose key is outside, and without a network."""
    cell = catalogue.load()[agent].gate
    assert cell is not None
    with provider.scripted(cell.provider, catalogue.COMMAND) as server:
        _committed(sessions.run(sessions.beside(agent, "task", "gate", "--no-tty", "--model", "scripted")))
    assert server.asked
    shown = {key.removeprefix("Bearer ") for _, keys in server.asked for key in keys}
    assert shown == {provider.KEY}, server.asked


def _committed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert re.search(r"^STATUS 0\nCOMMITS [^,]+,begin,\nGREETING hello, world$", done.stdout, re.MULTILINE), (
        done.stdout,
        done.stderr,
    )


def terminal(agent: str, folder: Path) -> None:
    """Check that the agent draws its screen, is resized, and is left by its keys. ``folder`` is for the terminal."""
    cell = catalogue.load()[agent].terminal
    assert cell is not None
    with sessions.screen(folder, sessions.beside(agent, "terminal", "terminal", "--tty")) as screen:
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


def acp(agent: str, folder: Path) -> None:
    """Check that a session of ACP takes one prompt, which ends in a commit. ``folder`` is for its errors."""
    cell = catalogue.load()[agent].acp
    assert cell is not None
    with (folder / "errors").open("wb") as errors:
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
