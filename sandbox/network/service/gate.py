"""Opens the service gate of a run: its listener, its connector, and the process that serves.

    agent -> 192.0.0.1:80 [ the gate: an empty namespace ] -> line -> [ the connector: the supervisor's namespace ]

The gate holds the providers' keys and no way to reach a provider; the connector reaches them and holds no key.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from policy import denials, errors
from sandbox.kernel.net import netns
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network import addresses
from sandbox.network.gate import prefork, proxy, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.gate.listener import listening
from sandbox.network.service.ledger import ModelLedger, Told
from sandbox.network.service.providers import SYSTEM_CA, PageHost, Provider
from sandbox.network.tools import gate as tool_gate
from sandbox.network.tools.ledger import ToolLedger, ToolTerms
from sandbox.network.tools.questions import HoldTerms

LAYER: Final = "model"
CODES: Final = frozenset({
    "address_refused", "agent_not_granted", "content_refused", "field_refused", "frame_refused", "host_not_granted",
    "host_refused", "key_refused", "limit", "malformed", "model_not_granted", "no_provider", "path_refused",
    "provider_failed", "search_not_granted", "signal_not_granted", "tool_left_out",
})  # fmt: skip
KIND: Final = prefork.Kind("sandbox.network.service.server", own_network=True)
CONNECTOR: Final = prefork.Kind("sandbox.network.service.connector", own_network=False)
TELEMETRY: Final = prefork.Kind("sandbox.network.service.telemetry.reader", own_network=True)
READER: Final = prefork.Kind("sandbox.network.service.web.reader", own_network=True)
CALLS: Final = frozenset({
    "accept4", "getpeername", "getpid", "getsockname", "getsockopt", "ioctl", "listen", "sendmsg", "setsockopt",
    "shutdown",
})  # fmt: skip
CONNECTOR_CALLS: Final = proxy.CALLS
READER_CALLS: Final = frozenset({"getpid", "mprotect"})
_BACKLOG: Final = 256
# For a connection to the collector.
COLLECTOR_SECONDS: Final = 10
_DESCRIPTORS: Final = 1024


class CommandLineEnd(Protocol):
    """The line to the shim over which commands are called."""

    @property
    def gate_end(self) -> int:
        """Return the gate's descriptor."""

    def started(self) -> None:
        """Close the gate's end here: the gate has it."""

    def hold_by(self, hold: HoldTerms) -> None:
        """Hold calls that an operator is asked about."""


class Collector(Struct, frozen=True):
    """The operator's collector for the telemetry of agents. ``stamp`` are the attributes of the run, for each resource.

    ``ca`` is a file of authorities in place of the system's.
    """

    url: str
    stamp: Mapping[str, str]
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    ca: str = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class Terms(Struct, frozen=True):
    """The operator's part of a run's grant: the granted providers in the operator's order, and their keys.

    ``told`` is called with each request that was passed on. ``authorities`` are files that are believed beside the
    system's, for a provider that names no file of its own. ``pages`` are the operator's words about hosts of pages.
    ``credits`` is what the run may spend, None for no limit, and ``meter`` counts what it and its children have spent
    (sandbox.network.gate.credit_meter). ``tools`` are the terms of the run's tools, None where it has none. ``proxy``
    is the operator's, by which the connector connects. ``commands`` is the line to the commands of the run.
    ``collector`` takes the telemetry of the run, and is the last of the connector's providers.
    """

    providers: Mapping[str, Provider]
    keys: Mapping[str, str]
    told: Told
    authorities: Sequence[str] = ()
    pages: Mapping[str, PageHost] = msgspec.field(default_factory=dict)
    credits: int | None = None
    meter: int | None = None
    tools: ToolTerms | None = None
    proxy: proxy.Proxy | None = None
    commands: CommandLineEnd | None = None
    collector: Collector | None = None

    def kinds(self) -> list[prefork.Kind]:
        """Return the processes that serve them, but for a reader of pages."""
        return [KIND, CONNECTOR, *([] if self.tools is None else [tool_gate.KIND])]

    def peers(self) -> list[dict[str, Any]]:
        """The providers as the gate's process has them (upstream.ProviderPeer), without their numbers."""
        return [
            {
                "name": name,
                "kind": one.kind,
                "url": one.url,
                "key": self.keys.get(name, ""),
                "timeout_seconds": one.timeout_seconds,
                "ca": str(one.ca or _system_ca()),
                "authorities": [] if one.ca else list(self.authorities),
                "input_price": one.input_price,
                "output_price": one.output_price,
                "request_price": one.request_price,
            }
            for name, one in self.providers.items()
        ]

    def collecting(self) -> dict[str, Any] | None:
        """The collector as the gate's process has it (upstream.ProviderPeer), without its number."""
        if self.collector is None:
            return None
        return {
            "name": "",
            "kind": "otlp",
            "url": self.collector.url.rstrip("/"),
            "key": "",
            "timeout_seconds": COLLECTOR_SECONDS,
            "ca": self.collector.ca or _system_ca(),
            "authorities": [] if self.collector.ca else list(self.authorities),
            "headers": dict(self.collector.headers),
        }


class ServiceGate(Struct, frozen=True):
    """An open gate with its processes: connector, gate, the reader of pages and the tool gate where there are any.

    ``watches`` belong into the run's exchange.
    """

    processes: tuple[gate_process.GateProcess, ...]
    watches: Mapping[int, Callable[[], errors.RunError | None]]
    ledger: ModelLedger
    tools: ToolLedger | None = None

    def end(self) -> None:
        """End all of them, and report what they had to say."""
        if self.tools is not None:
            self.tools.wind_up()
        for one in self.processes:
            one.end()
            one.tell_rest()
        self.ledger.finish()
        if self.tools is not None:
            self.tools.finish()


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    plan: Mapping[str, Any],
    terms: Terms,
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[ServiceGate]:
    """Serve the ``services`` part of gates.json while the block lasts.

    ``inside`` runs a call in the gateway's namespace and returns its value. Does not wait until the gate is ready: a
    connection that comes before waits in the backlog.

    Raises:
        errors.RunError: what ``patience`` watches said so, or a process was not executed in time.
        errors.KernelError: the listener cannot be made, or a process cannot be started.
    """
    common: dict[str, Any] = {"layer": LAYER, "codes": CODES, "join_files": join_files, "patience": patience}
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(contextlib.closing(ModelLedger(plan, terms.told)))
        # Ours until the processes are started: each then has its own.
        with contextlib.ExitStack() as ours:
            try:
                lines = _lines(plan, terms, inside, ours)
            except OSError as e:
                raise errors.KernelError(f"cannot listen for the service gate: {e.strerror}") from e
            tools = None
            if terms.tools is not None:
                tools = stack.enter_context(tool_gate.open(terms.tools, join_files=join_files, patience=patience))
            gates = [
                _connector(plan, terms, lines, common),
                _server(plan, terms, _descriptors(terms, lines, ledger, tools), common),
                *_readers(terms, lines, common),
            ]
            processes = tuple(stack.enter_context(gate_process.start(one)) for one in gates)
            ledger.started()
            if tools is not None:
                tools.given()
            if terms.commands is not None:
                terms.commands.started()
        watches: dict[int, Callable[[], errors.RunError | None]] = {ledger.fileno(): ledger.serve}
        if tools is not None:
            watches[tools.ledger.fileno()] = tools.serve
            processes = (*processes, tools.process)
        for one in processes:
            watches.update(one.watches(denied))
        yield ServiceGate(processes, watches, ledger, None if tools is None else tools.ledger)


class _Lines(Struct, frozen=True):
    """The listener, the namespace of the connector, and the lines of the server to the others: its own end first."""

    listener: socket.socket
    namespace: int
    connector: tuple[socket.socket, socket.socket]
    pages: tuple[socket.socket, socket.socket] | None = None
    telemetry: tuple[socket.socket, socket.socket] | None = None


def _lines(
    plan: Mapping[str, Any], terms: Terms, inside: Callable[[Callable[[], Any]], Any], stack: contextlib.ExitStack
) -> _Lines:
    """Open them, until the stack ends.

    Raises:
        OSError: one cannot be made.
    """

    def pair(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        return stack.enter_context(near), stack.enter_context(far)

    listener = stack.enter_context(inside(lambda: listening(plan["listen"], _BACKLOG)))
    connector = pair(socket.SOCK_SEQPACKET)
    pages = pair() if plan.get("web", {}).get("fetch") else None
    telemetry = None if terms.collector is None else pair()
    namespace = netns.current()
    stack.callback(os.close, namespace)
    return _Lines(listener, namespace, connector, pages, telemetry)


def _descriptors(terms: Terms, lines: _Lines, ledger: ModelLedger, tools: tool_gate.ToolGate | None) -> dict[str, int]:
    """Return the server's descriptors, by their names in its start."""
    optional = {
        "credits": terms.meter,
        "reader": None if lines.pages is None else lines.pages[0].fileno(),
        "telemetry": None if lines.telemetry is None else lines.telemetry[0].fileno(),
        "tools": None if tools is None else tools.line.fileno(),
        "commands": None if terms.commands is None else terms.commands.gate_end,
    }
    return {
        "listener": lines.listener.fileno(),
        "connector": lines.connector[0].fileno(),
        "usage": ledger.gate_end,
        **{name: fd for name, fd in optional.items() if fd is not None},
    }


def _connector(plan: Mapping[str, Any], terms: Terms, lines: _Lines, common: Mapping[str, Any]) -> gate_process.Gate:
    return gate_process.Gate(
        module=CONNECTOR.module,
        uid=uids.SERVICE_CONNECTOR,
        plan=targets(plan, terms),
        fds={"line": lines.connector[1].fileno()},
        calls=CONNECTOR_CALLS,
        namespace=lines.namespace,
        threads=True,
        keeps_files=True,
        **common,
    )


def _server(
    plan: Mapping[str, Any], terms: Terms, fds: Mapping[str, int], common: Mapping[str, Any]
) -> gate_process.Gate:
    return gate_process.Gate(
        module=KIND.module,
        uid=uids.SERVICE,
        plan={
            **plan,
            "agent": addresses.AGENT4,
            "providers": terms.peers(),
            "pages": {host: {"ca": str(one.ca or ""), "mock": one.mock} for host, one in terms.pages.items()},
            "system_ca": str(SYSTEM_CA),
            "credits": terms.credits,
            "collector": terms.collecting(),
        },
        fds=fds,
        calls=CALLS,
        counts=terms.meter is not None,
        descriptors=_DESCRIPTORS,
        **common,
    )


def _readers(terms: Terms, lines: _Lines, common: Mapping[str, Any]) -> list[gate_process.Gate]:
    """Return the processes that read what strangers wrote: pages, and the telemetry of the agent."""
    found = [] if lines.pages is None else [_reader(lines.pages[1], common)]
    if lines.telemetry is not None and terms.collector is not None:
        found.append(_telemetry(lines.telemetry[1], terms.collector, common))
    return found


def _system_ca() -> str:
    """The file of the system's authorities. Empty where there is none: then those that OpenSSL knows."""
    return str(SYSTEM_CA) if SYSTEM_CA.exists() else ""


def targets(plan: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
    """Return the connector's plan (connector.Targets). ``direct`` are the numbers of those reached without a proxy.

    A collector on this machine is one of them: its connection is not encrypted.
    """
    there = [(*one.address, one.timeout_seconds) for one in terms.providers.values()]
    direct = []
    if terms.collector is not None:
        direct = [len(there)] if terms.collector.url.startswith("http:") else []
        there.append((*terms.collector.address, COLLECTOR_SECONDS))
    return {
        "providers": there,
        "direct": direct,
        "hosts": plan.get("web", {}).get("fetch", []),
        "places": {host: one.address for host, one in terms.pages.items() if one.connect},
        "proxy": None if terms.proxy is None else terms.proxy.plan(),
    }


def _reader(line: socket.socket, common: Mapping[str, Any]) -> gate_process.Gate:
    fds = {"line": line.fileno()}
    return gate_process.Gate(module=READER.module, uid=uids.PAGE_READER, plan={}, fds=fds, calls=READER_CALLS, **common)


def _telemetry(line: socket.socket, collector: Collector, common: Mapping[str, Any]) -> gate_process.Gate:
    return gate_process.Gate(
        module=TELEMETRY.module,
        uid=uids.TELEMETRY_READER,
        plan={"stamp": dict(collector.stamp)},
        fds={"line": line.fileno()},
        calls=READER_CALLS,
        **common,
    )
