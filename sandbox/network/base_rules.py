"""Base rules of every gateway beside the compiled rules. They only restrict.

Frames of the agent must carry its own addresses, on both ends of its link. The number of connections of a run is
bounded. Above the rate of new ones a TCP connection waits: its first packet is dropped, and sent again after one
second, two, four. Packets leave the gateway with the gateway's address. The text is constant, so that it can be read
back as is.
"""

from __future__ import annotations

from typing import Final

from sandbox.network import addresses as own

# The most conntrack entries of one run: 1,024 in the gateway, and so in the host's table, which all programs share. One
# rule counts the open connections that are forwarded, those to the gates, and those of the TLS gate. It does not count
# closed connections, whose entries the kernel would keep for two minutes more. Their number is bounded by the burst and
# the rate of new connections in the three seconds until they are collected (``gateway``).
MAX_ENTRIES: Final = 1024
MAX_CONNECTIONS: Final = 512
BEGUN_AT_ONCE, BEGUN_PER_SECOND = 320, 64
CLOSED_SECONDS: Final = 1
# The priority before all other chains.
_FIRST = -500
# The frames allowed on the link: only from the agent, only with its addresses. ``::`` probes for a free address.
_FRAMES = f"""\
		ether saddr != {own.AGENT_MAC} counter drop
		ether type arp arp htype 1 arp ptype ip arp saddr ether {own.AGENT_MAC} arp saddr ip {own.AGENT4} accept
		ether type ip ip saddr {own.AGENT4} accept
		icmpv6 type {{ nd-router-solicit, nd-router-advert, nd-redirect }} counter drop
		ether type ip6 ip6 saddr {own.AGENT6} accept
		ether type ip6 ip6 saddr :: icmpv6 type nd-neighbor-solicit accept
		counter drop
"""

# For tables of family inet: the timeouts of closed TCP connections, and the rules of a chain that set them. The rules
# apply before a connection is confirmed, and match only its first packet.
SOON: Final = "".join(
    f"\tct timeout soon{version} {{\n\t\tprotocol tcp;\n\t\tl3proto {family};\n"
    f"\t\tpolicy = {{ close : {CLOSED_SECONDS}, time_wait : {CLOSED_SECONDS} }}\n\t}}\n"
    for version, family in ((4, "ip"), (6, "ip6"))
)
_NEW = "meta l4proto tcp ct state new ct timeout set"
SOON_RULES: Final = tuple(f'meta nfproto ipv{version} {_NEW} "soon{version}"' for version in (4, 6))
_SOON_RULES = "".join(f"\t\t{rule}\n" for rule in SOON_RULES)

GATEWAY: Final = f"""\
table netdev covenant_walls {{
	chain frames {{
		type filter hook ingress device "{own.GATEWAY_DEVICE}" priority {_FIRST}; policy drop;
{_FRAMES}	}}
}}
table inet covenant_walls {{
{SOON}	chain full {{
		meta l4proto tcp counter reject with tcp reset
		counter reject with icmpx port-unreachable
	}}
	chain counted {{
		ct count over {MAX_CONNECTIONS} goto full
	}}
	chain forward {{
		type filter hook forward priority -10; policy accept;
		iifname "{own.GATEWAY_DEVICE}" ct state invalid counter drop
{_SOON_RULES}		ct state new jump counted
	}}
	chain input {{
		type filter hook input priority -10; policy accept;
{_SOON_RULES}		ct state new jump counted
	}}
	chain output {{
		type filter hook output priority -10; policy accept;
{_SOON_RULES}		ct state new jump counted
	}}
	chain begun {{
		limit rate over {BEGUN_PER_SECOND}/second burst {BEGUN_AT_ONCE} packets counter drop
	}}
	chain forwarded {{
		type filter hook forward priority 10; policy accept;
		meta l4proto tcp ct state new jump begun
	}}
	chain taken {{
		type filter hook input priority 10; policy accept;
		meta l4proto tcp ct state new jump begun
	}}
	chain made {{
		type filter hook output priority 10; policy accept;
		meta l4proto tcp ct state new jump begun
	}}
	chain postrouting {{
		type nat hook postrouting priority 100; policy accept;
		oifname "{own.UPLINK_DEVICE}" masquerade
	}}
}}
""".encode("ascii")  # fmt: skip

AGENT: Final = f"""\
table netdev covenant_walls {{
	chain frames {{
		type filter hook egress device "{own.AGENT_DEVICE}" priority {_FIRST}; policy drop;
{_FRAMES}	}}
}}
""".encode("ascii")
