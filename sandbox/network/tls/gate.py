"""Opens the TLS gate of a run: listeners in the gateway's namespace, and the process that serves them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from policy import denials, errors
from sandbox.kernel.net import netns
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.gate import proxy as proxies
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.proxy import Proxy
from sandbox.network.reached import TellReached
from sandbox.network.tls import client_hello, connection, proxy_wire, race, server, splice
from sandbox.network.tls.leases import LeaseLine
from sandbox.network.tls.plan import IDLE_SECONDS

T = TypeVar("T")
LAYER = "sni"
CODES = (
    client_hello.CODES
    | connection.CODES
    | race.codes()
    | set(proxy_wire.CODES)
    | {"not_approved", "not_redirected", "connections_wait"}
)
# Beyond what every gate needs: taking connections, making them, and carrying bytes between the two.
CALLS = frozenset({
    "accept4", "connect", "getpeername", "getsockname", "getsockopt", "pipe2", "setsockopt", "shutdown", "socket",
    "splice",
})  # fmt: skip
# Handing a connection over to the gate that reads requests.
INJECT_CALLS = frozenset({"sendmsg", "socketpair"})
# INVARIANT: behind a proxy the gate is handed sockets of this host's namespace. With connect(2) it could connect one
# anywhere there.
PROXY_CALLS = (CALLS - {"connect", "socket"}) | INJECT_CALLS
# Two sockets a connection, the stock of pipes, and what the interpreter and the gate hold besides.
_DESCRIPTORS = (1 + race.TRIES) * server.CONNECTIONS + 2 * splice.PIPES + 64
# What has to be begun for it.
KIND = prefork.Kind(server.__name__, own_network=False)
CONNECTOR = prefork.Kind("sandbox.network.tls.connector", own_network=False)
_BACKLOG = 1024


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    plan: Mapping[str, Any],
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    reached: TellReached | None = None,
    names: int | None = None,
    inject: tuple[Sequence[str], int] | None = None,
    desk: LeaseDesk | None = None,
    idle_seconds: int = IDLE_SECONDS,
    way: int | None = None,
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[gate_process.OpenGate]:
    """Serve the ``tls`` part of gates.json while the block lasts.

    ``inside`` runs a call in the gateway's namespace and returns its value. ``reached`` is told the destinations of
    carried connections. ``names`` is the end of a line on which the DNS gate tells the addresses of names. ``desk``
    gives leases for the names that need one. ``inject`` are the hosts whose requests are read, and the line to the gate
    that does. A connection that says nothing for ``idle_seconds`` is ended. ``way`` is the line to the connector of the
    operator's proxy, by which the gate then makes all connections. Does not wait until the gate is ready: a
    connection that comes before waits in the backlog.

    Raises:
        errors.RunError: what ``patience`` watches said so, or it was not executed in time.
        errors.KernelError: the listeners cannot be made, or the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        # The gate alone holds the listeners from here on: with it they end, and the network is closed.
        with contextlib.ExitStack() as ours:
            try:
                listeners = [ours.enter_context(one) for one in inside(lambda: _listeners(plan["listen"]))]
                namespace = inside(lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            except OSError as e:
                raise errors.KernelError(f"cannot listen for the TLS gate: {e.strerror}") from e
            ours.callback(os.close, namespace)
            leases = stack.enter_context(contextlib.closing(LeaseLine(desk))) if desk and plan.get("asked") else None
            gate = gate_process.Gate(
                module=KIND.module,
                layer=LAYER,
                codes=CODES,
                uid=uids.TLS,
                plan={
                    **plan,
                    "idle_seconds": idle_seconds,
                    **({} if inject is None else {"injected": list(inject[0])}),
                },
                fds={
                    **{name: one.fileno() for name, one in zip(("v4", "v6"), listeners, strict=True)},
                    **({} if names is None else {"names": names}),
                    **({} if inject is None else {"inject": inject[1]}),
                    **({} if leases is None else {"leases": leases.gate_end}),
                    **({} if way is None else {"way": way}),
                },
                calls=PROXY_CALLS if way is not None else CALLS if inject is None else CALLS | INJECT_CALLS,
                namespace=namespace,
                descriptors=_DESCRIPTORS,
                join_files=join_files,
                patience=patience,
            )
            process = stack.enter_context(gate_process.start(gate))
            if leases is not None:
                leases.started()
        watches = process.watches(denied, reached=reached)
        yield gate_process.OpenGate(process, watches if leases is None else {**watches, leases.fileno(): leases.serve})


@contextlib.contextmanager
def by_proxy(
    plan: Mapping[str, Any],
    proxy: Proxy,
    *,
    denied: Callable[[denials.Denial], None],
    names: int | None = None,
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[tuple[gate_process.OpenGate, socket.socket]]:
    """The connector of the operator's proxy for the ``tls`` part of gates.json, and the gate's end of its line.

    ``names`` is the end of a line on which the DNS gate tells the addresses of names.

    Raises:
        errors.RunError: what ``patience`` watches said so, or it was not executed in time.
        errors.KernelError: the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, far = (stack.enter_context(one) for one in lines)
        near.setblocking(False)
        namespace = netns.current()
        stack.callback(os.close, namespace)
        gate = gate_process.Gate(
            module=CONNECTOR.module,
            layer=LAYER,
            codes=frozenset(),
            uid=uids.TLS_CONNECTOR,
            plan={**plan, "proxy": proxy.plan()},
            fds={"line": far.fileno(), **({} if names is None else {"names": names})},
            calls=proxies.CALLS,
            namespace=namespace,
            threads=True,
            keeps_files=True,
            join_files=join_files,
            patience=patience,
        )
        process = stack.enter_context(gate_process.start(gate))
        far.close()
        yield gate_process.OpenGate(process, process.watches(denied)), near


def _listeners(port: int) -> list[socket.socket]:
    """Listening sockets for IPv4 and IPv6. On every address: a redirect goes to whichever the device has first."""
    made: list[socket.socket] = []
    try:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 - ruleset: dnat alone
            one = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((host, port))
            one.listen(_BACKLOG)
    except BaseException:
        for one in made:
            one.close()
        raise
    return made
