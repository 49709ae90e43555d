"""Compare a run's network namespaces with what was made: rules, devices, addresses, routes, settings and members.

policy.prove.live judges the compiled rules. Everything else is compared with constants, or with a listing that was
taken before the agent started. The base rules and the host's own table are compared with the same text as an empty
namespace lists it. The kernel counts the rule transactions of each namespace. A listing is taken again only when that
number has changed, as it does for each name that the DNS gate answers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, structs

from policy import errors
from policy.decompile import documents, host_rules
from policy.decompile.network import live_nft
from policy.grants.sets import spans
from policy.grants.sets.spans import Spans
from policy.prove import connections
from policy.prove.connections import Places
from policy.prove.live import Layer, Standing
from sandbox.attest import cgroups
from sandbox.attest import connections as attest_connections
from sandbox.attest.network_view import Inside, ListingCache, Space, View
from sandbox.kernel import procfs
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.net import conntrack, dump, netlink, nft, old_tables, second_reader
from sandbox.kernel.net import netns as spaces
from sandbox.kernel.procfs import Name
from sandbox.network import addresses, base_rules, namespaces, uplink
from sandbox.storage import json_cache

T = TypeVar("T")
# A process that only looks into these namespaces (another `covenant attest`) stays for as long as nft takes.
_PASSING_SECONDS, _AGAIN_SECONDS = 1.0, 0.05
_SETTLED_SECONDS: Final = 10.0
_GATES: Final = (64_990, 65_000)
# Below ``closures``: the digests of our own texts as nft lists them, by text, nft and kernel.
WALLS: Final = "walls.json"
# Below it too: how the host's table read last, and after which transaction there.
HOST_RULES: Final = "host-rules.json"
# The version of these digests: raise it when policy.decompile.network.live_nft.others changes its output.
_FORM: Final = 1


class Network(Struct, frozen=True):
    """Describe the network that was made for one run.

    ``thread`` is the supervisor's thread that made it; the run's uplink is in that thread's namespace. ``device`` is
    the index of the run's device there, and ``device_lines`` its addresses and routes at the start. ``gates`` maps each
    limit file of the gates' cgroup to its value, and ``bounded`` names the processes in that cgroup. ``run`` describes
    the run as rules of the host see it. ``touching`` lists the rules of other programs that affected the run at its
    start.
    """

    supervisor: Name
    thread: int
    agent: Space
    gateway: Space
    uplink: str
    nft: str
    device: int = 0
    device_lines: tuple[str, ...] = ()
    gates: Mapping[str, str] = msgspec.field(default_factory=dict)
    bounded: tuple[Name, ...] = ()
    run: host_rules.Run | None = None
    touching: tuple[str, ...] = ()

    @classmethod
    def made(
        cls,
        found: namespaces.Spaces,
        *,
        device: str,
        nft: Path,
        own: str = "",
        gates: Mapping[str, str] | None = None,
        reach: Spans = (),
        state: Path | None = None,
    ) -> Network:
        """Read the network as it is before the agent starts.

        ``own`` is the run's device in this thread's namespace, empty without an uplink, and ``reach`` the destinations
        of its grants. The directory ``state`` caches the listing of the host's tables.

        Raises:
            errors.KernelError: Raised when the kernel does not answer.
        """
        supervisor = procfs.name(os.getpid())
        assert supervisor is not None
        agent, gateway = (
            Space(fd, os.fstat(fd).st_ino, *spaces.within(fd, functools.partial(_there, forwards=forwards)))
            for fd, forwards in ((found.agent, False), (found.gateway, True))
        )
        index = dump.index_of(own) if own else 0
        there = tuple(sorted(dump.device_lines(index))) if own else ()
        thread, bounds = threading.get_native_id(), dict(gates or {})
        bounded = tuple(one for pid in sorted(_fenced(bounds)) if (one := procfs.name(pid)) is not None)
        first = cls(supervisor, thread, agent, gateway, device, str(nft), index, there, bounds, bounded)
        if state is None:
            return first
        place = spans.join(connections.span(one) for one in _uplink(first))
        made = structs.replace(first, run=host_rules.Run(own, device, place, reach))
        _, touching = _host_rules(made, ListingCache(), state / "closures" / HOST_RULES)
        return structs.replace(made, touching=tuple(sorted(touching | _routed(made.run))))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Network:
        """Read the document of ``to_json``."""
        agent, gateway = (
            Space(**{**found.pop(name), "lines": tuple(found[f"{name}_lines"])}) for name in ("agent", "gateway")
        )
        supervisor = Name(**found["supervisor"])
        device = found["device"], tuple(found["device_lines"])
        bounded = tuple(Name(**one) for one in found["bounded"])
        # A run that was started by an earlier version has neither.
        run = None
        if (held := found.get("run")) is not None:
            run = host_rules.Run(held["device"], held["uplink"], _spans(held["own"]), _spans(held["reach"]))
        more = *device, found["gates"], bounded, run, tuple(found.get("touching", ()))
        return cls(supervisor, found["thread"], agent, gateway, found["uplink"], found["nft"], *more)

    def to_json(self) -> dict[str, Any]:
        """Return the document for the run's directory."""
        written: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("agent", "gateway"):
            written[f"{name}_lines"] = list(written[name].pop("lines"))
        return written


def view(made: Network, seen: ListingCache, *, state: Path) -> View:
    """Look into all three, with one thread for each. Below ``state`` it is remembered how the host's table reads.

    Raises:
        FileNotFoundError: the supervisor of the run, which holds the namespaces, is gone.
        errors.KernelError: the kernel does not say.
    """

    def gateway() -> Inside:
        # A thread begins in the namespace of the one that began it.
        listing = spaces.aside(lambda: _listed(made, seen, "gateway", "ruleset"))
        try:
            lines, settings = dump.lines() | dump.raw_sockets(), _read(namespaces.GATEWAY_SETTINGS)
            tracked = attest_connections.tracked()
            return Inside(listing(), lines, settings, *tracked)
        finally:
            _settle(listing)

    def agent() -> Inside:
        # No process may change the rules in the agent's namespace: after ours there is no other transaction.
        moved = dump.generation() != made.agent.generation
        listing = _listed(made, seen, "agent", "ruleset") if moved else b""
        return Inside(listing, dump.lines(), _read(namespaces.SETTINGS), *attest_connections.tracked())

    def host() -> tuple[str, frozenset[str], frozenset[str]]:
        digest, touching = _host_rules(made, seen, state / "closures" / HOST_RULES)
        device = dump.device_lines(made.device) if made.device else frozenset()
        return digest, device, touching | _routed(made.run)

    # All at once: where there is a program to wait for, the others need not.
    outside = spaces.aside(lambda: _in_host(made, host))
    at_gateway = spaces.aside(lambda: _in(made, made.gateway, gateway))
    try:
        inside = _in(made, made.agent, agent)
        there = at_gateway()
        digest, device, touching = outside()
        begun = attest_connections.continued(there.connections, _uplink(made))
        tracked = _in_host(made, lambda: tuple(conntrack.looked_up(begun))) if begun else ()
        return View(there, inside, digest, device, tracked, touching)
    finally:
        _settle(at_gateway)
        _settle(outside)


def _routed(run: host_rules.Run | None) -> frozenset[str]:
    """Return the host's routing rules that name the run."""
    return frozenset() if run is None else dump.routing_rules(run.device, run.own)


def _spans(found: Iterable[Iterable[int]]) -> Spans:
    return tuple((first, last) for first, last in found)


def _uplink(made: Network) -> list[str]:
    """Return the gateway's addresses towards the host."""
    found = (line.split() for line in made.gateway.lines if line.startswith("address "))
    return [words[1].partition("/")[0] for words in found if words[-1] == str(namespaces.UPLINK_INDEX)]


def second_opinion(made: Network) -> Iterator[Layer]:
    """Yield a layer for each object in the namespaces of a run that only one of the two readers of netlink sees.

    Raises:
        FileNotFoundError: the supervisor of the run, which holds the namespaces, is gone.
        errors.KernelError: the kernel does not say.
    """
    for name, space in (("agent", made.agent), ("gateway", made.gateway)):
        for line in _in(made, space, second_reader.differences):
            yield Layer("network", Standing.UNREADABLE, f"two readers of the {name}'s namespace that agree", line)


def _settle(wait: Callable[[], object]) -> None:
    """Wait for a thread, so that none outlives its look after an error in another."""
    with contextlib.suppress(Exception):
        wait()


def _host_rules(made: Network, seen: ListingCache, path: Path) -> tuple[str, frozenset[str]]:
    """Return the digest of the host's own table, and the rules of its other tables that touch the run."""
    digest, others = host_listing(Path(made.nft), path, seen)
    if made.run is None:
        return digest, frozenset()
    touching = host_rules.touching(others, made.run)
    # No number says when a table of the older iptables changed.
    if old := old_tables.listed():
        touching |= host_rules.touching(documents.dumps({"nftables": old}), made.run)
    return digest, touching


def host_listing(binary: Path, path: Path, seen: ListingCache) -> tuple[str, bytes]:
    """Return the digest of the host's own table, and the listing of its other tables.

    They are cached from run to run, by the number of the last transaction there.
    """
    where, number = dump.cookie(), dump.generation()
    if seen.host is not None and seen.host[0] == (where, number):
        return seen.host[1:]
    held = json_cache.read(path) or {}
    if (held.get("where"), held.get("number")) == (where, number) and "others" in held:
        digest, others = str(held["digest"]), str(held["others"]).encode()
    else:
        mine, others = host_rules.split(_ruleset(binary), "inet", uplink.TABLE)
        digest = _beside(mine)
        if dump.generation() != number:
            return digest, others
        json_cache.write(path, {"where": where, "number": number, "digest": digest, "others": others.decode()})
    seen.host = (where, number), digest, others
    return digest, others


def _ruleset(binary: Path) -> bytes:
    try:
        return nft.listed(binary, "ruleset")
    except errors.KernelError as e:
        hint = "let `nft -j list ruleset` work on this host: attestation reads which rules touch a run"
        raise errors.KernelError(e.message, where=e.where, hint=hint) from e


def judge(made: Network, found: View, firewall: bytes, *, state: Path, family: set[int]) -> Iterator[Layer]:
    """Yield each difference from the network as made.

    ``firewall`` is the compiled rules, ``family`` the run's own processes.
    """
    expected = functools.partial(_expected, binary=Path(made.nft), path=state / "closures" / WALLS)
    yield from _walls("the walls of the gateway", _beside(found.gateway.listing), (expected(base_rules.GATEWAY),))
    if found.agent.listing:
        yield from _walls(
            "the walls of the agent's namespace", _beside(found.agent.listing), (expected(base_rules.AGENT),)
        )
    if made.uplink:  # a run with services alone has no part of the host's table
        known = (expected(uplink.text(before)) for before in _befores(made.uplink))
        yield from _walls("the host's table", found.host, known)
    yield from _things(made, found)
    yield from _settings(found)
    tracked = (("gateway", found.gateway), ("agent", found.agent))
    yield from attest_connections.judge(
        {name: one.connections for name, one in tracked} | {"host": found.connections},
        {name: one.expected for name, one in tracked},
        _places(made),
        firewall,
    )
    if more := sorted(found.touching - set(made.touching)):
        began = "no rules of others on the host that touch the run, but those that it began with"
        yield Layer("network", Standing.WIDER, began, more[0])
    yield from _bounds(made)
    # After the looks: they have programs of their own there.
    yield from _members(made, family)


def _there(*, forwards: bool) -> tuple[int, tuple[str, ...]]:
    """Return the generation and the lines of a namespace, once the kernel has added the routes that follow.

    The kernel adds routes for IPv6 addresses asynchronously.
    """
    until = time.monotonic() + _SETTLED_SECONDS
    while missing := _following(lines := dump.lines(), forwards=forwards) - lines:
        if time.monotonic() > until:
            raise errors.KernelError(f"a run's network does not settle: there is no {min(missing)}")
        time.sleep(0.002)
    return dump.generation(), tuple(sorted(lines))


def _following(lines: Iterable[str], *, forwards: bool) -> set[str]:
    """Return the routes that the kernel adds for each IPv6 address. A router also answers for the network's own."""
    found = set()
    for line in lines:
        what, _, rest = line.partition(" ")
        address, _, device = rest.partition(" at device ")
        if what == "address" and ":" in address:
            own = ipaddress.IPv6Interface(address)
            found.add(f"route local {own.ip}/128 in table 255 by device {device}")
            if forwards and own.network.prefixlen < 127 and not own.is_loopback:
                found.add(f"route anycast {own.network.network_address}/128 in table 255 by device {device}")
    return found


def _in(made: Network, space: Space, call: Callable[[], T]) -> T:
    return _entered(f"/proc/{made.supervisor.pid}/fd/{space.fd}", space.inode, made, call)


def _in_host(made: Network, call: Callable[[], T]) -> T:
    return _entered(f"/proc/{made.supervisor.pid}/task/{made.thread}/ns/net", None, made, call)


def _entered(path: str, inode: int | None, made: Network, call: Callable[[], T]) -> T:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A descriptor's number is the supervisor's own: it may have been given to something else since.
        if procfs.name(made.supervisor.pid) != made.supervisor or inode not in (None, os.fstat(fd).st_ino):
            raise FileNotFoundError(path)
        return spaces.within(fd, call)
    finally:
        os.close(fd)


def _listed(made: Network, seen: ListingCache, key: str, *what: str) -> bytes:
    """Return a listing, taken again after a transaction.

    The number is read before the listing, so that no transaction is missed.
    """
    number = dump.generation()
    before = seen.listings.get(key)
    if before is not None and before[0] == number:
        return before[1]
    listing = nft.listed(Path(made.nft), *what)
    seen.listings[key] = (number, listing)
    return listing


@functools.lru_cache(maxsize=16)
def _beside(listing: bytes) -> str:
    return hashlib.sha256(live_nft.others(listing)).hexdigest()


def _expected(text: bytes, *, binary: Path, path: Path) -> str:
    """Return the digest of the listing of this text. It is measured once, in an empty namespace, and cached."""
    info = binary.stat()
    which = [_FORM, hashlib.sha256(text).hexdigest(), str(binary), info.st_ino, info.st_ctime_ns, os.uname().release]
    key = hashlib.sha256(json.dumps(which).encode()).hexdigest()
    known = json_cache.read(path) or {}
    if key not in known:
        (fd,) = spaces.make()
        try:
            known[key] = spaces.within(fd, lambda: _alone(binary, text))
        finally:
            os.close(fd)
        json_cache.write(path, known)
    return str(known[key])


def _alone(binary: Path, text: bytes) -> str:
    # Linux 6.1 takes no chain on a device that is not there (later ones do).
    walled = [netlink.End(addresses.GATEWAY_DEVICE, addresses.GATEWAY_MAC)]
    walled += [netlink.End(addresses.AGENT_DEVICE, addresses.AGENT_MAC)]
    with netlink.Route() as route:
        route.do([netlink.veth(*walled)])
    nft.apply(binary, text)
    return _beside(nft.listed(binary, "ruleset"))


def _befores(device: str) -> Iterator[uplink.Before]:
    """Yield each possible earlier setting of the uplink interface.

    It decides which packets of other interfaces the table drops as well.
    """
    for ipv4 in (False, True):
        for ipv6 in (None, False, True):
            yield uplink.Before(device, ipv4, ipv6)


def _walls(name: str, listed: str, expected: Iterable[str]) -> Iterator[Layer]:
    if listed not in expected:
        yield Layer("network", Standing.WIDER, f"{name} as they are written", "other rules, or other tables")


def _things(made: Network, found: View) -> Iterator[Layer]:
    """Devices, addresses, routes and rules. runsc takes those of the agent's own namespace over, so there may be less
    there than was made, and nothing else."""
    for name, space, inside, whole in (
        ("gateway", made.gateway, found.gateway, True),
        ("agent", made.agent, found.agent, False),
    ):
        more, less = sorted(inside.lines - set(space.lines)), sorted(set(space.lines) - inside.lines)
        if more:
            yield Layer("network", Standing.WIDER, f"in the namespace of the {name} what was made there", more[0])
        if less and whole:
            yield Layer("network", Standing.WIDER, f"in the namespace of the {name} {less[0]}", "it is gone")
    # The host's end of the uplink. Nothing else of the host's own namespace is checked.
    if more := sorted(found.device - set(made.device_lines)):
        yield Layer("network", Standing.WIDER, "at the run's device of the host what was made there", more[0])
    if less := sorted(set(made.device_lines) - found.device):
        yield Layer("network", Standing.WIDER, f"at the run's device of the host {less[0]}", "it is gone")


def _settings(found: View) -> Iterator[Layer]:
    for name, inside, settings in (
        ("gateway", found.gateway, namespaces.GATEWAY_SETTINGS),
        ("agent", found.agent, namespaces.SETTINGS),
    ):
        for one, value in settings.items():
            if inside.settings[one] != str(value):
                expected = f"net/{one} {value} in the namespace of the {name}"
                yield Layer("network", Standing.WIDER, expected, inside.settings[one])


def _places(made: Network) -> Places:
    agent, gateway, uplink = (
        frozenset(ipaddress.ip_address(one).packed for one in several)
        for several in (
            (addresses.AGENT4, addresses.AGENT6),
            (addresses.GATEWAY4, addresses.GATEWAY6),
            _uplink(made),
        )
    )
    links = (addresses.AGENT4, addresses.PREFIX4), (addresses.AGENT6, addresses.PREFIX6)
    return Places(agent, gateway, uplink, tuple(ipaddress.ip_network(one, strict=False) for one in links))


def _bounds(made: Network) -> Iterator[Layer]:
    """Yield a finding for each changed limit of the gates. The agent decides how much work the gates have."""
    for file, value in made.gates.items():
        held = Path(file).read_text().strip()
        if not cgroup.same(held, value):
            yield Layer("cgroup", Standing.WIDER, f"{Path(file).name} {value} for the run's gates", held)
    yield from cgroups.judge((str(Path(file).parent) for file in made.gates), "the run's gates")
    fenced = _fenced(made.gates)
    for one in made.bounded:
        if one.pid not in fenced and procfs.name(one.pid) == one:
            yield Layer("cgroup", Standing.WIDER, "the run's gates within their limits", f"process {one.pid} is not")


def _read(settings: Iterable[str]) -> dict[str, str]:
    return {one: namespaces.setting(one).read_text().strip() for one in settings}


def _members(made: Network, family: set[int]) -> Iterator[Layer]:
    """Yield a finding for each stranger in the namespaces: not the run's own process and not one of its gates.

    A process that only passes through is given `_PASSING_SECONDS` to leave.
    """
    until = time.monotonic() + _PASSING_SECONDS
    while True:
        inside = procfs.in_namespace("net", [made.agent.inode, made.gateway.inode])
        at_home = {*family, made.supervisor.pid}
        strangers = [pid for pid in sorted(inside[made.agent.inode] - at_home) if not procfs.descends(pid, family)]
        fenced = _fenced(made.gates)
        strangers += sorted(pid for pid in inside[made.gateway.inode] if not _serves(pid, made, fenced))
        if not strangers or time.monotonic() > until:
            break
        time.sleep(_AGAIN_SECONDS)
    for pid in strangers:
        yield Layer("namespace", Standing.WIDER, "the run's own processes in its network namespaces", f"process {pid}")


def _fenced(bounds: Mapping[str, str]) -> set[int]:
    """Return the processes in the gates' cgroup: those in every hierarchy that has a limit of theirs."""
    members = [
        {int(line) for line in (directory / "cgroup.procs").read_text().split()}
        for directory in {Path(file).parent for file in bounds}
    ]
    return set.intersection(*members) if members else set()


def _serves(pid: int, made: Network, fenced: set[int]) -> bool:
    """Whether this is the supervisor, or a gate of its: a user of a gate's, without rights, under a filter, and within
    the gates' limits."""
    one = procfs.process(pid) if pid != made.supervisor.pid else None
    if one is None:
        return True  # the supervisor, or gone
    return (
        one.parent == made.supervisor.pid
        and pid in fenced
        and _GATES[0] <= one.uid < _GATES[1]
        and one.no_new_privs
        and one.seccomp == 2
        and not any(one.capabilities.values())
    )
