"""The ssh-agent service under gVisor, with OpenSSH's own client and server: logins at named hosts, and nothing else.

Both servers take the key. So a login that fails at the one that is not named fails for the service alone; the control
is a login there with the private key.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy.ssh import wire
from sandbox.network.ssh import private_keys
from sandbox.run_result import RunResult
from tests.kernel import internet, live_runs, session_kit, ssh_hosts
from tests.kernel.conftest import leftovers
from tests.kernel.ssh_hosts import AGENT, SshHost
from tests.kernel.test_credentials import covenant, family, memory, vault, words
from tests.kernel.world import HEAD, ROOT, TAIL, World

KINDS = ("ed25519", "ecdsa", "rsa")


class SshWorld(World):
    """A world with two servers, and with a key of each kind in its vault that both take."""

    granted: SshHost
    other: SshHost

    def more(self) -> str:
        entries = [ssh_hosts.entry(kind, ("git.example.org", self.granted.line)) for kind in KINDS]
        return ssh_hosts.table(self.granted, self.other) + "".join(entries)

    def start(self, code: str) -> RunResult:
        source = HEAD + AGENT.replace("USER", ssh_hosts.user()) + code + TAIL
        fields: dict[str, Any] = {"cpu_ms": 900_000, "memory_mb": 256, "resources": "pids_max = 64"}
        return self.run(self.sign(self.package({"main.py": source}, more=self.more(), **fields)))

    def kinds(self, name: str) -> list[dict[str, Any]]:
        return [row["kind"] for row in self.rows() if row["kind"]["type"] == name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[SshWorld]:
    base = tmp_path_factory.mktemp("ssh")
    made = SshWorld(base, warm=warm)
    made.granted, made.other = SshHost(base / "granted"), SshHost(base / "other", kind="ecdsa")
    made.configure(**{"host_ports": [made.granted.port, made.other.port], "vault.key": str(base / "vault.key")})
    vault(made, "init")
    for kind in KINDS:
        public = ssh_hosts.keygen(base / kind, kind)
        vault(made, "put", "probe", kind, secret=(base / kind).read_text())
        for one in (made.granted, made.other):
            one.authorize(public)
    subprocess.run(["git", "init", "-q", "--bare", str(made.granted.repository)], check=True)
    with ssh_hosts.serving(made.granted), ssh_hosts.serving(made.other):
        for one in (made.granted, made.other):
            assert ssh_hosts.direct(one, base / "ed25519") == f"in as {ssh_hosts.user()}\n"
        yield made


LOGINS = """
blobs = keys()
kinds = {blob[4:].split(b"\\0")[0].decode(): blob for blob in blobs}
answer = {"keys": sorted(kinds)}
for name, blob in kinds.items():
    import base64
    place = "/tmp/" + name + ".pub"
    open(place, "w").write(name + " " + base64.b64encode(blob).decode() + "\\n")
    answer[name] = ssh(GRANTED, "-i", place, "-o", "IdentitiesOnly=yes")
os.environ["GIT_SSH_COMMAND"] = " ".join(["/usr/bin/ssh", *OPTIONS])
os.environ["GIT_EXEC_PATH"] = "/usr/bin"
answer["clone"] = program("/usr/bin/git", "clone", "ssh://USER@host.covenant:GRANTED/any", "/tmp/clone")
answer["other"] = ssh(OTHER)
answer["files"] = program("/usr/bin/ssh-add", "-D"), program("/usr/bin/ssh-add", "-x")
open("/tmp/message", "w").write("message")
signer = ["/usr/bin/ssh-keygen", "-Y", "sign", "-n", "file", "-f", "/tmp/ssh-ed25519.pub"]
answer["file"] = program(*signer, "/tmp/message")
"""
# A login whose messages the agent program reads on their way, and what it makes of them.
ATTACKS = """
import threading
def recorded(port):
    place, said = "/tmp/recorder%d" % len(os.listdir("/tmp")), []
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen(4)
    def serve():
        client = Talk.__new__(Talk)
        client.line, _ = server.accept()
        behind = Talk()
        while head := client.take(4):
            said.append(client.take(int.from_bytes(head, "big")))
            client.line.sendall(s(behind.say(said[-1])))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    os.environ["SSH_AUTH_SOCK"] = place
    status = ssh(port)[0]
    os.environ["SSH_AUTH_SOCK"] = PLACE
    return status, said
def fields(data):
    out, at = [], 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at:at + 4], "big")
        out.append(data[at + 4:at + 4 + size])
        at += 4 + size
    return out
status, said = recorded(GRANTED)
bind, sign = next(m for m in said if m[0] == 27), next(m for m in said if m[0] == 13)
_, host_key, session, signature = fields(bind[1:-1])
key, data = fields(sign[1:-4])
again, other = recorded(GRANTED), recorded(OTHER)
bind2 = next(m for m in again[1] if m[0] == 27)
session2 = fields(bind2[1:-1])[2]
elsewhere = next(m for m in other[1] if m[0] == 27)
def binding(key=host_key, of=session, by=signature, forwarded=0):
    return bytes([27]) + s(b"session-bind@openssh.com") + s(key) + s(of) + s(by) + bytes([forwarded])
def signing(data, flags=0, key=key):
    return bytes([13]) + s(key) + s(data) + flags.to_bytes(4, "big")
def said_to(*messages):
    talk = Talk()
    return [talk.say(one)[:1].hex() for one in messages]
assert len(session) == len(session2) and session != session2
rsa = next(blob for blob in keys() if b"ssh-rsa" in blob[:12])
rsa_login = data.replace(s(b"ssh-ed25519") + s(key), s(b"ssh-rsa") + s(rsa))
bound_twice = Talk()
twice = [bound_twice.say(one)[:1].hex() for one in (bind, bind, bind2, sign)]
answer = {
    "control": [status, again[0], *said_to(bind, sign)],
    "other": [other[0], *said_to(elsewhere, sign)],
    "listed there": len(other[1]),
    "unbound": said_to(sign),
    "forwarded": said_to(binding(forwarded=1), sign),
    "replayed": said_to(bind, signing(data.replace(session, session2))),
    "bound to another": said_to(bind2, sign),
    "spoiled": said_to(binding(by=signature[:-1] + bytes([signature[-1] ^ 1])), sign),
    "another session": said_to(binding(of=session2), sign),
    "twice": twice,
    "file": said_to(bind, signing(b"SSHSIG" + s(b"file") + s(b"") + s(b"sha512") + s(b"x" * 64))),
    "other data": said_to(bind, signing(data + b"x"), signing(data[:-1]), signing(b""), signing(session)),
    "another service": said_to(bind, signing(data.replace(b"ssh-connection", b"ssh-userauthxx"))),
    "sha1": said_to(bind, signing(rsa_login, 0, rsa)),
    "another key": said_to(bind, signing(data, 0, rsa), signing(data, 0, b""), signing(data, 2)),
    "refused": said_to(*(bytes([kind]) + s(b"x") for kind in (17, 25, 18, 19, 20, 21, 26, 22, 23, 1, 9))),
    "extension": said_to(bytes([27]) + s(b"query"), bytes([27]) + s(b"session-bind@openssh.com"), bytes([27])),
}
last = Talk()
last.line.sendall((1 << 30).to_bytes(4, "big") + b"x")
answer["long"] = last.hear().hex()
answer["still"] = said_to(bind, sign)
"""


def _filled(world: SshWorld, code: str) -> str:
    """The code of an agent with the ports of both servers."""
    ports = code.replace("GRANTED", str(world.granted.port)).replace("OTHER", str(world.other.port))
    return ports.replace("USER", ssh_hosts.user())


def _said(answer: RunResult) -> dict[str, Any]:
    assert answer.result is not None, answer.error
    found: dict[str, Any] = json.loads(answer.result.text)
    return found


def test_logins_are_signed_at_named_host(world: SshWorld) -> None:
    said = _said(world.start(_filled(world, LOGINS)))
    names = ["ecdsa-sha2-nistp256", "ssh-ed25519", "ssh-rsa"]
    assert said["keys"] == names
    assert [said[name] for name in names] == [[0, f"in as {ssh_hosts.user()}\n", ""]] * 3
    assert said["clone"][0] == 0, said["clone"]
    assert said["other"][0] == 255, said["other"]
    assert [one[0] != 0 for one in (*said["files"], said["file"])] == [True] * 3
    signed = world.kinds("ssh_signed")
    algorithms = [row["algorithm"] for row in signed[:3]]
    assert sorted(algorithms) == ["ecdsa-sha2-nistp256", "rsa-sha2-512", "ssh-ed25519"]
    assert {(row["host"], row["user"], row["version"]) for row in signed} == {("git.example.org", ssh_hosts.user(), 1)}
    denied = {(row["code"], row["target"]) for row in world.kinds("denied") if row["layer"] == "ssh"}
    own = wire.fingerprint(private_keys.public(private_keys.load((world.base / "ed25519").read_bytes())))
    assert denied == {
        ("host_not_granted", world.other.line),
        ("not_bound", own),
        *(("request_refused", name) for name in ("remove identity", "lock")),
    }
    assert leftovers(world) == []


def test_attacks_get_no_signature(world: SshWorld) -> None:
    before = len(world.kinds("denied"))
    said = _said(world.start(_filled(world, ATTACKS)))
    good, bad, bound = "0e", "05", "06"
    assert said["control"] == [0, 0, bound, good]
    assert said["still"] == [bound, good]
    assert said["other"] == [255, bad, bad]
    assert said["listed there"] == 2  # a binding and a list, which is empty: the client asks for no signature
    assert said["unbound"] == [bad]
    for name in ("forwarded", "spoiled", "another session"):
        assert said[name] == [bad, bad], name
    assert said["replayed"] == said["bound to another"] == [bound, bad]
    assert said["twice"] == [bound, bound, bad, bad]
    for name in ("file", "another service", "sha1"):
        assert said[name] == [bound, bad], name
    assert said["other data"] == [bound, *[bad] * 4]
    assert said["another key"] == [bound, *[bad] * 3]
    assert set(said["refused"]) == set(said["extension"]) == {bad}
    assert said["long"] == ""
    codes = {row["code"] for row in world.kinds("denied")[before:] if row["layer"] == "ssh"}
    assert codes == {
        "algorithm_refused", "binding_refused", "forwarded", "host_not_granted", "malformed", "not_a_login",
        "not_bound", "request_refused", "session_refused",
    }  # fmt: skip


HELD = """
import time
before = ssh(GRANTED)
count, until = len(keys()), time.monotonic() + 600
while keys() and time.monotonic() < until:
    time.sleep(0.5)
answer = {"first": before[0], "keys": count, "ended": keys() == [], "then": ssh(GRANTED)[0]}
"""


def test_key_is_not_inside_and_ends_with_secret(world: SshWorld) -> None:
    private = private_keys.load((world.base / "ed25519").read_bytes())
    assert isinstance(private, Ed25519PrivateKey)
    seed, public = private.private_bytes_raw(), private.public_key().public_bytes_raw()
    text = (world.base / "ed25519").read_text().splitlines()[2].encode()
    before = len(world.kinds("ssh_signed"))
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.start(_filled(world, HELD))))
    thread.start()
    try:
        live_runs.until(lambda: answers or len(world.kinds("ssh_signed")) > before)
        (run,) = [one for one in (world.state / "runs").iterdir() if one.is_dir()]
        attested = covenant(world, "attest", run.name)
        assert attested.returncode == 0, attested.stdout + attested.stderr
        found = {"seed": 0, "public": 0}
        for pid in family(os.getpid())[1:]:
            name = words(pid)
            sandboxed = not any(one in name for one in (b"sandbox.network", b"sshd"))
            for region in memory(pid):
                found["seed"] += (seed in region) + (text in region)
                found["public"] += sandboxed and public in region
    finally:
        for kind in KINDS:
            vault(world, "rm", "probe", kind)
        thread.join()
    assert found["seed"] == 0
    assert found["public"] > 0  # the control: bytes that are inside are found by the same means
    assert _said(answers[0]) == {"first": 0, "keys": 3, "ended": True, "then": 255}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that a session may read: outside of /tmp, and root alone can write it."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_session_logs_in_by_name(tmp_path: Path, place: Path) -> None:
    """`covenant exec --ssh` with OpenSSH from a layer, at a server behind a name and in another namespace."""
    home = session_kit.Home(tmp_path, "debian-minimal")
    home.world.configure(uplink="eth0", resolvers=[internet.RESOLVER], **{"vault.key": str(tmp_path / "vault.key")})
    server = SshHost(tmp_path / "server", address="0.0.0.0")
    server.authorize(ssh_hosts.keygen(tmp_path / "deploy"))
    known = place / ".ssh" / "known_hosts"
    known.parent.mkdir()
    known.write_text(f"[api.example.com]:{server.port} {server.line}\n")
    vault(home.world, "init")
    vault(home.world, "put", "exec-ssh", "deploy", secret=(tmp_path / "deploy").read_text())
    assert home.covenant("layer", "build", "ssh", "host-packages", "openssh-client").returncode == 0
    environment = {**home.environment(), "HOME": str(place)}
    login = ["ssh", "-p", str(server.port), "-o", "BatchMode=yes", f"{ssh_hosts.user()}@api.example.com"]
    covenant_exec = [sys.executable, "-m", "covenant", "exec", "--no-workspace", "--layer", "ssh"]
    with internet.made() as net, ssh_hosts.serving(server, net.spaces["world"]):
        grant = ["--ssh", f"api.example.com:{server.port}=deploy", "--read", str(known)]
        command = [*covenant_exec, *grant, "--", *login[:1], "-o", f"UserKnownHostsFile={known}", *login[1:]]
        assert net.run("host", *command, env=environment) == f"in as {ssh_hosts.user()}\n"
        # Without the option the same login has neither the host nor a key.
        command = [*covenant_exec, "--quiet", "--", *login]
        assert net.run("host", *command, env=environment, check=False) == ""
        assert net.leftovers() == leftovers(home.world) == []
    (signed,) = [row["kind"] for row in home.world.rows() if row["kind"]["type"] == "ssh_signed"]
    assert (signed["host"], signed["user"]) == ("api.example.com", ssh_hosts.user())
    assert server.log.count("Accepted publickey") == 1


def test_page_can_be_followed(world: SshWorld, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "ssh.md").read_text()
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    package = tmp_path / "deployer"
    package.mkdir()
    (package / "agent.toml").write_text(blocks["toml"])
    (package / "main.py").write_text("")
    environment = {"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    said = b""
    for line in blocks["sh"].splitlines():
        words = re.sub(r"^covenant", f"{sys.executable} -m covenant", line)
        done = subprocess.run(["/bin/sh", "-c", words], env=environment, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said = done.stdout
    asks = f"{sys.executable} -m covenant policy why deployer --ssh "
    for host, status in (("git.example.org", 0), ("www.example.org", 3)):
        done = subprocess.run(["/bin/sh", "-c", asks + host], env=environment, cwd=tmp_path, capture_output=True)
        assert done.returncode == status, (done.stdout, done.stderr)
    assert b"deploy signs logins at git.example.org" in said
    assert {row["name"] for row in world.kinds("vault_changed") if row["agent_id"] == "deployer"} == {"deploy"}
