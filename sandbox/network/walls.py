"""What stands in every gateway beside the compiled rules, and only takes away.

The agent's frames carry its own addresses or go nowhere, on both ends of its link; a run holds so many connections and
no more; what leaves the gateway leaves under the gateway's address. Constant, so that it can be read back as it is.
"""

from __future__ import annotations

from typing import Final

from sandbox.network import addresses as own

# Connections of one run, in the gateway and so behind it as well: one rule counts those that are forwarded, those to
# the gates, and those that the TLS gate makes.
MAX_CONNECTIONS: Final = 1024
# TCP connections that a run begins, at once and then each second. The rule above does not count what was closed, which
# the kernel remembers for two minutes more, here and in the host's table: without this, a loop of connect and close
# fills the table that everybody on the host needs.
BEGUN_AT_ONCE, BEGUN_PER_SECOND = 1024, 64
# Before anything else looks at a frame.
_FIRST = -500
# What may be said on the link, by the agent alone and about itself alone. ``::`` asks whether an address is free.
_FRAMES = f"""\
		ether saddr != {own.AGENT_MAC} counter drop
		ether type arp arp htype 1 arp ptype ip arp saddr ether {own.AGENT_MAC} arp saddr ip {own.AGENT4} accept
		ether type ip ip saddr {own.AGENT4} accept
		icmpv6 type {{ nd-router-solicit, nd-router-advert, nd-redirect }} counter drop
		ether type ip6 ip6 saddr {own.AGENT6} accept
		ether type ip6 ip6 saddr :: icmpv6 type nd-neighbor-solicit accept
		counter drop
"""

GATEWAY: Final = f"""\
table netdev covenant_walls {{
	chain frames {{
		type filter hook ingress device "{own.GATEWAY_DEVICE}" priority {_FIRST}; policy drop;
{_FRAMES}	}}
}}
table inet covenant_walls {{
	chain full {{
		meta l4proto tcp counter reject with tcp reset
		counter reject with icmpx port-unreachable
	}}
	chain counted {{
		ct count over {MAX_CONNECTIONS} goto full
	}}
	chain forward {{
		type filter hook forward priority -10; policy accept;
		iifname "{own.GATEWAY_DEVICE}" ct state invalid counter drop
		ct state new jump counted
	}}
	chain input {{
		type filter hook input priority -10; policy accept;
		ct state new jump counted
	}}
	chain output {{
		type filter hook output priority -10; policy accept;
		ct state new jump counted
	}}
	chain begun {{
		limit rate over {BEGUN_PER_SECOND}/second burst {BEGUN_AT_ONCE} packets goto full
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
