"""Changes that root can make by hand to a live run, each with the layer that finds it or the reason for none.

docs/attestation-changes.md shows this table (``python -m tests.kernel.by_hand`` writes it there).
tests/kernel/test_by_hand.py makes each change. This module has the network of the run; by_hand_beside.py has the host,
processes and files.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from tests.kernel import by_hand_beside
from tests.kernel import planted_bpf as bpf
from tests.kernel.hands import (
    RESOURCE,
    Change,
    caught,
    chain,
    command,
    element,
    ip,
    program,
    rule_instead,
    rule_less,
    rules,
    setting,
    sockets,
    stands,
    table,
    tc,
    tracked,
)
from tests.kernel.planted import TCP, UDP

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "attestation-changes.md"
BEGIN, END = "<!-- changes by hand -->", "<!-- end of changes by hand -->"


RULES: Final[dict[str, Change]] = {
    "a rule deleted that refuses": caught(rule_less("covenant", "granted", "goto refuse"), "firewall"),
    "a rule deleted that grants": caught(rule_less("covenant", "granted", "accept"), "firewall"),
    "a rule inserted that accepts": caught(
        rules("gateway", "insert", "rule", "inet", "covenant", "forward", "accept"), "firewall"
    ),
    "a rule inserted for new connections from the uplink": caught(
        rules("gateway", "insert", "rule", "inet", "covenant", "input", "iifname", "uplink0", "accept"), "firewall"
    ),
    "the policy of chain forward set to accept": caught(
        rules("gateway", "chain", "inet", "covenant", "forward", "{ policy accept ; }"), "firewall"
    ),
    "the policy of chain output set to accept": caught(
        rules("gateway", "chain", "inet", "covenant", "output", "{ policy accept ; }"), "firewall"
    ),
    "the table of the policy made dormant": caught(
        command(
            "gateway",
            "/usr/sbin/nft 'add table inet covenant {{ flags dormant; }}'",
            "/usr/sbin/nft 'add table inet covenant'",
        ),
        "firewall",
    ),
    "a chain added to the table of the policy": caught(
        command(
            "gateway", "/usr/sbin/nft add chain inet covenant more", "/usr/sbin/nft delete chain inet covenant more"
        ),
        "firewall",
    ),
    "a set added to the table of the policy": caught(
        command(
            "gateway",
            "/usr/sbin/nft 'add set inet covenant more {{ type ipv4_addr; }}'",
            "/usr/sbin/nft delete set inet covenant more",
        ),
        "firewall",
    ),
    "an address added to the set of a grant": caught(element("{a4} {{ 9.9.9.9 }}"), "firewall"),
    "a private address added to the set of a name": caught(element("{n4} {{ 10.8.8.8 timeout 60s }}"), "firewall"),
    "an address without an end added to the set of a name": caught(element("{n4} {{ 9.9.9.9 }}"), "firewall"),
    "an address for longer than an answer added to the set of a name": caught(
        element("{n4} {{ 9.9.9.9 timeout 2h }}"), "firewall"
    ),
    "a public address with an end added to the set of a name": stands(
        element("{n4} {{ 9.9.9.9 timeout 60s }}"), "An answer of the DNS gate looks the same; it ends within an hour"
    ),
    "the counters of the rules reset": stands(
        command("gateway", "/usr/sbin/nft reset counters", "/usr/sbin/nft reset counters"), "A count is no rule"
    ),
    "another table in the gateway": caught(table("gateway", "table inet hand {\n}\n")),
    "an accept with an earlier priority in the gateway": caught(
        chain("gateway", "filter hook forward priority -300; policy accept", "accept", "inet")
    ),
    "a DNAT in another table of the gateway": caught(
        chain("gateway", "nat hook prerouting priority -110; policy accept", "ip daddr 93.184.216.34 dnat to 10.8.8.8")
    ),
    "notrack in another table of the gateway": caught(
        chain("gateway", "filter hook prerouting priority -300; policy accept", "notrack", "inet")
    ),
    "a netdev chain at the gateway's uplink": caught(
        chain("gateway", "filter hook ingress device uplink0 priority 0; policy accept", "counter", "netdev")
    ),
    "the wall of the gateway's link flushed": caught(
        rules("gateway", "flush", "chain", "netdev", "covenant_walls", "frames")
    ),
    "the wall of the agent's link flushed": caught(
        rules("agent", "flush", "chain", "netdev", "covenant_walls", "frames")
    ),
    "masquerading of the gateway flushed": caught(
        rules("gateway", "flush", "chain", "inet", "covenant_walls", "postrouting")
    ),
    "the bound on open connections raised": caught(
        rule_instead("covenant_walls", "counted", "ct count", "ct", "count", "over", "9999", "goto", "full")
    ),
    "the rate of new connections raised": caught(
        rule_instead("covenant_walls", "begun", "limit", "limit", "rate", "over", "9999/second", "goto", "full")
    ),
    "another table beside the agent": caught(table("agent", "table inet hand {\n}\n")),
}

CONNECTIONS: Final[dict[str, Change]] = {
    "a connection tracked that no grant names": caught(
        tracked("gateway", UDP, ("192.0.0.2", 1, "9.9.9.9", 9999), source="{own}")
    ),
    "a tracked connection to a granted address, led elsewhere": caught(
        tracked("gateway", TCP, ("192.0.0.2", 1, "93.184.216.34", 80), source="{own}", destination="10.8.8.8", port=80)
    ),
    "a tracked connection past the TLS gate": caught(
        tracked("gateway", TCP, ("192.0.0.2", 1, "93.184.216.34", 443), source="{own}")
    ),
    "a tracked connection into the gateway": caught(tracked("gateway", TCP, ("192.0.0.2", 1, "192.0.0.1", 22))),
    "a tracked connection from the world to the agent": caught(
        tracked("gateway", TCP, ("9.9.9.9", 1, "{own}", 80), destination="192.0.0.2", port=80)
    ),
    "a tracked connection with a helper": caught(
        tracked("gateway", TCP, ("192.0.0.2", 1, "93.184.216.34", 80), helper="ftp")
    ),
    "a connection tracked beside the agent": caught(tracked("agent", UDP, ("192.0.0.2", 1, "9.9.9.9", 53))),
    "a connection tracked that a grant names": stands(
        tracked("gateway", TCP, ("192.0.0.2", 1, "93.184.216.34", 80), source="{own}"),
        "The agent may begin the same connection itself",
    ),
    "a connection tracked to a public address on the port of a name": stands(
        tracked("gateway", TCP, ("192.0.0.2", 1, "9.9.9.9", 5432), source="{own}"),
        "Elements of names come and go: nothing says whether an answer led there when the connection began",
    ),
    "an entry of the host that no connection of the run uses": stands(
        tracked("host", UDP, ("{own}", 1, "93.184.216.34", 80), destination="10.8.8.8", port=7777),
        "Found as soon as a connection of the gateway goes by it; the host's whole table is everybody's",
    ),
    "the time that established connections are remembered": stands(
        setting("gateway", "netfilter/nf_conntrack_tcp_timeout_established", "60"), RESOURCE
    ),
    "packets out of the window taken for valid": stands(
        setting("gateway", "netfilter/nf_conntrack_tcp_be_liberal", "1"), "Such packets belong to a granted connection"
    ),
}

LINKS: Final[dict[str, Change]] = {
    "a device in the gateway": caught(ip("gateway", "link add hand type veth peer name hand2", "link delete hand")),
    "a device beside the agent": caught(ip("agent", "link add hand type veth peer name hand2", "link delete hand")),
    "another MTU of the gateway's link": caught(ip("gateway", "link set agent0 mtu 1400", "link set agent0 mtu 1500")),
    "another hardware address of the uplink": caught(
        # The kernel forgets neighbours of a device whose address changes, so that they are made again.
        command(
            "gateway",
            "/usr/sbin/ip link set uplink0 address 02:c0:00:00:01:09",
            "sh -c '"
            "ip link set uplink0 address 02:c0:00:00:01:02;"
            "for at in 198.19.0.1 fe80::1; do "
            "ip neigh replace $at lladdr 02:c0:00:00:01:01 nud permanent dev uplink0; done'",
        )
    ),
    "an address at the gateway's loopback": caught(
        ip("gateway", "address add 10.9.9.9/32 dev lo", "address delete 10.9.9.9/32 dev lo")
    ),
    "an address at the gateway's link": caught(
        ip("gateway", "address add 10.9.9.9/32 dev agent0", "address delete 10.9.9.9/32 dev agent0")
    ),
    "an address beside the agent": caught(
        ip("agent", "address add 10.9.9.9/32 dev lo", "address delete 10.9.9.9/32 dev lo")
    ),
    "a route of the gateway": caught(
        ip("gateway", "route add blackhole 9.9.9.9/32", "route delete blackhole 9.9.9.9/32")
    ),
    "a route of the gateway in another table": caught(
        ip("gateway", "route add blackhole 9.9.9.9/32 table 99", "route delete blackhole 9.9.9.9/32 table 99")
    ),
    "a routing rule of the gateway": caught(
        ip("gateway", "rule add from 192.0.0.2 lookup 99", "rule delete from 192.0.0.2 lookup 99")
    ),
    "a next hop": caught(ip("gateway", "nexthop add id 7 blackhole", "nexthop del id 7")),
    "a fixed neighbour": caught(
        ip(
            "gateway",
            "neigh add 198.19.0.9 lladdr 02:00:00:00:00:09 nud permanent dev uplink0",
            "neigh del 198.19.0.9 dev uplink0",
        )
    ),
    "another hardware address for the agent": caught(
        ip(
            "gateway",
            "neigh replace 192.0.0.2 lladdr 02:c0:00:00:00:09 nud permanent dev agent0",
            "neigh replace 192.0.0.2 lladdr 02:c0:00:00:00:02 nud permanent dev agent0",
        )
    ),
    "an address that the gateway answers for": caught(
        ip("gateway", "neigh add proxy 9.9.9.9 dev agent0", "neigh del proxy 9.9.9.9 dev agent0")
    ),
    "a learned neighbour": stands(
        ip(
            "gateway",
            "neigh add 198.19.0.9 lladdr 02:00:00:00:00:09 nud stale dev uplink0",
            "neigh del 198.19.0.9 dev uplink0",
        ),
        "The kernel learns such by itself; the neighbours that a run uses are fixed",
    ),
    "a queue at the gateway's link": caught(
        tc("gateway", "qdisc add dev agent0 root pfifo", "qdisc del dev agent0 root")
    ),
    "clsact at the gateway's link": caught(tc("gateway", "qdisc add dev agent0 clsact", "qdisc del dev agent0 clsact")),
    "a queue at the gateway's uplink": caught(
        tc("gateway", "qdisc add dev uplink0 root pfifo", "qdisc del dev uplink0 root")
    ),
    "an XDP program at the gateway's link": caught(program("gateway", bpf.XDP, bpf.AT_XDP, "agent0", 2)),
    "a program at the ingress of the gateway's uplink": caught(
        program("gateway", bpf.SCHED_CLS, bpf.AT_TCX_INGRESS, "uplink0", -1)
    ),
    "a program that chooses the socket over the gates": caught(program("gateway", bpf.SK_LOOKUP, bpf.AT_SK_LOOKUP)),
    "a program that chooses the socket beside the agent": caught(program("agent", bpf.SK_LOOKUP, bpf.AT_SK_LOOKUP)),
    "a packet socket in the gateway": caught(sockets("gateway", socket.AF_PACKET, socket.SOCK_RAW, 0x0300)),
    "a raw socket in the gateway": caught(sockets("gateway", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
    "a TCP listener in the gateway": stands(
        sockets("gateway", socket.AF_INET, socket.SOCK_STREAM, bind=("192.0.0.1", 2222)),
        "The rules let no packet of the agent come to it",
    ),
    "the gateway's link in promiscuous mode": stands(
        ip("gateway", "link set agent0 promisc on", "link set agent0 promisc off"),
        "It opens no way; the wall of frames comes before",
    ),
    "another length of a queue": stands(
        ip("gateway", "link set agent0 txqueuelen 500", "link set agent0 txqueuelen 1000"), RESOURCE
    ),
    "a label of IPv6 addresses": stands(
        ip("gateway", "addrlabel add prefix 2001:db8::/32 label 99", "addrlabel del prefix 2001:db8::/32 label 99"),
        "It chooses among the gateway's own addresses",
    ),
}

SETTINGS: Final[dict[str, Change]] = {
    "send_redirects of the gateway": caught(setting("gateway", "ipv4/conf/all/send_redirects", "1")),
    "rp_filter of the gateway": caught(setting("gateway", "ipv4/conf/all/rp_filter", "0")),
    "route_localnet of the gateway": caught(setting("gateway", "ipv4/conf/all/route_localnet", "1")),
    "accept_local of the gateway": caught(setting("gateway", "ipv4/conf/all/accept_local", "1")),
    "proxy_arp of the gateway": caught(setting("gateway", "ipv4/conf/all/proxy_arp", "1")),
    "proxy_ndp of the gateway": caught(setting("gateway", "ipv6/conf/all/proxy_ndp", "1")),
    "route_localnet of one device": caught(setting("gateway", "ipv4/conf/agent0/route_localnet", "1")),
    "accept_source_route of one device for IPv6": caught(
        setting("gateway", "ipv6/conf/agent0/accept_source_route", "1")
    ),
    "accept_redirects beside the agent": caught(setting("agent", "ipv4/conf/all/accept_redirects", "1")),
    "the rate of ICMP errors of the gateway": caught(setting("gateway", "ipv4/icmp_ratelimit", "1000")),
    "the range of ports of the gateway": stands(
        setting("gateway", "ipv4/ip_local_port_range", "40000\t50000"), RESOURCE
    ),
    "ip_nonlocal_bind of the gateway": stands(
        setting("gateway", "ipv4/ip_nonlocal_bind", "1"),
        "The gates bind when they start, and what they send is masqueraded",
    ),
    "syncookies of the gateway": stands(setting("gateway", "ipv4/tcp_syncookies", "0"), RESOURCE),
}

GROUPS: Final = {
    "Rules of the run": RULES,
    "Tracked connections": CONNECTIONS,
    "Links, addresses, routes, programs, sockets": LINKS,
    "Settings": SETTINGS,
    "The host": by_hand_beside.HOST,
    "Limits and processes": by_hand_beside.PROCESSES,
    "Files and mounts": by_hand_beside.FILES,
}


def page() -> str:
    """Return the lists as docs/attestation-changes.md has them: per group what each layer finds, then what stands."""
    lines = [BEGIN, ""]
    for title, changes in GROUPS.items():
        lines += [f"## {title}", ""]
        found: dict[str, list[str]] = {}
        for name, one in changes.items():
            found.setdefault(" and ".join(f"`{layer}`" for layer in one.layers), []).append(name)
        standing = found.pop("", [])
        for layers, names in found.items():
            lines += [f"Found by {layers}:", "", *(f"- {name}" for name in names), ""]
        if standing:
            lines += ["| not found | because |", "|---|---|", *(f"| {n} | {changes[n].why} |" for n in standing), ""]
    return "\n".join([*lines, END])


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + page() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
