"""Opens the DNS gate of a run: its sockets in the gateway's namespace, its broker, and the process that serves them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from policy import denials, errors
from policy.grants.sets import addresses as grants
from sandbox.kernel.net import nft_sets
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network import addresses
from sandbox.network.dns import broker
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.gate.lease_desk import LeaseDesk

LAYER = "dns"
# The reasons for refused queries, and faults of queries or answers.
CODES = frozenset(
    {"malformed", "name_not_granted", "not_approved", "rate", "rebinding", "set_full", "type_refused", "upstream"}
)
CALLS = frozenset({"accept4", "getsockname"})
# Some 1,300 queries: a crowd of 300 threads asks for three types each. More is a flood, and the kernel drops it here.
_BUFFER_BYTES = 512 * 1024
_SO_RCVBUFFORCE = 33
# The kind of process to start for it.
KIND = prefork.Kind("sandbox.network.dns.server", own_network=True)
_BACKLOG = 64
# A socket for each question that waits for a resolver: the burst, and the rate for as long as an answer may take.
_DESCRIPTORS = 512


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    plan: Mapping[str, Any],
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    resolvers: Callable[[], Sequence[str]],
    tells: int | None = None,
    desk: LeaseDesk | None = None,
    by_proxy: Sequence[str] = (),
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[gate_process.OpenGate]:
    """Serve the ``dns`` part of gates.json while the block lasts.

    ``inside`` runs a call in the gateway's namespace, where the ruleset must be already, and returns its value.
    ``resolvers`` (sandbox.network.resolvers) returns those of this moment, which are queried from the caller's own
    namespace. ``tells`` is the end of a line on which the TLS gate is told the addresses of names. ``desk`` holds names
    that need a lease; without it each is denied. ``by_proxy`` are names that the operator's proxy alone can look up.
    It does not wait until the gate is ready: an early query waits in the socket.

    Raises:
        errors.RunError: Raised when a watch of ``patience`` returns it, or the gate is not executed in time.
        errors.KernelError: Raised when the sockets cannot be made, or the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        try:
            netlink = stack.enter_context(inside(nft_sets.open_socket))
            serves = broker.SetBroker(plan, netlink, resolvers, desk=desk)
            stack.callback(serves.close)
            # The gate alone holds the listeners from here on: with it they end, and no name is answered.
            with contextlib.ExitStack() as ours:
                udp, tcp = (ours.enter_context(one) for one in inside(lambda: _listeners(plan["listen"])))
                gate = gate_process.Gate(
                    module=KIND.module,
                    layer=LAYER,
                    codes=CODES,
                    uid=uids.DNS,
                    plan={
                        **plan,
                        "names": [{**row, "inward": _spans(row["inward"])} for row in plan["names"]],
                        "agent": addresses.AGENT4,
                        "public": grants.PUBLIC,
                        "resolvers": len(resolvers()),
                        "by_proxy": list(by_proxy),
                    },
                    fds={
                        "udp": udp.fileno(),
                        "tcp": tcp.fileno(),
                        "broker": serves.gate_end,
                        **({} if tells is None else {"tells": tells}),
                    },
                    calls=CALLS,
                    descriptors=_DESCRIPTORS,
                    join_files=join_files,
                    patience=patience,
                )
                process = stack.enter_context(gate_process.start(gate))
                serves.started()
        except OSError as e:
            raise errors.KernelError(f"cannot open the DNS gate: {os.strerror(e.errno or 0)}") from e
        yield gate_process.OpenGate(process, {**process.watches(denied), serves.fileno(): serves.serve})


def _spans(ranges: Sequence[Mapping[str, str]]) -> list[tuple[int, int]]:
    """Ranges of addresses as spans of the line of addresses, so that the gate need not read text."""
    ends = ((grants.parse(one["first"]), grants.parse(one["last"])) for one in ranges)
    return [(first[0], last[1]) for first, last in ends if first is not None and last is not None]


def _listeners(port: int) -> tuple[socket.socket, socket.socket]:
    """A UDP and a TCP socket on the gateway's address, which take from the agent's link alone."""
    made: list[socket.socket] = []
    try:
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            one = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, addresses.GATEWAY_DEVICE.encode() + b"\0")
            one.bind((addresses.GATEWAY4, port))
        made[0].setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        made[1].listen(_BACKLOG)
    except BaseException:
        for one in made:
            one.close()
        raise
    return made[0], made[1]
