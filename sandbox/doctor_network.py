"""Network checks of ``covenant doctor``: how runsc takes a network, the uplink, and rules of other firewalls.

Each check returns (status word, finding, fix). They examine the network namespace of the calling thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from policy import errors
from policy.grants.sets import hostnames
from policy.host import RunscFacts
from sandbox.config import Config, check_authorities, file_of, trusted_binary
from sandbox.host import facts as host_facts
from sandbox.host import runsc_network
from sandbox.kernel.net import nft, second_reader
from sandbox.network import addresses, resolvers, uplink
from sandbox.network.gate.proxy import Proxy, ProxyError

OK: Final = "ok"
DEGRADED: Final = "degraded"
MISSING: Final = "missing"
UNKNOWN: Final = "unknown"
Look = tuple[str, str, str]
_WORDS: Final = {
    "plain": "--network=sandbox, started in the agent's namespace as it is",
    "masked": "--network=sandbox, started in the agent's namespace with /proc/sys/net/core covered: this runsc takes "
    "rmem_default there for a sign of the machine's own namespace, and this kernel shows it in every one",
    "host": "--network=host in the agent's namespace, by runsc_network of config.toml: the host kernel's stack and not "
    "gVisor's own makes agents' packets; the gateway's rules are the same",
}
_READERS_MEND: Final = (
    "install the pyroute2 that the lock of this version names; where they still differ, runs with a network cannot be "
    "attested on this kernel"
)
_PROXY_SECONDS: Final = 3.0
_AS_ROOT: Final = "run covenant doctor as root"
# nft does not list legacy iptables rules.
_LEGACY: Final = ("/proc/net/ip_tables_names", "/proc/net/ip6_tables_names")
# The program that owns a table or chain, by the prefix of its name.
_OWNERS: Final = {
    "DOCKER": "docker",
    "ufw-": "ufw",
    "firewalld": "firewalld",
    "LIBVIRT": "libvirt",
    "KUBE-": "kubernetes",
}


def way(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Find out by a new attempt how this runsc takes a network on this kernel.

    Raises:
        errors.MachineError: Raised when the attempt cannot be made.
    """
    if facts is None:
        return UNKNOWN, "no usable runsc to try", "see the line `runsc`"
    if os.geteuid() != 0:
        return UNKNOWN, "not tried: needs root", _AS_ROOT
    found = runsc_network.find(
        config,
        Path(facts.path),
        sha256=facts.sha256,
        kernel=os.uname().release,
        deadline_seconds=deadline_seconds,
    )
    if not found.name:
        mend = "install a newer runsc" + ("" if config.runsc_network == "host" else ', or write runsc_network = "host"')
        return MISSING, f"no way works, last said: {found.fault}", f"{mend}; network off is enforced"
    return OK, _WORDS[found.name], ""


def interface(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Report the operator's uplink, and the forwarding that is enabled for it while runs with a network are live.

    Raises:
        errors.NotEnforceableError: Raised when the uplink does not exist.
    """
    found = host_facts.network_facts(config)
    if config.proxy.url and not found.lacks:
        return _by_proxy(config)
    if found.lacks:
        return MISSING, f"this host has not {found.lacks}: modes other than off are refused", found.mend
    before = uplink.look(config.uplink)
    four = "forwards IPv4 already" if before.ipv4 else "forwards IPv4 while such a run is live"
    if before.ipv6 is None:
        mend = "boot Linux 6.17 or newer, or set net.ipv6.conf.all.forwarding=1 if this machine is a router"
        return DEGRADED, f"{config.uplink} {four}; IPv6 cannot be forwarded for one interface alone, so none is", mend
    six = "IPv6 already" if before.ipv6 else "IPv6 likewise"
    return OK, f"{config.uplink} {four}, {six}; {uplink.reserved()}", ""


def _by_proxy(config: Config) -> Look:
    host, port = config.proxy.place
    place, file = f"{host}:{port}", file_of(config.state)
    try:
        bundles = config.tls.bundles() if config.proxy.tls else ()
        Proxy(host, port, bundles=bundles).reached(_PROXY_SECONDS).close()
    except ProxyError as e:
        if e.code == "proxy_certificate":
            found = f"the proxy {place} is not believed ({e.strerror}): agents reach no network"
            return (
                MISSING,
                found,
                f"name the file of its authority as [tls] ca in {file}, or its own name in [proxy] url",
            )
        if e.code == "proxy_malformed":
            found = f"the proxy {place} does not speak TLS: agents reach no network"
            return MISSING, found, f"write http:// in [proxy] url of {file} if it is spoken to in clear"
        found = f"the proxy {place} does not answer ({e.__cause__ or e}): agents reach no network"
        return MISSING, found, f"start it, or write its place as [proxy] url in {file}"
    except OSError as e:
        return MISSING, f"the authorities of the proxy {place} cannot be read ({e})", f"mend [tls] ca in {file}"
    over = "over TLS by" if config.proxy.tls else "by"
    return OK, f"agents reach tls destinations {over} the proxy {place} alone, and no interface of this host", ""


def authorities(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Check each file of [tls] ca: gates that speak TLS read them when a run starts."""
    file, faults, fixes = file_of(config.state), list[str](), list[str]()
    for path in config.tls.ca:
        try:
            check_authorities("tls.ca", path)
        except errors.ConfigError as e:
            if os.geteuid() != 0:
                return UNKNOWN, f"not read: {e.message}", _AS_ROOT
            faults.append(e.message)
            fixes.append(e.hint)
    if faults:
        found = f"{'; '.join(faults)}: runs whose gates speak TLS are refused"
        return MISSING, found, f"{'; '.join(dict.fromkeys(fixes))}, or mend [tls] ca in {file}"
    if not config.tls.ca:
        return OK, "those of the system alone", ""
    return OK, f"{', '.join(map(str, config.tls.ca))} beside those of the system", ""


def readers(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Compare our reader of netlink, by which runs are attested, with pyroute2 on this machine's own network.

    Raises:
        errors.KernelError: Raised when the kernel does not answer, or the network never stands still.
    """
    found = second_reader.differences()
    if found:
        return DEGRADED, f"our reader of netlink and pyroute2 differ: {found[0]}", _READERS_MEND
    return OK, "our reader of netlink and pyroute2 read the same here", ""


def names(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Ask each resolver of the DNS gate, and name those that do not answer.

    Raises:
        errors.HostError: Raised when there is no resolver.
    """
    if config.proxy.url and hostnames.EVERY in config.proxy.resolves:
        return OK, "none is asked: the proxy looks all names up ([proxy] resolves)", ""
    known, ours = resolvers.of(config), bool(config.resolvers)
    place = str(file_of(config.state)) if ours else "the resolv.conf of this host"
    faults = {one: fault for one in known if (fault := resolvers.fault_of(one))}
    if not faults:
        return OK, f"{', '.join(known)} {'answer' if len(known) > 1 else 'answers'} ({place})", ""
    found = "; ".join(f"{one} {fault}" for one, fault in faults.items())
    fine = ", ".join(f'"{one}"' for one in known if one not in faults) or '"ADDRESS"'
    if ours:
        fix = f"write resolvers = [{fine}] in {file_of(config.state)}, with addresses that answer"
    else:
        fix = f"mend resolv.conf, or write resolvers = [{fine}] in {file_of(config.state)}"
    if len(faults) == len(known):
        return MISSING, f"no name is resolved: {found} ({place})", fix
    return DEGRADED, f"{found}; the others answer ({place})", fix


def others(config: Config, facts: RunscFacts | None, deadline_seconds: float) -> Look:
    """Report rules of other firewalls on the path of agents' packets.

    Raises:
        errors.MachineError: Raised when nft is missing or does not answer.
    """
    binary = trusted_binary(config.nft)
    if os.geteuid() != 0:
        return UNKNOWN, "not looked at: needs root", _AS_ROOT
    listed: dict[str, Any] = json.loads(nft.listed(binary, "chains"))
    chains = [entry["chain"] for entry in listed["nftables"] if "chain" in entry]
    dropping = [c for c in chains if c.get("hook") == "forward" and c.get("policy") == "drop" and not _ours(c)]
    owners = sorted({owner for c in chains for owner in _owners(c)})
    legacy = [path for path in _LEGACY if _first_line(path)]
    said = f" ({', '.join(owners)})" if owners else ""
    if dropping:
        device = config.uplink or "UPLINK"
        names = ", ".join(f"{c['family']} {c['table']} {c['name']}" for c in dropping)
        mend = "; ".join(line for c in dropping for line in _mend(c, chains, device))
        return DEGRADED, f"chain {names} drops what it does not know{said}: agents' packets as well", mend
    if legacy or "firewalld" in owners:
        whose = "firewalld" if "firewalld" in owners else "iptables-legacy"
        mend = f"let {whose} forward from {addresses.HOST_PREFIX}* to the uplink, and answers back"
        return DEGRADED, f"rules of {whose} stand beside ours, and may drop agents' packets", mend
    return OK, f"no chain on the way drops by default{said}", ""


def _mend(chain: dict[str, Any], chains: list[dict[str, Any]], device: str) -> Iterator[str]:
    """Yield the commands that let agents' packets pass a chain, in docker's DOCKER-USER chain if it exists."""
    mine = f"{addresses.HOST_PREFIX}*"
    where = (chain["family"], chain["table"])
    user = any((c["family"], c["table"]) == where and c["name"] == "DOCKER-USER" for c in chains)
    place = f"{where[0]} {where[1]} {'DOCKER-USER' if user else chain['name']}"
    yield f'nft \'insert rule {place} iifname "{mine}" oifname "{device}" accept\''
    yield f'nft \'insert rule {place} iifname "{device}" oifname "{mine}" ct state established,related accept\''


def _ours(chain: dict[str, Any]) -> bool:
    return (chain["family"], chain["table"]) == ("inet", uplink.TABLE)


def _owners(chain: dict[str, Any]) -> Iterator[str]:
    for start, owner in _OWNERS.items():
        if chain["name"].startswith(start) or chain["table"].startswith(start):
            yield owner


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""
