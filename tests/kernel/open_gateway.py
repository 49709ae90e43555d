"""A gateway held open on the tests' internet without an agent in it: the test itself can be the one who sends."""

from __future__ import annotations

import socket
import threading
import uuid
from typing import Any

from policy import denials
from policy.compile.artefacts import Artefacts
from sandbox.config import Config
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses as own
from sandbox.network import gateway
from tests.kernel.internet import RESOLVER, Internet


class Opened:
    """A gateway held open by a thread of its own on the internet's host, as the supervisor's would be."""

    def __init__(self, net: Internet, artefacts: Artefacts, **settings: Any) -> None:
        self.net, self.run_id, self.told = net, str(uuid.uuid4()), list[denials.Denial]()
        self._config = Config(uplink="eth0", resolvers=(RESOLVER,), **settings)
        self._artefacts = artefacts
        self._up, self._down = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="gateway")
        self.error: BaseException | None = None
        self.gateway: gateway.Gateway
        self.place: own.Uplink

    def _told(self, denial: denials.Denial, *, count: int = 1) -> None:
        self.told += [denial] * count

    def __enter__(self) -> Opened:
        self._thread.start()
        assert self._up.wait(60)
        if self.error is not None:
            self._thread.join()
            raise self.error
        return self

    def __exit__(self, *exc: object) -> None:
        self._down.set()
        self._thread.join()

    def _hold(self) -> None:
        def inside() -> None:
            with gateway.opened(
                self._artefacts, self.run_id, config=self._config, note=lambda about: None, denied=self._told
            ) as self.gateway:
                self.gateway.make()
                self.place = self.gateway.place
                self._up.set()
                assert self._down.wait(300)

        try:
            self.net.within("host", inside)
        except BaseException as e:
            self.error = e
        finally:
            self._up.set()

    def run(self, role: str, *command: str) -> str:
        """A command in ``agent`` or ``gateway``."""
        fd = getattr(self.gateway.spaces, role)
        return self.net.run(role, *command, within=fd)

    def packet_socket(self) -> socket.socket:
        """A raw socket on the agent's device."""

        def make() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            made.bind((own.AGENT_DEVICE, 0))
            made.settimeout(0.3)
            return made

        return spaces.within(self.gateway.spaces.agent, make)

    def dropped(self, role: str) -> int:
        """How many frames the wall in that namespace has dropped."""
        text = self.run(role, "nft", "list", "table", "netdev", "covenant_walls")
        return sum(int(line.partition("packets ")[2].split()[0]) for line in text.splitlines() if "packets " in line)
