"""Hosts: one spelling each, and the right one named for every other."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from policy.manifest import hosts


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("example.com", "name"),
        ("a.b.c.example.co.uk", "name"),
        ("xn--bcher-kva.de", "name"),
        ("1password.com", "name"),
        ("3.14.example.org", "name"),
        ("*.example.com", "wildcard"),
        ("*.xn--bcher-kva.de", "wildcard"),
        ("192.0.2.7", "address"),
        ("127.0.0.1", "address"),
        ("169.254.169.254", "address"),
        ("::1", "address"),
        ("2001:db8::7", "address"),
        ("10.0.0.0/8", "cidr"),
        ("128.0.0.0/1", "cidr"),
        ("fd00::/8", "cidr"),
    ],
)
def test_host_is_accepted_as_its_kind(host: str, kind: str) -> None:
    assert hosts.check(host) == host
    assert hosts.kind(host) == kind


@pytest.mark.parametrize(
    ("host", "message", "hint"),
    [
        ("Example.com", "usual spelling", "`example.com`"),
        ("example.com.", "usual spelling", "`example.com`"),
        ("example..com", "bad label ``", "1 to 63"),
        (".example.com", "bad label ``", "1 to 63"),
        ("-a.example.com", "bad label `-a`", "1 to 63"),
        ("a_b.example.com", "bad label `a_b`", "1 to 63"),
        ("a b.example.com", "bad label `a b`", "1 to 63"),
        (f"{'a' * 64}.com", "bad label", "1 to 63"),
        (".".join(["a" * 60] * 5), "too long", "253"),
        ("localhost", "single label", "address"),
        ("com", "single label", "full name"),
        ("db.localhost", "names this machine", "address"),
        ("*", "wildcard", "only `*.`"),
        ("*.com", "single label", "two labels after `*.`"),
        ("*.*.com", "wildcard", "only `*.`"),
        ("a.*.com", "wildcard", "only `*.`"),
        ("a*.example.com", "wildcard", "only `*.`"),
        ("bücher.de", "not ASCII", "`xn--bcher-kva.de`"),
        ("BÜCHER.de", "not ASCII", "`xn--bcher-kva.de`"),
        ("faß.de", "not ASCII", "`xn--fa-hia.de`"),
        ("bu\u0308cher.de", "not ASCII", "`xn--bcher-kva.de`"),
        ("\uff41.com", "not ASCII", "in ASCII"),
        ("bücher\u3002de", "not ASCII", "`xn--bcher-kva.de`"),
        ("xn--zzzzzz9999.de", "encodes nothing", "punycode"),
        ("xn--abc-.de", "bad label", "1 to 63"),
        ("ab--cd.com", "encodes nothing", "punycode"),
        ("https://example.com", "is a URL", "only the host"),
        ("example.com/path", "not a CIDR block", "write a name"),
        ("example.com:443", "has a port", "ports"),
        ("[::1]", "brackets", "without brackets"),
        ("127.1", "not an address", "four decimal"),
        ("2130706433", "not an address", "four decimal"),
        ("0x7f000001", "not an address", "four decimal"),
        ("0177.0.0.1", "not an address", "four decimal"),
        ("1.2.3.4.5", "not an address", "four decimal"),
        ("1.2.3.4.", "not an address", "four decimal"),
        ("::ffff:1.2.3.4", "IPv4 written as IPv6", "`1.2.3.4`"),
        ("::FFFF:7f00:1", "IPv4 written as IPv6", "`127.0.0.1`"),
        ("fe80::1%eth0", "zone", "without `%`"),
        ("2001:DB8::1", "usual spelling", "`2001:db8::1`"),
        ("2001:db8:0:0:0:0:0:1", "usual spelling", "`2001:db8::1`"),
        ("0.0.0.0", "no single destination", "unicast"),
        ("::", "no single destination", "unicast"),
        ("224.0.0.1", "no single destination", "unicast"),
        ("ff02::1", "no single destination", "unicast"),
        ("255.255.255.255", "no single destination", "unicast"),
        ("10.0.0.1/8", "outside its prefix", "`10.0.0.0/8`"),
        ("10.0.0.0/33", "not a CIDR block", "write a name"),
        ("10.0.0.0/-1", "not a CIDR block", "write a name"),
        ("10.0.0.0/255.0.0.0", "netmask", "`10.0.0.0/8`"),
        ("10.0.0.0/08", "usual spelling", "`10.0.0.0/8`"),
        ("0.0.0.0/0", "every address", "leave [[permissions.network]] out"),
        ("::/0", "every address", "leave [[permissions.network]] out"),
        ("10.0.0.1/32", "one address", "`10.0.0.1`"),
        ("::1/128", "one address", "`::1`"),
        ("224.0.0.0/4", "multicast", "unicast"),
        ("::ffff:0:0/96", "IPv4 written as IPv6", "IPv4 block"),
        ("::/8", "IPv4 written as IPv6", "IPv4 block"),
        ("", "empty", "value"),
        ("a\u200b.com", "hidden", "remove"),
    ],
)
def test_host_is_refused_with_its_mend(host: str, message: str, hint: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        hosts.check(host)
    context = caught.value.context or {}
    assert message in context["message"]
    assert hint in context["hint"]
