"""Connect gateways to the operator's interface in the supervisor's own namespace, and allow nothing else over it.

    cv-12345678 ── [ the host: table inet covenant_uplink ] ── the operator's interface

One table serves all runs together. Its comment holds the settings to restore when the last run ends, so that every
process in this namespace can find them. Of the host's settings only two of the one interface are changed. The table
drops the packets that these would let pass besides those of our runs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from policy import errors
from sandbox.kernel.net import conntrack, netlink, nft, nft_table
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses, base_rules, namespaces
from sandbox.storage import atomic_file

TABLE: Final = "covenant_uplink"
LOCK: Final = Path("/run/covenant-uplink.lock")
_LOCK_SECONDS = 20.0
# The longest time that a starting run keeps the lock. Its start may hang: in a frozen cgroup, or in a file system that
# does not answer.
KEEP_SECONDS = 3.0
_ATTEMPTS = 64
# Settings of a run's device on the host, which `default` there may set otherwise.
_DEVICE: Final = {
    "ipv4/conf/{}/rp_filter": 1,
    "ipv4/conf/{}/send_redirects": 0,
    "ipv4/conf/{}/accept_redirects": 0,
    "ipv4/conf/{}/accept_source_route": 0,
    "ipv6/conf/{}/accept_ra": 0,
    "ipv6/conf/{}/accept_dad": 0,
    "ipv6/conf/{}/accept_redirects": 0,
    "ipv6/conf/{}/addr_gen_mode": 1,
}
_FORWARD4, _FORWARD6 = "ipv4/conf/{}/forwarding", "ipv6/conf/{}/force_forwarding"
_EVERYWHERE = {_FORWARD4: "ipv4/conf/all/forwarding", _FORWARD6: "ipv6/conf/all/forwarding"}
_COMMENT = re.compile(r"covenant 1 ([A-Za-z0-9._-]{1,15}) ([01]) ([01-]) ([01])(?: ([0-9]{1,10}))?")


class Before(Struct, frozen=True):
    """The operator's interface, and its forwarding before the first run.

    ``ipv6`` is None if the kernel cannot forward it for one interface; no run gets IPv6 then. ``router`` says whether
    the host forwarded IPv4. ``index`` is the interface's number, which survives a change of its name; 0 if unknown.
    """

    device: str
    ipv4: bool
    ipv6: bool | None
    router: bool = False
    index: int = 0

    @property
    def comment(self) -> str:
        """Return the comment of the table."""
        six = "-" if self.ipv6 is None else str(int(self.ipv6))
        return f"covenant 1 {self.device} {int(self.ipv4)} {six} {int(self.router)} {self.index}"


def look(device: str) -> Before:
    """Read the present forwarding of the interface.

    Raises:
        errors.NotEnforceableError: Raised when there is no such interface.
    """
    try:
        ipv4 = _read(_FORWARD4.format(device)) != 0
    except OSError as e:
        raise _absent(device) from e
    router = _read(_EVERYWHERE[_FORWARD4]) != 0
    try:
        index = socket.if_nametoindex(device)
    except OSError as e:
        raise _absent(device) from e
    ipv6: bool | None = True
    if not _read(_EVERYWHERE[_FORWARD6]):
        there = namespaces.setting(_FORWARD6.format(device)).exists()
        ipv6 = _read(_FORWARD6.format(device)) != 0 if there else None
    return Before(device, ipv4, ipv6, router, index)


def text(before: Before) -> bytes:
    """Return the text of the table, which replaces an existing one."""
    guards = []
    if not before.ipv4:
        guards.append(f'\t\tiifname "{before.device}" meta nfproto ipv4 counter drop')
    if before.ipv6 is False:
        guards.append(f'\t\tiifname "{before.device}" meta nfproto ipv6 counter drop')
    ours = f'iifname "{addresses.HOST_PREFIX}*"'
    return "\n".join([
        f"table inet {TABLE}",
        f"delete table inet {TABLE}",
        f"table inet {TABLE} {{",
        f'\tcomment "{before.comment}"',
        base_rules.SOON.rstrip("\n"),
        "\tchain refuse {",
        "\t\tmeta l4proto tcp counter reject with tcp reset",
        "\t\tcounter reject with icmpx port-unreachable",
        "\t}",
        "\tchain input {",
        "\t\ttype filter hook input priority -10; policy accept;",
        f"\t\t{ours} goto refuse",
        "\t}",
        "\tchain forward {",
        "\t\ttype filter hook forward priority -10; policy accept;",
        *(f'\t\t{ours} {rule}' for rule in base_rules.SOON_RULES),
        f'\t\t{ours} oifname "{before.device}" accept',
        f"\t\t{ours} goto refuse",
        f'\t\toifname "{addresses.HOST_PREFIX}*" iifname "{before.device}" ct state established,related accept',
        f'\t\toifname "{addresses.HOST_PREFIX}*" counter drop',
        *guards,
        "\t}",
        "\tchain postrouting {",
        "\t\ttype nat hook postrouting priority 100; policy accept;",
        f'\t\t{ours} oifname "{before.device}" masquerade',
        "\t}",
        "}",
        "",
    ]).encode("ascii")  # fmt: skip


def reserved() -> str:
    """Describe the addresses that runs have in this namespace."""
    return f"runs have addresses of {addresses.UPLINKS[0]} and {addresses.UPLINKS[1]} here, hidden from everybody else"


@contextlib.contextmanager
def connecting(
    run: namespaces.Spaces, run_id: str, *, device: str, binary: Path, stays: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], addresses.Uplink]]:
    """Yield a function that connects the run's gateway to ``device`` until the block ends.

    A thread makes the parts that all runs share meanwhile. The last run removes them. ``uplink_watch`` keeps them whole
    in between. ``stays`` is called when a part
    cannot be removed; ``recover`` must remove it then.

    Raises:
        errors.NotEnforceableError: Raised by the function when there is no such interface, or no place is left.
        errors.KernelError: Raised by the function and at the block's end when the kernel refuses a part. Nothing is
            left then.
    """
    name, wanted = addresses.host_device(run_id), threading.Event()
    ended = functools.partial(_end_or_say, stays, name, binary)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as turn:

        def ahead() -> Before | None:
            before = _shared(turn, undo, ended, device, binary)
            # INVARIANT: hold the lock until the run's device exists. Otherwise another run that ends could take itself
            # for the last and remove the table. If that blocks the others for too long, the table is made again.
            if wanted.wait(KEEP_SECONDS):
                return before
            turn.close()
            return None

        shared = spaces.aside(ahead)

        def connect() -> addresses.Uplink:
            wanted.set()
            before = shared() or _shared(turn, undo, ended, device, binary)
            place = plug(run, run_id, name, before)
            undo.callback(unplug, name, place)
            turn.close()
            return place

        try:
            yield connect
        finally:
            # On every exit: wait until all parts are made before any is removed.
            wanted.set()
            with contextlib.suppress(errors.CovenantError, OSError):
                shared()


def _shared(
    turn: contextlib.ExitStack,
    undo: contextlib.ExitStack,
    ended: Callable[[], None],
    device: str,
    binary: Path,
) -> Before:
    """Make the table of all runs and enable forwarding. ``ended`` undoes both."""
    turn.enter_context(_lock())
    held = held_table()
    if held is not None and held.device != device:
        raise errors.NotEnforceableError(
            f"runs are live that use the uplink `{held.device}`",
            hint="let them end before another interface is used",
            grant="resources.network",
        )
    now = look(device)
    undo.callback(ended)
    return _made(held, now, binary)


def _made(held: Before | None, now: Before, binary: Path, *, lost: Before | None = None) -> Before:
    """Make what is missing of the table and of forwarding. The caller holds the lock.

    ``lost`` is the content of a table that was deleted: forwarding was switched on since, so ``now`` hides what was
    before.
    """
    if held is not None and _is_outdated(held, now):
        forward(held, on=False)
        held = None
    before = held or (lost if lost is not None and not _is_outdated(lost, now) else now)
    if held is None:
        # Only the interface's name varies. The kernel takes the transaction whole or refuses it.
        nft.apply(binary, text(before), checked=False)
    forward(before, on=True)
    return before


def _is_outdated(held: Before, now: Before) -> bool:
    """Whether the table describes an interface that is not there any more, or a host that does not forward any more.

    A VPN makes its interface anew under its name: the old one is gone, or renamed. A router may cease to be one.
    """
    moved = held.index != 0 and held.index != now.index
    return moved or (held.ipv4 and not now.ipv4) or (held.ipv6 is True and now.ipv6 is not True)


def whole(device: str, own: str, known: Before | None) -> Before | None:
    """Return the table's content if it describes the interface, and both the interface and the run's device ``own``
    forward; None if a part is to be mended. Without one of the two nothing can be, and ``known`` is returned.

    Raises:
        errors.KernelError: Raised as by ``held_table``.
    """
    try:
        now, ours = look(device), _read(_FORWARD4.format(own)) != 0
    except (errors.NotEnforceableError, FileNotFoundError):
        return known
    held = held_table()
    if held is None or _is_outdated(held, now):
        return None
    return held if ours and now.ipv4 and (held.ipv6 is None or now.ipv6 is not False) else None


def mend(device: str, own: str, known: Before | None, binary: Path) -> None:
    """Make again what is missing of a live run's way out (``whole``). ``known`` is what the table was.

    Raises:
        errors.NotEnforceableError: Raised when there is no such interface.
        errors.KernelError: Raised when the kernel refuses a part, or another process holds the lock.
    """
    with _lock(seconds=0.0):
        forwards = namespaces.setting(_FORWARD4.format(own))
        held = held_table()
        if not forwards.exists() or (held is not None and held.device != device):
            return
        _made(held, look(device), binary, lost=known)
        forwards.write_text("1")


def noted(about: Mapping[str, Any]) -> addresses.Uplink | None:
    """Return the place in a run's note (sandbox.rundir.directory). None if it had none yet."""
    return addresses.Uplink(about["ipv4"], about["ipv6"]) if "ipv4" in about else None


def recover(runs: Mapping[str, addresses.Uplink | None], *, binary: Path) -> None:
    """Remove the remains of runs of a killed supervisor from this namespace.

    ``runs`` maps a run id to its place, None if it had none yet.

    Raises:
        errors.KernelError: Raised when the kernel refuses a removal.
    """
    for run_id, place in runs.items():
        end(addresses.host_device(run_id), binary)
        if place is not None:
            forget(place)


def held_table() -> Before | None:
    """Read the earlier settings from the comment of the table in this namespace. Returns None without a table.

    Raises:
        errors.KernelError: Raised when the kernel does not answer, or a table of this name is not ours.
    """
    found = nft_table.comment(TABLE)
    if found is None:
        return None
    match = _COMMENT.fullmatch(found)
    if match is None:
        raise errors.KernelError(f"table inet {TABLE} is not one of ours", hint=f"nft delete table inet {TABLE}")
    ipv6 = None if match[3] == "-" else match[3] == "1"
    return Before(match[1], match[2] == "1", ipv6, match[4] == "1", int(match[5] or 0))


def plug(run: namespaces.Spaces, run_id: str, name: str, before: Before) -> addresses.Uplink:
    """Make both ends of the run's uplink, at a place that no other run has."""
    own = spaces.current()
    try:
        namespaces.connect_uplink(run, name, own)
    finally:
        os.close(own)
    settings = {**_DEVICE, _FORWARD4: 1}
    if before.ipv6 is not None and namespaces.setting(_FORWARD6.format(name)).exists():
        settings[_FORWARD6] = 1
    for setting, value in settings.items():
        namespaces.setting(setting.format(name)).write_text(str(value))
    with netlink.Route() as route:
        index = route.links()[name]
        route.do([netlink.address(index, addresses.HOST4, 32), netlink.address(index, addresses.HOST6, 64)])
        route.do([netlink.up(index)])
        place = _place(route, index, zlib.crc32(run_id.encode()))
        own_ends = [netlink.neighbour(index, ip, addresses.UPLINK_MAC) for ip in (place.ipv4, place.ipv6)]
        route.do([netlink.route(index, place.ipv6), *own_ends])
    namespaces.open_uplink(run, place, ipv6=before.ipv6 is not None)
    return place


def _place(route: netlink.Route, index: int, start: int) -> addresses.Uplink:
    """Take a free place by adding its route. An existing route belongs to another run, and the kernel refuses it."""
    for attempt in range(_ATTEMPTS):
        place = addresses.uplink(start + attempt)
        try:
            route.do([netlink.route(index, place.ipv4)])
        except errors.KernelError as e:
            if isinstance(e.__cause__, FileExistsError):
                continue
            raise
        return place
    raise errors.NotEnforceableError("no address is left for another run", grant="resources.network")


def unplug(name: str, place: addresses.Uplink) -> None:
    """Delete the run's device, then forget its connections.

    Device before connections: the gates still live, and a packet of theirs would make a forgotten entry again.
    """
    with _lock(), netlink.Route() as route:
        links = route.links()
        if name in links:
            _delete(route, links[name])
        forget(place)


def _delete(route: netlink.Route, index: int) -> None:
    """Delete a device. It may vanish at the same time, with the namespace of a run whose last process ends."""
    try:
        route.do([netlink.delete(index)])
    except errors.KernelError as e:
        if not (isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.ENODEV):
            raise


def forget(place: addresses.Uplink) -> None:
    """Forget the connections of a run that is over. If the kernel cannot, they end by their own timeouts."""
    for address in (place.ipv4, place.ipv6):
        with contextlib.suppress(errors.KernelError):
            conntrack.forget(address)


def end(name: str, binary: Path) -> None:
    """Delete one run's device, and with the last device all shared parts."""
    with _lock(), netlink.Route() as route:
        links = route.links()
        if name in links:
            _delete(route, links[name])
        if any(link.startswith(addresses.HOST_PREFIX) for link in links if link != name):
            return
        held = held_table()
        if held is not None:
            forward(held, on=False)
            # Create the table first: another program may have deleted it already, and the delete would fail.
            nft.apply(binary, f"table inet {TABLE}\ndelete table inet {TABLE}\n".encode(), checked=False)


def _end_or_say(stays: Callable[[], None], name: str, binary: Path) -> None:
    """Call ``end``. On a failure it calls ``stays``; an earlier error stays the first."""
    first = sys.exc_info()[1]
    try:
        end(name, binary)
    except (errors.KernelError, OSError) as e:
        stays()
        if first is None:
            raise
        errors.also(first, f"what runs share on the uplink could not be taken away: {e}")


def forward(before: Before, *, on: bool) -> None:
    """Switch forwarding on if it was off, or off again.

    An interface that is gone is skipped. A host that became a router meanwhile, as by docker, stays one. Forwarding is
    switched off at the same interface even under a new name, and never at another that has the old name now.
    """
    device = before.device if on else _named(before)
    if device is None:
        return
    for setting, was, router in ((_FORWARD4, before.ipv4, before.router), (_FORWARD6, before.ipv6, False)):
        if was is not False or (not on and (_read(_EVERYWHERE[setting]) != 0) is not router):
            continue
        try:
            namespaces.setting(setting.format(device)).write_text(str(int(on)))
        except FileNotFoundError as e:
            if on:
                raise _absent(before.device) from e


def _named(before: Before) -> str | None:
    """Return the present name of the interface. Returns None if it is gone."""
    if not before.index:
        return before.device
    with netlink.Route() as route:
        return next((name for name, index in route.links().items() if index == before.index), None)


def _absent(device: str) -> errors.NotEnforceableError:
    return errors.NotEnforceableError(
        f"the uplink `{device}` is not an interface of this host",
        hint="name one that `ip link` shows: uplink in config.toml",
        grant="resources.network",
    )


def _read(name: str) -> int:
    return int(namespaces.setting(name).read_text())


@contextlib.contextmanager
def _lock(seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of all supervisors of this machine: the last run must know that it is the last.

    Raises:
        errors.KernelError: Raised when another process holds it for too long.
    """
    fd = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not atomic_file.take(fd, seconds):
            raise errors.KernelError(f"`{LOCK}` is held by another supervisor")
        yield
    finally:
        # INVARIANT: unlock explicitly, not by the last close. A child forked meanwhile by another thread holds the
        # descriptor as well, and may hang on its way into a cgroup; the others would wait for it.
        atomic_file.let_go(fd)
