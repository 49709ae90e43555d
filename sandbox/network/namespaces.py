"""Make a run's two namespaces and the link between them, closed at first.

Nothing here has a name on the machine, so the kernel itself removes the remains of a killed supervisor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from policy import errors
from sandbox.kernel.net import netlink, netns
from sandbox.network import addresses

T = TypeVar("T")
_SYS = Path("/proc/sys/net")
_LOOPBACK, _AGENT, UPLINK_INDEX = 1, 2, 3  # indices of the devices in their namespaces
# Written before there is a device, because a new device copies `default`. Devices have only the given IPv6 addresses
# and use them at once: no other host is on these links. Redirects and router advertisements are ignored.
SETTINGS: Final = {
    "ipv4/conf/all/accept_redirects": 0,
    "ipv4/conf/all/accept_source_route": 0,
    "ipv4/conf/default/accept_redirects": 0,
    "ipv6/conf/all/accept_redirects": 0,
    "ipv6/conf/all/accept_source_route": -1,
    "ipv6/conf/all/accept_ra": 0,
    "ipv6/conf/default/accept_ra": 0,
    "ipv6/conf/default/accept_redirects": 0,
    "ipv6/conf/default/accept_source_route": -1,
    "ipv6/conf/default/accept_dad": 0,
    "ipv6/conf/default/addr_gen_mode": 1,
}
# Bytes of forwarded connections are counted (sandbox.network.forwarded). The kernel has this setting once rules are
# loaded that track connections. It holds nothing, so it is not attested.
_COUNTING: Final = {"netfilter/nf_conntrack_acct": 1}
GATEWAY_SETTINGS: Final = {
    **SETTINGS,
    "ipv4/ip_forward": 1,
    "ipv6/conf/all/forwarding": 1,
    "ipv4/conf/all/send_redirects": 0,
    "ipv4/conf/default/send_redirects": 0,
    "ipv4/conf/all/rp_filter": 1,
    "ipv4/conf/all/arp_ignore": 1,
    # These settings of `all` would apply to each device, independent of its own.
    "ipv4/conf/all/accept_local": 0,
    "ipv4/conf/all/route_localnet": 0,
    "ipv4/conf/all/proxy_arp": 0,
    "ipv4/conf/all/src_valid_mark": 0,
    "ipv6/conf/all/proxy_ndp": 0,
    # Otherwise an error after ten refusals takes a second, and a refused agent should get it at once.
    "ipv4/icmp_ratelimit": 0,
    "ipv6/icmp/ratelimit": 0,
}


class Spaces(Struct, frozen=True):
    """Descriptors of the agent's namespace and of the gateway's."""

    agent: int
    gateway: int

    def inside(self, call: Callable[[], T]) -> T:
        """Return the value of ``call`` in the gateway's namespace. Its sockets stay there."""
        return netns.within(self.gateway, call)


@contextlib.contextmanager
def made() -> Iterator[Spaces]:
    """Make two namespaces without a link. They are removed at the block's end, unless a process is still in one.

    Raises:
        errors.KernelError: Raised when the kernel makes none, or lacks IPv6.
    """
    agent, gateway = netns.make(2)
    try:
        netns.within(gateway, lambda: _settle(GATEWAY_SETTINGS))
        netns.within(agent, lambda: _settle(SETTINGS))
        yield Spaces(agent, gateway)
    finally:
        os.close(agent)
        os.close(gateway)


def connect(spaces: Spaces) -> None:
    """Make the link between agent and gateway, with addresses, permanent neighbours, and routes. It is still down.

    Raises:
        errors.KernelError: Raised when the kernel refuses a part.
    """
    agent = netlink.End(addresses.AGENT_DEVICE, addresses.AGENT_MAC, spaces.agent, _AGENT)
    gateway = netlink.End(addresses.GATEWAY_DEVICE, addresses.GATEWAY_MAC, None, _AGENT)
    with netns.within(spaces.gateway, netlink.Route) as route:
        route.do([
            netlink.veth(gateway, agent),
            netlink.address(_AGENT, addresses.GATEWAY4, addresses.PREFIX4),
            netlink.address(_AGENT, addresses.GATEWAY6, addresses.PREFIX6),
            netlink.neighbour(_AGENT, addresses.AGENT4, addresses.AGENT_MAC),
            netlink.neighbour(_AGENT, addresses.AGENT6, addresses.AGENT_MAC),
            netlink.up(_LOOPBACK),
        ])  # fmt: skip


def count_bytes(spaces: Spaces) -> None:
    """Have the kernel count the bytes of connections. Before rules are loaded that track them, it may not know how.

    Raises:
        errors.KernelError: Raised when the kernel refuses.
    """
    netns.within(spaces.gateway, lambda: _settle(_COUNTING))


def open_link(spaces: Spaces) -> None:
    """Bring the link up, once the rules are loaded.

    Raises:
        errors.KernelError: Raised when the kernel refuses.
    """
    with netns.within(spaces.gateway, netlink.Route) as route:
        route.do([netlink.up(_AGENT)])
    with netns.within(spaces.agent, netlink.Route) as route:
        route.do([
            netlink.address(_AGENT, addresses.AGENT4, addresses.PREFIX4),
            netlink.address(_AGENT, addresses.AGENT6, addresses.PREFIX6),
            netlink.neighbour(_AGENT, addresses.GATEWAY4, addresses.GATEWAY_MAC),
            netlink.neighbour(_AGENT, addresses.GATEWAY6, addresses.GATEWAY_MAC),
            netlink.up(_LOOPBACK),
            netlink.up(_AGENT),
            netlink.route(_AGENT, None, via=addresses.GATEWAY4),
            netlink.route(_AGENT, None, via=addresses.GATEWAY6),
        ])  # fmt: skip


def connect_uplink(spaces: Spaces, device: str, host: int) -> None:
    """Make the link between the gateway and ``device`` in the namespace ``host``.

    Both ends are down and have no address.

    Raises:
        errors.KernelError: Raised when the kernel refuses, such as for a second device of that name.
    """
    ours = netlink.End(addresses.UPLINK_DEVICE, addresses.UPLINK_MAC, None, UPLINK_INDEX)
    with netns.within(spaces.gateway, netlink.Route) as route:
        route.do([netlink.veth(ours, netlink.End(device, addresses.HOST_MAC, host))])


def open_uplink(spaces: Spaces, place: addresses.Uplink, *, ipv6: bool) -> None:
    """Set the gateway's addresses towards the supervisor's namespace, and its default routes.

    Without ``ipv6`` there is no route for IPv6, and the agent gets an error at once.

    Raises:
        errors.KernelError: Raised when the kernel refuses a part.
    """
    with netns.within(spaces.gateway, netlink.Route) as route:
        route.do([
            netlink.address(UPLINK_INDEX, place.ipv4, 32),
            netlink.address(UPLINK_INDEX, place.ipv6, 128),
            netlink.neighbour(UPLINK_INDEX, addresses.HOST4, addresses.HOST_MAC),
            netlink.neighbour(UPLINK_INDEX, addresses.HOST6, addresses.HOST_MAC),
            netlink.up(UPLINK_INDEX),
            netlink.route(UPLINK_INDEX, None, via=addresses.HOST4),
            *([netlink.route(UPLINK_INDEX, None, via=addresses.HOST6)] if ipv6 else []),
        ])  # fmt: skip


def open_no_uplink(spaces: Spaces) -> None:
    """Route everything back to the agent's link, where the rules refuse it and tell: there is no way out.

    Without a route the kernel would refuse it before the rules, and no denial would be told.

    Raises:
        errors.KernelError: Raised when the kernel refuses.
    """
    with netns.within(spaces.gateway, netlink.Route) as route:
        route.do([
            netlink.route(_AGENT, None, via=addresses.AGENT4),
            netlink.route(_AGENT, None, via=addresses.AGENT6),
        ])  # fmt: skip


def setting(name: str) -> Path:
    """The file of a setting below net., of the namespace of the thread that opens it."""
    return _SYS / name


def _settle(settings: dict[str, int]) -> None:
    if not setting("ipv6").is_dir():
        raise errors.KernelError("this kernel has IPv6 switched off, which a gateway needs to refuse it")
    for name, value in settings.items():
        setting(name).write_text(str(value))
