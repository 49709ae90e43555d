"""Real sshd servers on this host's loopback, and agents under gVisor that log in there by keys of the vault."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sandbox.kernel.net import netns
from tests.kernel import live_runs

SSHD = "/usr/sbin/sshd"
# The one thing that a login can do: fetch the repository, or say that it is in.
_COMMAND = """\
#!/bin/sh
case "$SSH_ORIGINAL_COMMAND" in
  "git-upload-pack "*) exec git-upload-pack {repository} ;;
  hold) echo in; exec sleep 100 ;;
  *) echo "in as $USER" ;;
esac
"""
_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {host_key}
PidFile none
AuthorizedKeysFile {authorized}
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM {pam}
LogLevel VERBOSE
{more}
"""
PROGRAMS = ("/usr/bin/ssh", "/usr/bin/ssh-add", "/usr/bin/ssh-keygen", "/usr/bin/git", "/bin/sh")
TABLE = """
[permissions.executables]
allow = [{programs}]
[[permissions.network]]
host = "host.covenant"
ports = [{ports}]
protocol = "tcp"
"""
# What agents begin with: the programs as one call each, and messages of the agent protocol by hand.
AGENT = """
import os, socket, struct, subprocess
PLACE = os.environ["SSH_AUTH_SOCK"]
OPTIONS = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes",
           "-o", "LogLevel=ERROR"]
def program(*words, **more):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, **more)
    return [done.returncode, done.stdout, done.stderr]
def ssh(port, *words, user="USER"):
    return program("/usr/bin/ssh", *OPTIONS, "-p", str(port), user + "@host.covenant", *(words or ["true"]))
def s(value):
    return struct.pack("!I", len(value)) + value
class Talk:
    def __init__(self):
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(30)
        self.line.connect(PLACE)
    def say(self, message):
        self.line.sendall(s(message))
        return self.hear()
    def hear(self):
        head = self.take(4)
        return self.take(int.from_bytes(head, "big")) if head else b""
    def take(self, size):
        out = b""
        while len(out) < size and (piece := self.line.recv(size - len(out))):
            out += piece
        return out
def keys():
    found = Talk().say(bytes([11]))
    count, at, out = int.from_bytes(found[1:5], "big"), 5, []
    for _ in range(2 * count):
        size = int.from_bytes(found[at:at + 4], "big")
        out.append(found[at + 4:at + 4 + size])
        at += 4 + size
    return out[::2]
"""


class SshHost:
    """A running sshd whose host key is ``line``. It takes the keys in ``authorized``."""

    def __init__(self, folder: Path, *, kind: str = "ed25519", more: str = "", address: str = "127.0.0.1") -> None:
        self.folder, self.kind = folder, kind
        folder.mkdir(mode=0o700)
        self.line = " ".join(keygen(folder / "host", kind).split()[:2])
        self.authorized = folder / "authorized"
        self.authorized.touch()
        self.repository = folder / "repository.git"
        with socket.create_server(("127.0.0.1", 0)) as one:
            self.port: int = one.getsockname()[1]
        names = {
            "port": self.port,
            "address": address,
            "host_key": folder / "host",
            "authorized": self.authorized,
            "more": more,
            "pam": _pam(),
        }
        (folder / "sshd_config").write_text(_CONFIG.format(**names))
        command = folder / "command"
        command.write_text(_COMMAND.format(repository=self.repository))
        command.chmod(0o755)

    def authorize(self, public: str) -> None:
        """Take logins by a key."""
        with self.authorized.open("a") as file:
            file.write(f'restrict,command="{self.folder}/command" {public}\n')

    @property
    def log(self) -> str:
        """The server's own words."""
        return (self.folder / "log").read_text()


def keygen(path: Path, kind: str = "ed25519") -> str:
    """Make a key. Returns its public line."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text().strip()


@contextlib.contextmanager
def serving(host: SshHost, space: int | None = None) -> Iterator[SshHost]:
    """Run the server while the block lasts, where ``space`` is given in this network namespace."""
    made = not os.path.isdir("/run/sshd")
    if made:
        os.mkdir("/run/sshd", 0o755)
    command = [SSHD, "-D", "-f", str(host.folder / "sshd_config"), "-E", str(host.folder / "log")]
    if space is not None:
        command = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{space}", *command]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        try:
            live_runs.until(lambda: _answers(host.port, space) or server.poll() is not None)
            assert server.poll() is None, host.log
            yield host
        finally:
            server.kill()
            server.wait()
            if made:
                with contextlib.suppress(OSError):
                    os.rmdir("/run/sshd")


def _answers(port: int, space: int | None) -> bool:
    def ask() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
            return one.recv(4) == b"SSH-"
        return False

    return ask() if space is None else netns.within(space, ask)


def direct(host: SshHost, key: Path) -> str:
    """Log in from this host with a private key. Returns what the command said."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes"]
    own = ["-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR", "-F", "none", "-i", str(key), "-p", str(host.port)]
    command = ["ssh", *options, *own, f"{user()}@127.0.0.1", "true"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pam() -> str:
    """Return whether PAM is used: without it sshd refuses a user whose password is locked."""
    rows = (line.split(":") for line in Path("/etc/shadow").read_text().splitlines())
    return "yes" if any(row[0] == user() and row[1].startswith("!") for row in rows) else "no"


def user() -> str:
    """The user of this host that the agents log in as: the one who runs the tests."""
    return pwd.getpwuid(os.getuid()).pw_name


def table(*hosts: SshHost) -> str:
    """The sections of a manifest that reaches these hosts and starts the programs."""
    programs = ", ".join(f'"{one}"' for one in PROGRAMS)
    return TABLE.format(programs=programs, ports=", ".join(str(one.port) for one in hosts))


def entry(secret: str, *hosts: tuple[str, str]) -> str:
    """One ``[[services.ssh_agent]]``: the hosts are names with a key."""
    named = ", ".join(f'{{ name = "{name}", keys = ["{line}"] }}' for name, line in hosts)
    return f'[[services.ssh_agent]]\nsecret = "{secret}"\nhosts = [{named}]\n'
