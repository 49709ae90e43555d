"""docs/daemon.md: its commands as a user types them, its tables compared with the code that they describe."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

from covenant import settings as covenant_settings
from covenant.adapters.ipc import limits
from covenant.wire import frames, requests
from policy import wire_json
from tests.daemon.test_lifecycle import environment, process
from tests.house.test_docs import commands

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "daemon.md").read_text()


class _Asked(dict[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self, **given: str) -> None:
        super().__init__(given)
        self.asked_for: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked_for.add(name)
        return super().get(name, default)


def test_its_commands_work(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    program = pathlib.Path(sys.executable).parent / "covenant"
    lines = commands(PAGE)
    assert len(lines) >= 5
    with process(covenant_home, clone):
        for line in lines:
            words = [str(program) if word == "covenant" else word for word in shlex.split(line)]
            env = environment(covenant_home) | {"PATH": os.environ["PATH"]}
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
            # No agent is in this home, so none matches: status 3, as docs/intents.md says.
            wanted = 3 if "intent" in words else 0
            assert done.returncode == wanted, f"{line}: {done.stdout}{done.stderr}"


def test_it_names_every_variable() -> None:
    """The page names each variable that `settings.read` reads; its table shortens some to their end."""
    asked = _Asked(COVENANT_HOME=os.environ["COVENANT_HOME"])
    covenant_settings.read(asked)
    told = set(re.findall(r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b", PAGE))
    parts = set(re.findall(r"(?<![A-Z0-9])_[A-Z_]+", PAGE))
    missing = {n for n in asked.asked_for - told - {"SUDO_UID"} if not any(n.endswith(part) for part in parts)}
    assert missing == set()


def test_its_defaults_are_those_of_code() -> None:
    settings = covenant_settings.read({"COVENANT_HOME": os.environ["COVENANT_HOME"]})
    for value in (
        settings.http_port,
        settings.http_bind,
        *settings.http_origins,
        settings.deliver_timeout_ms,
        *(v for v in dataclasses.astuple(settings.retry) if not isinstance(v, bool)),
        *dataclasses.astuple(settings.projection),
    ):
        assert re.search(rf"(?<![0-9A-Za-z]){re.escape(str(value))}(?![0-9A-Za-z])", PAGE), value


def test_its_bounds_are_those_of_code() -> None:
    bounds = limits.IpcBounds()
    for text in (
        f"| {bounds.connections}, {bounds.of_one_peer}, {bounds.of_others} |",
        f"| {bounds.strangers}; of more",
        f"| {bounds.handshake_seconds:.0f}, {bounds.handshake_bytes // 1024} KiB |",
        f"frames of more than {bounds.small_bytes // 1024} KiB on their way, of one peer | {bounds.large_frames} |",
        f"answer is read | {bounds.frame_seconds:.0f} |",
        f"of more the log has the number | {bounds.refusals} |",
        f"depth of a document | {wire_json.MAX_DEPTH} |",
        f"values in one document, those of its lists and objects counted | {wire_json.MAX_VALUES} |",
        f"at most {frames.MAX_BYTES >> 20} MiB",
    ):
        assert text in PAGE, text


def test_it_names_what_is_not_served_and_what_is_ours() -> None:
    for kind, model in requests.KINDS.items():
        ours = (model.__doc__ or "").startswith("Ours")
        if model is requests.Unsupported or ours:
            patterns = [re.sub(r"_[a-z0-9]+$", "_*", kind), kind.partition("_")[0] + "_*", kind]
            assert any(f"`{name}`" in PAGE for name in patterns), kind
