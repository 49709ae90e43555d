"""A provider of models on the host's loopback that follows the script, and the operator's key for it in the vault."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests import loopback_server
from tests.agents import place, sessions
from tests.agents.fake import model
from tests.kernel import serving

KEY: Final = "sk-operator-0123456789abcdef"
# The headers by which the clients of the four APIs show a key.
_SHOWN: Final = ("authorization", "x-api-key", "x-goog-api-key")


class Provider(loopback_server.LoopbackServer):
    """Answers as the model beside an agent does, and keeps each path with the keys that were shown there."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.asked: list[tuple[str, tuple[str, ...]]] = []


class _Handler(model.Handler):
    server: Provider

    def do_POST(self) -> None:
        """Keep what was shown, and answer."""
        keys = tuple(self.headers[name] for name in _SHOWN if name in self.headers)
        self.server.asked.append((self.path.partition("?")[0], keys))
        super().do_POST()


@contextmanager
def scripted(kind: str, command: str) -> Iterator[Provider]:
    """A provider `scripted` of this kind in the home of the agents, which asks for ``command``."""
    model.COMMAND = command
    with loopback_server.serving(Provider()) as server:
        _declare(kind, f"http://127.0.0.1:{server.server_port}{'/v1' if 'openai' in kind else ''}")
        yield server


def _declare(kind: str, endpoint: str) -> None:
    state = place.home() / "supervisor"
    if not (state / "config.toml").exists():
        with open(state / "config.toml", "x", opener=_private) as file:
            file.write(f'[vault]\nkey = "{place.home()}/vault.key"\n')
        _vault("init")
        _vault("put", "covenant-providers", "scripted", secret=f"{KEY}\n")
    (state / "providers.toml").write_text(
        f'[providers.scripted]\nkind = "{kind}"\nendpoint = "{endpoint}"\nsecret = "scripted"\n'
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _vault(*words: str, secret: str = "") -> None:
    command = serving.covenant_command("vault", *words)
    subprocess.run(command, env=sessions.environment(), input=secret, text=True, check=True, capture_output=True)
