"""The uids of the processes that stand between agents and the world. No two processes share one.

The rules of a gateway name two of them: TLS connects to the world, and PUBLISH_CONNECTOR to the agent. No other process
connects there. None is a user of the host.
"""

from __future__ import annotations

from typing import Final

from policy.compile.network import firewall

TLS: Final = firewall.GATE_UID
DNS: Final = 64_997
SERVICE: Final = 64_996
SERVICE_CONNECTOR: Final = 64_995
PUBLISH_CONNECTOR: Final = firewall.PUBLISH_UID
PUBLISH: Final = 64_993
INJECT: Final = 64_992
PAGE_READER: Final = 64_991
TOOLS: Final = 64_990
HOST_PORTS: Final = 64_989
HOST_PORTS_CONNECTOR: Final = 64_988
TLS_CONNECTOR: Final = 64_987
METRICS: Final = 64_986
SSH_AGENT: Final = 64_985
EXPORT: Final = 64_984
TELEMETRY_READER: Final = 64_983
# Those that may make connections. Every other gate is handed its sockets, and its filter has neither call.
CONNECT: Final = frozenset({TLS, TLS_CONNECTOR, SERVICE_CONNECTOR, PUBLISH_CONNECTOR, HOST_PORTS_CONNECTOR})
