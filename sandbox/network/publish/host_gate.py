"""Opens the gate of a run to granted ports of this host's loopback, which the agent calls host.covenant.

    agent -> 192.0.0.1:PORT -> [ the gate: an empty namespace ] -> 127.0.0.1:PORT of this host
                                          | line
                               [ the connector: the supervisor's namespace ]

Gate and connector are those of published ports, the other way round. No socket of this host enters the sandbox. The
connector makes connections to granted ports of 127.0.0.1 alone; the gate cannot ask for another place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from policy import denials, errors
from sandbox.kernel.net import netns
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network.gate import process as gate_process
from sandbox.network.gate import uids
from sandbox.network.gate.listener import listening
from sandbox.network.publish import gate as publish_gate
from sandbox.network.publish import server
from sandbox.network.publish.counts import Counts

LAYER: Final = "host"
KINDS: Final = (publish_gate.KIND, publish_gate.CONNECTOR)
_LOOPBACK: Final = "127.0.0.1"


class HostTerms(Struct, frozen=True):
    """Additions of a run to its ports of this host.

    ``begins`` is called with a port before the agent can reach it, ``ended`` with its counts at the end.
    """

    begins: Callable[[int], None]
    ended: Callable[[int, Mapping[str, int]], None]


class HostGate:
    """An open gate. Its processes have watches that belong into the run's exchange."""

    def __init__(self, ports: Sequence[int], terms: HostTerms) -> None:
        self.processes: tuple[gate_process.OpenGate, ...] = ()
        self._ports, self._terms = ports, terms
        self._counts: Counts | None
        self.fd, self._counts = Counts.create(len(ports))

    def end(self) -> None:
        """Report the counts, after the processes have ended. A second call does nothing."""
        counts, self._counts = self._counts, None
        if counts is not None:
            for row, port in enumerate(self._ports):
                self._terms.ended(port, counts.read(row)._asdict())
            counts.close()


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    ports: Sequence[int],
    terms: HostTerms,
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[HostGate]:
    """Carry connections of the agent to these ports while the block lasts.

    ``inside`` runs a call in the gateway's namespace and returns its value. Does not wait until the gate is ready.

    Raises:
        errors.RunError: what ``patience`` watches said so, or a process was not executed in time.
        errors.KernelError: a listener cannot be made, or a process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        for port in ports:
            terms.begins(port)
        made = HostGate(ports, terms)
        stack.callback(made.end)
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, made.fd)
            try:
                # The rate of new connections is held by the gate; until it takes one, it waits here.
                opened = [
                    ours.enter_context(inside(functools.partial(listening, port, server.CONNECTIONS))) for port in ports
                ]
                lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                near, far = (ours.enter_context(one) for one in lines)
                namespace = netns.current()
            except OSError as e:
                raise errors.KernelError(f"cannot listen for the ports of this host: {e.strerror}") from e
            ours.callback(os.close, namespace)
            common: dict[str, Any] = {
                "layer": LAYER,
                "codes": frozenset(),
                "join_files": join_files,
                "patience": patience,
            }
            connector = gate_process.Gate(
                module=publish_gate.CONNECTOR.module,
                uid=uids.HOST_PORTS_CONNECTOR,
                plan={"where": _LOOPBACK, "ports": list(ports)},
                fds={"line": far.fileno()},
                calls=publish_gate.CONNECTOR_CALLS,
                namespace=namespace,
                **common,
            )
            listeners = {f"{row}": one.fileno() for row, one in enumerate(opened)}
            gate = gate_process.Gate(
                module=publish_gate.KIND.module,
                uid=uids.HOST_PORTS,
                plan={"ports": list(ports)},
                fds={**listeners, "line": near.fileno(), "counts": made.fd},
                calls=publish_gate.CALLS,
                descriptors=publish_gate.DESCRIPTORS,
                **common,
            )
            started = [stack.enter_context(gate_process.start(one)) for one in (connector, gate)]
        made.processes = tuple(gate_process.OpenGate(one, one.watches(denied)) for one in started)
        yield made
