"""An agent with a network, through the supervisor, gVisor and a real gateway, on an internet of the test's own."""

from __future__ import annotations

import json

from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.world import SLOWNESS

# Five connections, one of them with 100 kB over more than a second; and a datagram with its answer.
PROBES_TO_COUNT = """
import socket, time
for number in range(5):
    with socket.create_connection(("93.184.216.34", 80), timeout=10) as s:
        for _ in range(10 if number == 0 else 0):
            s.sendall(b"x" * 10_000)
            time.sleep(0.15)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(10)
    s.connect(("9.9.9.9", 443))
    s.send(b"y" * 1000)
    s.recv(2000)
"""


def test_granted_address_connects_and_others_are_refused(networked: NetworkedWorld) -> None:
    grants = internet.entries(("93.184.216.34", "[80]", "tcp"), ("2606:4700::1111", "[80]", "tcp"))
    probes = [
        "tcp('93.184.216.34', 80)", "tcp('2606:4700::1111', 80)",
        "tcp('93.184.216.34', 443)", "tcp('9.9.9.9', 80)", "tcp('2606:4700::2222', 80)", "udp('9.9.9.9', 123)",
    ]  # fmt: skip
    # Open for longer than the table is looked at once, and closed before the end.
    code = PROBES_TO_COUNT + internet.probes(probes)
    answer = networked.ask(code, network="full", more=grants + internet.entries(("9.9.9.9", "[443]", "udp")))
    # Where none is forwarded, an agent hears so at once, of what is granted as well.
    six = ["connected", "ECONNREFUSED"] if networked.internet.forwards_ipv6() else ["ENETUNREACH", "ENETUNREACH"]
    assert answer == ["connected", six[0], "ECONNREFUSED", "ECONNREFUSED", six[1], "ECONNREFUSED"]
    # What was reached is counted, and what was refused is not.
    rows = [row["kind"] for row in networked.rows() if row["kind"]["type"] == "reached"]
    reached = {row["target"]: (row["connections"], row["bytes"]) for row in rows}
    six_too = {"[2606:4700::1111]:80/tcp"} if networked.internet.forwards_ipv6() else set()
    assert set(reached) == {"93.184.216.34:80/tcp", "9.9.9.9:443/udp"} | six_too
    connections, carried = reached["93.184.216.34:80/tcp"]
    # In emulation the table is looked at late, and an entry that came and went in between is not counted.
    least = (6, 100_000) if SLOWNESS == 1 else (1, 1)
    assert least[0] <= connections <= 6
    assert least[1] < carried < 150_000, carried
    connections, carried = reached["9.9.9.9:443/udp"]
    assert (connections, 2 * (1000 + 28) <= carried <= 2 * 1028) == (1, True)


def test_names_resolve_where_granted_and_lead_there_alone(networked: NetworkedWorld) -> None:
    grants = internet.entries(
        ("api.example.com", "[80]", "tcp"),
        ("www.example.com", "[443]", "tls"),
        ("rebind.example.com", "[80]", "tcp"),
    )
    probes = {
        "resolve('api.example.com')": ["2606:4700::1111", "93.184.216.34"],
        "tcp('api.example.com', 80, 10)": "connected",
        "tcp('93.184.216.34', 443)": "ECONNREFUSED",
        "tls('www.example.com')": "www.example.com",
        "tls('other.example.com', '93.184.216.35')": "ECONNRESET",
        "resolve('other.example.com')": "gaierror -2",
        "resolve('rebind.example.com')": "gaierror -5",
        "tcp('10.8.8.8', 80)": "ECONNREFUSED",
        "open('/etc/resolv.conf').read()": "nameserver 192.0.0.1\n",
    }
    answer = networked.ask(
        internet.probes(list(probes)), network="full", more=grants, files={"ca.pem": networked.internet.certificate}
    )
    assert dict(zip(probes, answer, strict=True)) == probes


NODE = """
const net = require("node:net"), dns = require("node:dns"), tls = require("node:tls"), fs = require("node:fs");
require("node:fs").readSync(0, Buffer.alloc(65536));
const connect = (options, open) => new Promise((done) => {
  const socket = open(options, () => { socket.destroy(); done("connected"); });
  socket.on("error", (error) => done(error.code));
});
const look = (name) => new Promise((done) => {
  dns.lookup(name, { family: 4 }, (error, address) => done(error ? error.code : address));
});
(async () => {
  const answer = [
    await connect({ host: "93.184.216.34", port: 80 }, net.connect),
    await connect({ host: "9.9.9.9", port: 80 }, net.connect),
    await look("www.example.com"),
    await look("other.example.com"),
    await connect({ host: "www.example.com", port: 443, servername: "www.example.com", ca: fs.readFileSync("ca.pem") },
      tls.connect),
  ];
  console.log(JSON.stringify({ text: JSON.stringify(answer) }));
})();
"""


def test_node_has_its_network_too(networked: NetworkedWorld) -> None:
    grants = internet.entries(("93.184.216.34", "[80]", "tcp"), ("www.example.com", "[443]", "tls"))
    files = {"main.js": NODE, "ca.pem": networked.internet.certificate}
    package = networked.package(files, runtime="node", entry="main.js", memory_mb=512, network="full", more=grants)
    answer = networked.run(networked.sign(package))
    assert answer.error is None, (answer.error, answer.stderr)
    assert json.loads(answer.result.text) == ["connected", "ECONNREFUSED", "93.184.216.35", "ENOTFOUND", "connected"]
