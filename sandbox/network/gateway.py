"""Make a run's gateway: namespaces, rules, gates and uplink, in an order in which nothing is open too early.

    (1) two namespaces, a link that is down
    (2) the compiled rules and the walls around them, checked, then loaded in one transaction
    (3) the link up: from here on the rules apply
    (4) the gates are started: each needs a moment to come up and to be sealed
    (5) the way out by the operator's interface, in that moment
    (6) the gates are ready

(2) to (6) may follow the start of runsc, which has much to do before its agent's first instruction, but not that.
All of it lasts as long as the block, and the agent must have ended before.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy import denials, errors
from policy.compile.artefacts import Artefacts
from policy.grants.sets import hostnames
from sandbox.config import Config, file_of, trusted_binary
from sandbox.kernel.net import conntrack, nflog, nft
from sandbox.kernel.net import netns as spaces
from sandbox.kernel.proc.spawn import PATIENCE, Patience
from sandbox.network import addresses, base_rules, namespaces, resolvers, ruleset_cache, uplink
from sandbox.network.dns import gate as dns_gate
from sandbox.network.forwarded import ForwardedFlows
from sandbox.network.gate import prefork
from sandbox.network.gate import process as gate_process
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.proxy import ProxyTerms
from sandbox.network.inject import gate as inject_gate
from sandbox.network.inject import wire as inject_wire
from sandbox.network.publish import gate as publish_gate
from sandbox.network.publish import host_gate
from sandbox.network.reached import TellReached
from sandbox.network.service import gate as service_gate
from sandbox.network.ssh import gate as ssh_gate
from sandbox.network.tls import gate as tls_gate
from sandbox.network.uplink_watch import UplinkWatch

# Expired entries are left to the kernel where there are no more.
_FEW = base_rules.MAX_CONNECTIONS // 2
Watches = Mapping[int, Callable[[], errors.RunError | None]]


@dataclass
class Gateway:
    """The run's gateway for its other parts: the namespaces, and once it is made the watches and the uplink's place."""

    spaces: namespaces.Spaces
    _make: Callable[[Gateway], None]
    place: addresses.Uplink = field(init=False)
    watches: dict[int, Callable[[], errors.RunError | None]] = field(default_factory=dict)
    gates: Sequence[gate_process.OpenGate] = ()
    remembered: conntrack.Remembered = field(init=False)
    services: service_gate.ServiceGate | None = None
    inject: inject_gate.InjectGate | None = None
    listening: publish_gate.Listening | None = None
    host: host_gate.HostGate | None = None
    forwarded: ForwardedFlows | None = None
    watch: UplinkWatch | None = None

    def make(self) -> None:
        """Carry out (2) to (6).

        Raises:
            errors.NotEnforceableError: Raised when the operator's interface does not exist.
            errors.MachineError: Raised when a part cannot be made.
            errors.RunError: Raised when a watch of a gate's start returns it, or the gate is not executed in time.
        """
        self._make(self)

    def stop(self) -> bool:
        """End every gate and report its last denials and destinations. Called once the agent is dead.

        Returns whether every destination was reported.
        """
        is_whole = True
        if self.services is not None:
            self.services.end()
        if self.inject is not None:
            self.inject.end()
        for gate in self.gates:
            is_whole = gate.process.tell_last() and is_whole
            gate.process.end()
            gate.process.tell_rest()
        if self.listening is not None:
            self.listening.end()
        if self.host is not None:
            self.host.end()
        self._count()
        return is_whole

    def collect(self) -> None:
        """Remove expired entries from the tables, and count the destinations of the others. Called every second.

        The way out is made again where the host has lost a part of it.
        """
        if self.watch is not None:
            self.watch.look()
        self._count()

    def _count(self) -> None:
        if self.remembered.count() and (self.forwarded is not None or self.remembered.count() > _FEW):
            entries = self.remembered.counted()
            if self.forwarded is not None:
                self.forwarded.look(entries)


@contextlib.contextmanager
def opened(
    artefacts: Artefacts,
    run_id: str,
    *,
    config: Config,
    note: Callable[[Mapping[str, Any]], None],
    denied: denials.Told,
    join_files: Sequence[str] = (),
    patience: Patience = PATIENCE,
    services: service_gate.Terms | None = None,
    reached: TellReached | None = None,
    publish: publish_gate.PublishTerms | None = None,
    inject: inject_gate.InjectTerms | None = None,
    host: host_gate.HostTerms | None = None,
    ssh: ssh_gate.SshAgentTerms | None = None,
    desk: LeaseDesk | None = None,
    proxy: ProxyTerms | None = None,
) -> Iterator[Gateway]:
    """Make step (1) of a run's gateway. ``Gateway.make`` does the rest, before which no agent may run.

    ``note`` records the parts outside our own descriptors before they are made, and a part that cannot be removed
    (``left``). ``join_files`` are files of the cgroup that the gates join (``gate_leaf``). ``patience`` is for their
    start. ``services`` are the terms of the service gate, where one is to answer, ``publish`` those of the published
    ports, ``inject`` those of the secrets that are added to requests, ``host`` those of the ports of this host, and
    ``ssh`` those of the keys that sign logins. ``desk`` holds what needs a lease; without it that is denied.
    ``reached`` is told the destinations of the agent.

    An agent without destinations has no way out of its gateway at all, and neither has one behind the operator's
    ``proxy``: the TLS gate's connector asks the proxy, from the caller's own namespace.

    Raises:
        errors.NotEnforceableError: Raised when the operator has configured no interface.
        errors.MachineError: Raised when a part cannot be made or removed. Nothing is left of a failed start.
    """
    is_off = artefacts.json("network.json")["mode"] == "off" or proxy is not None
    if not is_off:
        _check_uplink(config)
    binary = trusted_binary(config.nft)
    with contextlib.ExitStack() as stack:
        # They import for longer than the rest takes.
        stack.callback(prefork.drop)
        prefork.ahead(_kinds(artefacts, services, inject, proxy, ssh), patience)
        listening = _listening(artefacts, publish, stack)
        made = stack.enter_context(namespaces.made())  # (1)
        namespaces.connect(made)
        about = {"agent": made.agent, "gateway": made.gateway, "device": addresses.host_device(run_id)}
        plug: Callable[[], addresses.Uplink] | None = None
        note(about)
        if not is_off:
            # What it makes at once is no way out of these namespaces yet.
            stays = functools.partial(_left, note, about)
            connecting = uplink.connecting(made, run_id, device=config.uplink, binary=binary, stays=stays)
            plug = stack.enter_context(connecting)

        def make(gateway: Gateway) -> None:
            rules = artefacts.files["firewall.nft"] + base_rules.GATEWAY
            made.inside(lambda: ruleset_cache.apply(binary, rules, state=config.state))  # (2)
            spaces.within(made.agent, lambda: nft.apply(binary, base_rules.AGENT, checked=False))
            namespaces.count_bytes(made)
            namespaces.open_link(made)  # (3)
            given: dict[str, Any] = {
                "inside": made.inside,
                "denied": denied if proxy is None else proxy.watched(denied),
                "join_files": join_files,
                "patience": patience,
            }
            reads = None if inject is None else _reading(artefacts, inject, gateway, given, stack)
            gateway.gates = _gates(artefacts, config, given, stack, reached, reads, desk, proxy)  # (4)
            if listening is not None:
                gateway.gates = [*gateway.gates, *stack.enter_context(publish_gate.open(listening, **given))]
            _beside(artefacts, gateway, host, ssh, given, stack)
            if services is not None:
                plan = artefacts.json("gates.json")["services"]
                gateway.services = stack.enter_context(service_gate.open(plan, services, **given))
            refused = stack.enter_context(contextlib.closing(made.inside(lambda: nflog.RefusedPackets(denied))))
            gateway.watches[refused.fileno()] = refused.ready
            gateway.remembered = stack.enter_context(contextlib.closing(made.inside(conntrack.Remembered)))
            if plug is None:
                namespaces.open_no_uplink(made)
            else:
                gateway.place = place = plug()  # (5)
                note({**about, "ipv4": place.ipv4, "ipv6": place.ipv6})
                watch = UplinkWatch(config.uplink, addresses.host_device(run_id), binary)
                gateway.watch = stack.enter_context(contextlib.closing(watch))
            _await_gates(gateway)  # (6)

        counts = None if reached is None or plug is None else ForwardedFlows(reached)
        yield Gateway(made, make, listening=listening, forwarded=counts)


def _check_uplink(config: Config) -> None:
    if not config.uplink:
        raise errors.NotEnforceableError(
            "a network needs an uplink, and none is named",
            hint=f'write uplink = "NAME" in {file_of(config.state)}, with an interface that `ip link` shows',
            grant="resources.network",
        )


def _await_gates(gateway: Gateway) -> None:
    """Wait until each gate is ready, and take its watches."""
    for gate in gateway.gates:
        gate.process.ready()
        gateway.watches.update(gate.watches)
    if gateway.inject is not None:
        gateway.inject.ready()
        gateway.watches.update(gateway.inject.watches)
    if gateway.services is not None:
        for process in gateway.services.processes:
            process.ready()
        gateway.watches.update(gateway.services.watches)


def _listening(
    artefacts: Artefacts, publish: publish_gate.PublishTerms | None, stack: contextlib.ExitStack
) -> publish_gate.Listening | None:
    plan = artefacts.json("gates.json").get("publish")
    return None if plan is None or publish is None else stack.enter_context(publish_gate.Listening(plan, publish))


def _beside(
    artefacts: Artefacts,
    gateway: Gateway,
    host: host_gate.HostTerms | None,
    ssh: ssh_gate.SshAgentTerms | None,
    given: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> None:
    """Start the gates of this host's ports and of keys of SSH, where the policy has them."""
    plan = artefacts.json("gates.json")
    if host is not None and plan.get("host"):
        gateway.host = stack.enter_context(host_gate.open(plan["host"], host, **given))
        gateway.gates = [*gateway.gates, *gateway.host.processes]
    if ssh is not None:
        gateway.gates = [*gateway.gates, stack.enter_context(ssh_gate.open(plan["ssh"], ssh, **given))]


def _left(note: Callable[[Mapping[str, Any]], None], about: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the end of the next run that has a network takes it away
        note({**about, "left": True})


def _reading(
    artefacts: Artefacts,
    terms: inject_gate.InjectTerms,
    gateway: Gateway,
    given: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> tuple[Sequence[str], int]:
    """Start the gate that reads requests. Return its hosts and the line to it, which ``stack`` closes."""
    plan = artefacts.json("gates.json")["inject"]
    hands, takes = inject_gate.line()
    stack.enter_context(hands)
    with takes:
        shared = {name: value for name, value in given.items() if name != "inside"}
        gateway.inject = stack.enter_context(inject_gate.open(plan, terms, takes.fileno(), **shared))
    return sorted(inject_wire.requests(plan).hosts), hands.fileno()


def _kinds(
    artefacts: Artefacts,
    services: service_gate.Terms | None,
    inject: inject_gate.InjectTerms | None,
    proxy: ProxyTerms | None,
    ssh: ssh_gate.SshAgentTerms | None,
) -> list[prefork.Kind]:
    plan = artefacts.json("gates.json")
    served = [] if services is None else services.kinds()
    served += [] if inject is None else [inject_gate.KIND]
    served += [] if ssh is None else [ssh_gate.KIND]
    served += [tls_gate.CONNECTOR] if proxy is not None and plan["tls"] is not None else []
    if services is not None and plan["services"].get("web", {}).get("fetch"):
        served.append(service_gate.READER)
    served += host_gate.KINDS if plan.get("publish") or plan.get("host") else []
    return served + [kind for name, kind in (("dns", dns_gate.KIND), ("tls", tls_gate.KIND)) if plan[name] is not None]


def _gates(
    artefacts: Artefacts,
    config: Config,
    given: Mapping[str, Any],
    stack: contextlib.ExitStack,
    reached: TellReached | None,
    reads: tuple[Sequence[str], int] | None,
    desk: LeaseDesk | None,
    proxy: ProxyTerms | None,
) -> list[gate_process.OpenGate]:
    """Both gates, as far as the policy needs them; started, and perhaps not ready. ``given`` is what both are given.

    ``reads`` are the hosts whose requests are read, and the line to the gate that does.
    """
    plan = artefacts.json("gates.json")
    gates: list[gate_process.OpenGate] = []
    tells: socket.socket | None = None
    names: socket.socket | None = None
    with contextlib.ExitStack() as ours:
        if plan["dns"] is not None and plan["tls"] is not None:
            tells, names = (ours.enter_context(one) for one in _line())
        if plan["dns"] is not None:
            elsewhere = () if proxy is None else proxy.proxy.resolves
            opens = dns_gate.open(
                plan["dns"],
                resolvers=resolvers.Current(config) if hostnames.EVERY not in elsewhere else tuple,
                tells=None if tells is None else tells.fileno(),
                desk=desk,
                by_proxy=elsewhere,
                **given,
            )
            gates.append(stack.enter_context(opens))
        if plan["tls"] is not None:
            end, way = None if names is None else names.fileno(), None
            if proxy is not None:
                shared = {name: value for name, value in given.items() if name != "inside"}
                connector, line = stack.enter_context(tls_gate.by_proxy(plan["tls"], proxy.proxy, names=end, **shared))
                gates.append(connector)
                end, way = None, line.fileno()
            opens_tls = tls_gate.open(
                plan["tls"],
                names=end,
                inject=reads,
                desk=desk,
                idle_seconds=config.connection_idle_seconds,
                reached=reached,
                way=way,
                **given,
            )
            gates.append(stack.enter_context(opens_tls))
    return gates


def _line() -> tuple[socket.socket, socket.socket]:
    """Make the line from the DNS gate to the TLS gate, which goes one way."""
    tells, names = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (tells, names):
        one.setblocking(False)
    tells.shutdown(socket.SHUT_RD)
    names.shutdown(socket.SHUT_WR)
    return tells, names
