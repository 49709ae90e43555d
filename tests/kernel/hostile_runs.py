"""One combination of the containment suite: all network probes in one sandbox, and the packets seen outside meanwhile.

`control` is a plain sandbox without rules around it. `behind_the_walls` is the same plain sandbox (uid 0, every
capability, no filter: a sentry that was taken over) in the namespaces of a real gateway. `covenant` is a signed
package, run by the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import denials
from policy.compile.artefacts import Artefacts
from sandbox.config import Config
from sandbox.network import gateway
from tests.kernel import hostile_control, hostile_observer, plain_runsc, three_namespaces
from tests.kernel import hostile_table as table
from tests.kernel.hostile_observer import Seen
from tests.kernel.hostile_settings import RESOLVER, Setting
from tests.kernel.three_namespaces import Namespaces
from tests.kernel.world import World

ENTRIES = {
    "network": ("/usr/bin/python3", "-B", "/workspace/main.py"),
    "node": ("/usr/bin/node", "/workspace/main.js"),
}
PLANTED = {"/etc/shadow": b"root:planted:19000:0:99999:7:::\n"}
PRELUDE = Path(__file__).with_name("hostile_network_prelude.py")
DEADLINE_SECONDS = 240.0
RUN_ID = "c0ffee00-0000-4000-8000-000000000000"


@dataclass
class Outcome:
    """The answers of the probes, and the counts of the observers.

    There are three observers: ``world`` (behind the host), the agent's ``link`` at the gateway's end, and ``heard``
    (open sockets in the gateway). ``error`` is how a run ended that did not answer. ``denied`` are the gateway's
    denials.
    """

    rows: dict[str, table.Row]
    world: Seen
    link: Seen
    heard: Seen
    denied: list[denials.Denial] = field(default_factory=list)
    error: str = ""

    def shows(self, probe: table.NetworkProbe) -> bool:
        """Whether the probe did what it is named for, judged as its row says: by itself or by an observer."""
        counts = {"mark": self.world, "frame": self.link, "heard": self.heard}
        if probe.shows == "answer":
            return self.rows[probe.id].outcome == "succeeded"
        return counts[probe.shows].count(probe.id) > 0


def _plain(
    package: str, ids: Sequence[str], *, netns_path: str, inside: Sequence[str], resolver: str
) -> dict[str, table.Row]:
    result = plain_runsc.run(
        ["/usr/bin/python3", "-B", "/prelude.py", *ENTRIES[package]],
        stdin=json.dumps({"text": table.batch(ids)}).encode() + b"\n",
        files={**PLANTED, "/prelude.py": PRELUDE.read_bytes(), "/etc/resolv.conf": f"nameserver {resolver}\n".encode()},
        trees={"/workspace": table.HOSTILE / package},
        cwd="/workspace",
        deadline_seconds=DEADLINE_SECONDS,
        netns=netns_path,
        inside=inside,
    )
    assert result.status == 0, result.stderr.decode(errors="replace")[-2000:]
    return table.rows(json.loads(result.stdout.splitlines()[-1])["text"])


def _tapped(spaces: Namespaces, role: str, device: str) -> contextlib.AbstractContextManager[Seen]:
    return hostile_observer.watching(spaces.within(role, lambda: hostile_observer.listener(device)))


def control(ids: Sequence[str], *, package: str = "network") -> Outcome:
    """Without any rule."""
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(hostile_control.made())
        world = stack.enter_context(_tapped(spaces, "world", "eth0"))
        link = stack.enter_context(_tapped(spaces, "gateway", "agent0"))
        heard = stack.enter_context(hostile_observer.hearing(spaces.within("gateway", hostile_observer.ears)))
        path = f"/proc/{spaces.pids['agent']}/ns/net"
        rows = _plain(package, ids, netns_path=path, inside=hostile_control.inside(path), resolver=RESOLVER)
    return Outcome(rows, world, link, heard)


@contextlib.contextmanager
def internet() -> Iterator[Namespaces]:
    """A host and a world that answers at every address: where the supervisor of `covenant` runs."""
    spaces = Namespaces()
    with contextlib.ExitStack() as stack:
        for role in ("host", "world"):
            spaces.pids[role] = stack.enter_context(three_namespaces.anchor())
            spaces.run(role, "sysctl", "-q", "-w", *(f"net.ipv6.conf.{n}.accept_dad=0" for n in ("all", "default")))
        spaces.batch("host", HOST_SIDE.format(**spaces.pids))
        spaces.batch("world", WORLD_SIDE)
        stack.enter_context(hostile_control.serving(spaces, "world", anywhere=True))
        stack.enter_context(hostile_control.serving(spaces, "host"))
        yield spaces


HOST_SIDE = """
link set lo up
link add eth0 type veth peer name eth0 netns {world}
address add 10.77.0.2/24 dev eth0
address add fd77::2/64 dev eth0 nodad
link set eth0 up
route add default via 10.77.0.1
route add default via fd77::1
"""
WORLD_SIDE = """
link set lo up
address add 10.77.0.1/24 dev eth0
address add fd77::1/64 dev eth0 nodad
link set eth0 up
"""
CONFIG: dict[str, Any] = {"uplink": "eth0", "resolvers": [RESOLVER], "on_drift": "alarm"}


@contextlib.contextmanager
def _watched_gateways() -> Iterator[list[tuple[Seen, Seen]]]:
    """Every gateway that is opened in this block is the real one, with observers in it: on the link, and open ears."""
    real = gateway.opened
    observed: list[tuple[Seen, Seen]] = []

    @contextlib.contextmanager
    def opened(*args: Any, **named: Any) -> Iterator[gateway.Gateway]:
        with real(*args, **named) as made, contextlib.ExitStack() as stack:
            make = made._make

            def observing(gateway: gateway.Gateway) -> None:
                make(gateway)
                # Once the link is up, and before there is an agent.
                tap = made.spaces.inside(lambda: hostile_observer.listener("agent0"))
                link = stack.enter_context(hostile_observer.watching(tap))
                heard = stack.enter_context(hostile_observer.hearing(made.spaces.inside(hostile_observer.ears)))
                observed.append((link, heard))

            made._make = observing
            yield made

    gateway.opened = opened
    try:
        yield observed
    finally:
        gateway.opened = real


def covenant(
    world: World,
    spaces: Namespaces,
    setting: Setting,
    ids: Sequence[str],
    *,
    filesystem: str = "ephemeral",
    package: str = "network",
) -> Outcome:
    """A signed package by the supervisor, in the host's namespace."""
    path = world.base / "packages" / f"{package}-{setting.name}-{filesystem}"
    shutil.copytree(table.HOSTILE / package, path, ignore=shutil.ignore_patterns("__pycache__", "agent.dsse.json"))
    text = (path / "agent.toml").read_text()
    head = text[: text.index("[[permissions.network]]")]
    head = head.replace('network = "full"', f'network = "{setting.network}"')
    head = head.replace('filesystem = "ephemeral"', f'filesystem = "{filesystem}"')
    head = head.replace(f'"hostile-{package}"', f'"hostile-{package}-{setting.name}-{filesystem}"')
    (path / "agent.toml").write_text(head + setting.manifest())
    world.sign(path)
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(_tapped(spaces, "world", "eth0"))
        observed = stack.enter_context(_watched_gateways())
        answer = spaces.within("host", lambda: world.run(path, table.batch(ids)))
    rows = {} if answer.result is None else table.rows(answer.result.text)
    said = "" if answer.error is None else f"{answer.error.code}: {answer.error} {answer.stderr!r}"
    link, heard = observed[0] if observed else (Seen(), Seen())
    return Outcome(rows, outside, link, heard, error=said)


def behind_the_walls(spaces: Namespaces, artefacts: Artefacts, state: Path, ids: Sequence[str]) -> Outcome:
    """A plain sandbox with every right, in the agent's namespace of a real gateway."""
    # The gates end with the thread that started them (PR_SET_PDEATHSIG), so one thread does it all.
    return spaces.within("host", lambda: _behind(spaces, artefacts, Config(**{**CONFIG, "state": state}), ids))


def _behind(spaces: Namespaces, artefacts: Artefacts, config: Config, ids: Sequence[str]) -> Outcome:
    denied: list[denials.Denial] = []

    def told(denial: denials.Denial, *, count: int = 1) -> None:
        denied.extend([denial] * count)

    with contextlib.ExitStack() as stack:
        observed = stack.enter_context(_watched_gateways())
        outside = stack.enter_context(_tapped(spaces, "world", "eth0"))
        opened = gateway.opened(artefacts, RUN_ID, config=config, note=lambda _: None, denied=told)
        made = stack.enter_context(opened)
        made.make()
        stack.enter_context(_attended(made))
        path = f"/proc/{os.getpid()}/fd/{made.spaces.agent}"
        rows = _plain("network", ids, netns_path=path, inside=hostile_control.inside(path), resolver="192.0.0.1")
    link, heard = observed[0]
    return Outcome(rows, outside, link, heard, denied)


@contextlib.contextmanager
def _attended(made: gateway.Gateway) -> Iterator[None]:
    """Do the supervisor's work during a run: serve the gates' broker and read their reports."""
    over = threading.Event()
    failures: list[object] = []

    def attend() -> None:
        watches = dict(made.watches)
        while not over.is_set():
            ready, _, _ = select.select(list(watches), [], [], 0.1)
            for fd in ready:
                if (failure := watches[fd]()) is not None:
                    failures.append(failure)
                    return

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures, failures
