"""Opens the publish gate of a run: its places on this host, and the process that carries their connections.

    client -> place on this host -> [ the gate: an empty namespace ] -> 192.0.0.2:PORT, the agent
                                                  | line
                                    [ the connector: the gateway's namespace ]

No descriptor of the host enters the sandbox: the connector makes a connection of its own, and gives it to the gate.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from policy import denials, errors
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network import addresses
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.publish import connector, places, server
from sandbox.network.publish.counts import Counts
from sandbox.network.tls import splice

LAYER: Final = "publish"
KIND: Final = prefork.Kind(server.__name__, own_network=True)
CONNECTOR: Final = prefork.Kind(connector.__name__, own_network=False)
# Beyond what every gate needs: taking connections and carrying bytes. Never connect: it undoes a socket of this host,
# and connects it elsewhere (connect(2), AF_UNSPEC).
CALLS: Final = frozenset({
    "accept4", "getsockname", "getsockopt", "pipe2", "setsockopt", "shutdown", "splice",
})  # fmt: skip
CONNECTOR_CALLS: Final = frozenset({"connect", "sendmsg", "setsockopt", "socket"})
DESCRIPTORS: Final = 2 * server.CONNECTIONS + 2 * splice.PIPES + 64


class PublishTerms(Struct, frozen=True):
    """Additions of a run to its published ports.

    ``rights`` takes the caller's, with which a socket is made. ``begins`` is called with port and place before it
    listens there, ``ended`` with the counts at its end.
    """

    rights: places.Rights
    begins: Callable[[int, str], None]
    ended: Callable[[int, str, Mapping[str, int]], None]


class Listening:
    """The places of a run. Clients wait there until the gate takes them."""

    def __init__(self, plan: Sequence[Mapping[str, Any]], terms: PublishTerms) -> None:
        self.plan, self._terms = plan, terms
        self._places = contextlib.ExitStack()
        self.fds: dict[str, int] = {}
        self._counts: Counts | None = None

    def __enter__(self) -> Listening:
        """Listen at every place.

        Raises:
            errors.PublishError: a place cannot be had.
        """
        with contextlib.ExitStack() as stack:
            for row, one in enumerate(self.plan):
                self._terms.begins(one["port"], one["to"])
                listener = places.opened(one["to"], rights=self._terms.rights, where=f"publish[{row}].to")
                self.fds[f"{row}"] = stack.enter_context(listener).fileno()
            self.fds["counts"], self._counts = Counts.create(len(self.plan))
            stack.callback(os.close, self.fds["counts"])
            self._places = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Remove the places, and report the counts. A second call does nothing."""
        self._places.close()
        counts, self._counts = self._counts, None
        if counts is not None:
            for row, one in enumerate(self.plan):
                self._terms.ended(one["port"], one["to"], counts.read(row)._asdict())
            counts.close()


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    listening: Listening,
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[tuple[gate_process.OpenGate, ...]]:
    """Carry the connections of these places while the block lasts.

    ``inside`` runs a call in the gateway's namespace and returns its value. Does not wait until the gate is ready.

    Raises:
        errors.RunError: what ``patience`` watches said so, or it was not executed in time.
        errors.KernelError: the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        try:
            namespace = inside(lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as e:
            raise errors.KernelError(f"cannot enter the gateway: {e.strerror}") from e
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, namespace)
            near, far = (ours.enter_context(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            common: dict[str, Any] = {
                "layer": LAYER,
                "codes": frozenset(),
                "join_files": join_files,
                "patience": patience,
            }
            begins = gate_process.Gate(
                module=CONNECTOR.module,
                uid=uids.PUBLISH_CONNECTOR,
                plan={"where": addresses.AGENT4, "ports": [one["port"] for one in listening.plan]},
                fds={"line": far.fileno()},
                calls=CONNECTOR_CALLS,
                namespace=namespace,
                **common,
            )
            gate = gate_process.Gate(
                module=KIND.module,
                uid=uids.PUBLISH,
                plan={"ports": [one["port"] for one in listening.plan]},
                fds={**listening.fds, "line": near.fileno()},
                calls=CALLS,
                descriptors=DESCRIPTORS,
                **common,
            )
            processes = [stack.enter_context(gate_process.start(one)) for one in (begins, gate)]
        yield tuple(gate_process.OpenGate(one, one.watches(denied)) for one in processes)
