"""Probe the network under network = "off": any peer that answers is a hole. The control run has a peer that answers."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from harness import probe

# INVARIANT: tests/kernel/hostile_prelude.py listens at these, and on the host a test may do the same.
ABSTRACT_NAME = b"\0covenant-hostile-control"
SOCKET_PATHS = ("/run/docker.sock", "/run/containerd/containerd.sock", "/run/covenant/supervisor.sock")
PORT = 47_001
METADATA_ADDRESS = "169.254.169.254"
PUBLIC_ADDRESS = "192.0.2.1"  # TEST-NET-1, RFC 5737: not routed on the real internet

SECONDS = 2.0
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
RTM_NEWADDR, NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE = 20, 1, 4, 0x400
AF_ALG, AF_VSOCK = 38, 40


def _connect(address: str) -> str:
    with socket.create_connection((address, PORT), SECONDS) as connection:
        connection.settimeout(SECONDS)
        return f"{address} answered {connection.recv(64)!r}"


@probe("tcp_loopback")
def tcp_loopback() -> str:
    """The host's loopback is where databases and daemons without passwords listen."""
    return _connect("127.0.0.1")


@probe("tcp_metadata")
def tcp_metadata() -> str:
    """Ask a cloud's metadata service, which gives credentials to any client."""
    return _connect(METADATA_ADDRESS)


@probe("tcp_public")
def tcp_public() -> str:
    return _connect(PUBLIC_ADDRESS)


@probe("udp_exchange")
def udp_exchange() -> str:
    """Exchange datagrams: the way in which names are resolved and data leaks out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as exchange:
        exchange.settimeout(SECONDS)
        exchange.connect((PUBLIC_ADDRESS, PORT))
        exchange.send(b"who am i")
        return f"answered {exchange.recv(64)!r}"


@probe("tcp_listen_privileged")
def tcp_listen_privileged() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("0.0.0.0", 80))  # noqa: S104
        listener.listen()
    return "listens on port 80"


@probe("raw_socket")
def raw_socket() -> str:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "has a raw ICMP socket"


@probe("raw_socket_ipv6")
def raw_socket_ipv6() -> str:
    socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW).close()
    return "has a raw IPv6 socket"


@probe("packet_socket")
def packet_socket() -> str:
    """Frames as they lie on the wire pass no firewall rule on the output hook."""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close()
    return "has a packet socket"


@probe("netlink_address")
def netlink_address() -> str:
    """Give oneself an address: RTM_NEWADDR 198.51.100.7/32 on the loopback device."""
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 1)
    for kind in (1, 2):  # IFA_ADDRESS, IFA_LOCAL
        body += struct.pack("=HH4s", 8, kind, socket.inet_aton("198.51.100.7"))
    header = struct.pack("=IHHII", 16 + len(body), RTM_NEWADDR, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(SECONDS)
        link.send(header + body)
        code = struct.unpack_from("=i", link.recv(4096), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
    return "added an address"


@probe("tun_device")
def tun_device() -> str:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"hostile0", IFF_TUN | IFF_NO_PI))
    finally:
        os.close(descriptor)
    return "made a network device"


@probe("unix_abstract")
def unix_abstract() -> str:
    """An abstract socket has no file, so no mount hides it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect(ABSTRACT_NAME)
        return f"answered {connection.recv(64)!r}"


@probe("unix_service_socket")
def unix_service_socket() -> str:
    """Connect to a service socket of the host; a client of docker's socket is root on the host."""
    failure: OSError | None = None
    for path in SOCKET_PATHS:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SECONDS)
            try:
                connection.connect(path)
                return f"{path} answered {connection.recv(64)!r}"
            except OSError as error:
                failure = error
    assert failure is not None
    raise failure


@probe("vsock_host")
def vsock_host() -> str:
    """Connect to address 2, the host of a virtual machine."""
    with socket.socket(AF_VSOCK, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect((2, PORT))
    return "reached the hypervisor"


@probe("kernel_crypto_socket")
def kernel_crypto_socket() -> str:
    socket.socket(AF_ALG, socket.SOCK_SEQPACKET, 0).close()
    return "has a socket to the kernel's ciphers"
