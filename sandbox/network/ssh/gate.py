"""Opens the ssh-agent service of a run: its listener, the gate that reads, and the desk that signs.

    ssh -> SSH_AUTH_SOCK, the relay -> 192.0.0.1:81 [ the gate: an empty namespace ] -> line -> [ the desk: the shim ]

The relay carries bytes and decides nothing: the sandbox reaches the gate's port without it as well. The gate reads
them and has no key; the desk has the keys, and reads one request of a fixed form.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from policy import denials, errors
from policy.grants.services import SshSet
from policy.ssh import protocol, sessions
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network.gate import prefork, uids
from sandbox.network.gate import process as gate_process
from sandbox.network.gate.listener import listening
from sandbox.network.ssh.desk import SshDesk, SshSigned, Then

LAYER: Final = "ssh"
CODES: Final = frozenset({
    "limit", "malformed", "unavailable", protocol.REQUEST_REFUSED, sessions.ALGORITHM_REFUSED,
    sessions.BINDING_REFUSED, sessions.FORWARDED, sessions.HOST_NOT_GRANTED, sessions.KEY_NOT_GRANTED,
    sessions.NOT_A_LOGIN, sessions.NOT_BOUND, sessions.SESSION_REFUSED,
})  # fmt: skip
KIND: Final = prefork.Kind("sandbox.network.ssh.server", own_network=True)
CALLS: Final = frozenset({
    "accept4", "getpeername", "getpid", "getsockname", "getsockopt", "ioctl", "listen", "sendmsg", "setsockopt",
    "shutdown",
})  # fmt: skip
_BACKLOG: Final = 16


class SshAgentTerms(Struct, frozen=True):
    """The operator's part of a run's keys of SSH.

    ``ask`` looks a secret up; ``signed`` takes the row of each signature before it is given. ``watches`` are the
    vault's.
    """

    ask: Callable[[str, Then], None]
    signed: Callable[[SshSigned], None]
    watches: Mapping[int, Callable[[], errors.RunError | None]] = msgspec.field(default_factory=dict)


@contextlib.contextmanager
def open(  # noqa: A001 - the module's verb: gate.open(...)
    plan: Mapping[str, Any],
    terms: SshAgentTerms,
    *,
    inside: Callable[[Callable[[], Any]], Any],
    denied: Callable[[denials.Denial], None],
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Iterator[gate_process.OpenGate]:
    """Serve the ``ssh`` part of gates.json while the block lasts. Does not wait until the gate is ready.

    Raises:
        errors.RunError: what ``patience`` watches said so, or the process was not executed in time.
        errors.KernelError: a listener cannot be made, or the process cannot be started.
    """
    granted = SshSet.rows((one["secret"], one["host"], one["key"]) for one in plan["keys"])
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(contextlib.closing(SshDesk(granted, terms)))
        try:
            listener = inside(functools.partial(listening, plan["listen"], _BACKLOG))
        except OSError as e:
            raise errors.KernelError(f"cannot listen for the ssh-agent service: {e.strerror}") from e
        with listener:
            gate = gate_process.Gate(
                module=KIND.module,
                layer=LAYER,
                codes=CODES,
                uid=uids.SSH_AGENT,
                plan={"keys": plan["keys"]},
                fds={"listener": listener.fileno(), "line": desk.gate_end},
                calls=CALLS,
                join_files=join_files,
                patience=patience,
            )
            process = stack.enter_context(gate_process.start(gate))
        desk.started()
        yield gate_process.OpenGate(process, {**terms.watches, desk.fileno(): desk.serve, **process.watches(denied)})
