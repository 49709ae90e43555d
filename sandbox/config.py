"""The supervisor's own configuration: a small TOML file that only root can write.

Read from ``COVENANT_STATE/config.toml``, else ``/etc/covenant/config.toml``, else the defaults below. Nothing here
comes from the environment, and programs with rights are named by absolute path: PATH is under the caller's
control (decisions.md, "Environment and binaries").
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from policy import errors
from policy.manifest import text
from policy.manifest.permissions import CREDENTIAL_NAME
from sandbox.export_settings import ExportSettings
from sandbox.proxy_settings import ProxySettings

CREDENTIAL = "credential:"
_SEGMENT = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
_ADDRESS = r"^(https://[A-Za-z0-9.\[\]:-]{1,253}|http://(127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?)/?$"


class VaultSettings(pydantic.BaseModel):
    """``key`` opens the embedded file in a run: the path of a private file of random bytes, or ``credential:NAME`` of
    the supervisor's systemd unit. Without one no run is given a secret. With ``backend = "openbao"`` the secrets lie in
    a KV version 2 store at ``address``: ``mount``/data/``prefix``/<agent id>/<name>, key ``value``; ``token`` is a
    private file, ``ca`` who is believed for the server's certificate. Times in seconds."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    backend: Literal["file", "openbao"] = "file"
    key: str = ""
    # What is not encrypted stays on this machine.
    address: Annotated[str, pydantic.Field(pattern=_ADDRESS)] = "https://127.0.0.1:8200"
    token: Path | None = None
    ca: Path | None = None
    mount: Annotated[str, pydantic.Field(pattern=_SEGMENT)] = "secret"
    prefix: Annotated[str, pydantic.Field(pattern=_SEGMENT)] = "covenant"
    timeout_seconds: int = pydantic.Field(default=5, ge=1, le=60)

    def private_files(self) -> tuple[str, ...]:
        """Return the host's files that open a vault. They are never granted, under any signature."""
        return tuple(place for place in (self.key, str(self.token or "")) if place.startswith("/"))

    @pydantic.field_validator("token", "ca", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        path = Path(value) if isinstance(value, str) else value
        if path is not None and (not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts):
            raise ValueError("must be an absolute path without `..`")
        return path

    @pydantic.field_validator("key")
    @classmethod
    def _place(cls, value: str) -> str:
        if not value or re.fullmatch(CREDENTIAL + CREDENTIAL_NAME, value):
            return value
        if not value.startswith("/") or ".." in Path(value).parts:
            raise ValueError("must be an absolute path without `..`, or `credential:NAME`")
        return value


SYSTEM_FILE = Path("/etc/covenant/config.toml")
# Keys whose sockets and processes a supervisor makes once: a reload leaves them as they are.
AT_START = ("socket", "metrics", "journal", "checkpoint_seconds")
MAX_BYTES = 64 * 1024
# The most bytes of a file of authorities: the systems of today have 250 KiB.
_AUTHORITIES_BYTES = 8 << 20
_MOST_ERRORS = 20
_MAX_HOPS = 40
# What nft and /proc take as one name (IFNAMSIZ), and no name of a gateway's own devices.
_DEVICE = re.compile(r"(?!cv-|lo$)[A-Za-z0-9_][A-Za-z0-9._-]{0,14}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# Places of runsc, by preference: gVisor's own package and Debian's, then a release installed by hand.
_DEFAULT_PATHS = {
    "runsc": ("/usr/bin/runsc", "/usr/local/bin/runsc"),
    "nft": ("/usr/sbin/nft",),
    "python3": ("/usr/bin/python3",),
    "node": ("/usr/bin/node", "/usr/local/bin/node"),
}


def _default(name: str) -> Path:
    candidates = [Path(p) for p in _DEFAULT_PATHS[name]]
    return next((p for p in candidates if p.exists()), candidates[0])


SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")


class TlsSettings(pydantic.BaseModel):
    """``ca`` are files of authorities that are believed beside those of the system.

    Gates that speak TLS themselves believe them, and the relays of tool servers over HTTP.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    ca: tuple[Path, ...] = ()

    @pydantic.field_validator("ca", mode="before")
    @classmethod
    def _paths(cls, value: object) -> object:
        paths = tuple(Path(one) for one in value) if isinstance(value, list) else value
        if not isinstance(paths, tuple) or not all(one.is_absolute() and ".." not in one.parts for one in paths):
            raise ValueError("must be absolute paths without `..`")
        return paths

    def bundles(self) -> tuple[str, ...]:
        """Return the files, the system's first.

        Raises:
            errors.ConfigError: Raised when one is missing, or others can write it.
        """
        return (str(SYSTEM_CA), *self.further())

    def further(self) -> tuple[str, ...]:
        """Return the files beside the system's.

        Raises:
            errors.ConfigError: Raised when one is missing or has no certificate, or others can write it.
        """
        for one in self.ca:
            check_authorities("tls.ca", one)
        return tuple(map(str, self.ca))

    def authorities(self) -> bytes:
        """Return the content of the files beside the system's.

        Raises:
            errors.ConfigError: Raised when one cannot be read, or others can write it.
        """
        try:
            return b"".join(Path(one).read_bytes().rstrip() + b"\n" for one in self.further())
        except OSError as e:
            raise errors.ConfigError(f"tls.ca: {e.filename}: {e.strerror}", hint="name files of certificates") from e


class Config(pydantic.BaseModel):
    """Hold the operator's settings for one host. Times are in seconds.

    ``host`` is the audience that envelopes are signed for. ``uid_first`` and ``uid_count`` are the range that live runs
    take their uids from. ``path_owners`` are the uids, besides 0, whose directories may be granted: those of people who
    may sign anyway. Without ``self_test`` no policy is tested before its first run of a day, and every run reports
    that. ``tell_calls`` reports the system calls that the filter refused. ``tell_files`` also reports paths that were
    missing or not writable, and a full scratch. ``attest_seconds`` is the period of attestation. With ``on_drift``
    drift ends the run, or is only reported. ``resolvers`` are the addresses that the DNS gate asks; empty means those
    of the host's resolv.conf. ``uplink`` is the interface by which agents reach the network; while it is empty no agent
    does.

    ``callers`` are the uids, besides 0, that may use the supervisor's socket. Each may have ``caller_requests`` open at
    once, and must send a request within ``request_seconds``. With ``on_supervisor_exit`` runs end with the supervisor,
    or continue and are found by the next. With ``on_newer_serial`` the runs of an older package end once a newer
    serial of their agent id is accepted, or finish their tasks; neither starts again. ``socket`` is the path of the
    supervisor's socket, by default the one that clients use (sandbox.serve.api.paths).

    ``connection_idle_seconds`` is how long a connection through the TLS gate may carry no byte; then it is ended, and
    that is reported.

    ``runsc_network`` chooses the network stack of agents with a network: gVisor's own, or with ``host`` the kernel's in
    their own namespace, for a runsc that supports no other. The rules outside the sandbox are the same.

    ``metrics`` is the address of the Prometheus endpoint: `unix:` and a path, or a loopback address and a port. Empty
    means none. With ``journal`` the supervisor writes each run's steps to stderr, as one line of JSON each. It signs a
    checkpoint of its log every ``checkpoint_seconds``, where rows came; 0 means never.

    ``agents`` are directories that are searched for the packages of children before their parent's directory; only root
    may write there. One user keeps at most ``kept_workspaces`` workspaces with ``kept_workspaces_mb`` MiB in them.
    ``overcommit`` is the share of this machine's memory that may be promised to live runs together.

    With ``ask_operators`` an operator answers what agents ask for by `on_deny = "ask"` (`covenant approvals`); without
    it that is denied at once.

    ``publish_ports`` are loopback ports at which an agent's manifest may publish a port of the agent; every user of
    this host reaches them. ``host_ports`` are loopback ports that a manifest may grant by the name host.covenant.

    ``tls`` is a table: ``ca`` are files of certificates that the gates believe for servers beside those of the system.

    ``proxy`` is a table: the proxy by which the gates connect.

    ``export`` is a table: where `covenant export` sends the rows of the audit logs, and the collector for the
    telemetry of agents.

    ``vault`` is a table: the place of the secrets, and the key that opens them in a run.

    ``state`` is not a key of the file: it is the directory in which the file was searched.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = pydantic.Field(default_factory=lambda: os.uname().nodename)
    runsc: Path = pydantic.Field(default_factory=lambda: _default("runsc"))
    nft: Path = pydantic.Field(default_factory=lambda: _default("nft"))
    python3: Path = pydantic.Field(default_factory=lambda: _default("python3"))
    node: Path = pydantic.Field(default_factory=lambda: _default("node"))
    uid_first: int = pydantic.Field(default=2_000_000, ge=65_536, le=2**31 - 70_000)
    uid_count: int = pydantic.Field(default=4_096, ge=1, le=65_536)
    start_deadline_seconds: int = pydantic.Field(default=60, ge=1, le=3_600)
    grace_seconds: int = pydantic.Field(default=5, ge=0, le=300)
    attest_seconds: int = pydantic.Field(default=30, ge=1, le=3_600)
    on_drift: Literal["end", "alarm"] = "end"
    allow_unsigned_trusted_local: bool = False
    trusted_local_user: str = "covenant-agent"
    path_owners: tuple[int, ...] = ()
    tell_calls: bool = True
    tell_files: bool = False
    self_test: bool = True
    resolvers: tuple[str, ...] = ()
    uplink: str = ""
    connection_idle_seconds: int = pydantic.Field(default=86_400, ge=60, le=604_800)
    runsc_network: Literal["sandbox", "host"] = "sandbox"
    ask_operators: bool = False
    callers: tuple[Annotated[int, pydantic.Field(ge=1, le=2**32 - 2)], ...] = ()
    caller_requests: int = pydantic.Field(default=32, ge=1, le=4_096)
    request_seconds: int = pydantic.Field(default=10, ge=1, le=600)
    on_supervisor_exit: Literal["end", "continue"] = "end"
    on_newer_serial: Literal["end", "finish"] = "end"
    socket: Path | None = None
    metrics: str = ""
    journal: bool = True
    checkpoint_seconds: int = pydantic.Field(default=300, ge=0, le=86_400)
    vault: VaultSettings = VaultSettings()
    tls: TlsSettings = TlsSettings()
    proxy: ProxySettings = ProxySettings()
    export: ExportSettings = ExportSettings()
    agents: tuple[Path, ...] = ()
    kept_workspaces: int = pydantic.Field(default=64, ge=1, le=65_536)
    kept_workspaces_mb: int = pydantic.Field(default=65_536, ge=8, le=2**30)
    publish_ports: tuple[Annotated[int, pydantic.Field(ge=1_024, le=65_535)], ...] = ()
    host_ports: tuple[Annotated[int, pydantic.Field(ge=1_024, le=65_535)], ...] = ()
    overcommit: float = pydantic.Field(default=1.0, gt=0, le=100)
    state: Path = Path("/var/lib/covenant")

    @property
    def in_host_network(self) -> bool:
        """Return whether runs of the supervisor are in the host's network: by an uplink, or a server with secrets."""
        return bool(self.uplink) or self.vault.backend == "openbao"

    @property
    def digest(self) -> str:
        """Return a digest that two processes share exactly when their settings are equal."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @pydantic.field_validator("runsc", "nft", "python3", "node", "socket", "state", mode="before")
    @classmethod
    def _absolute(cls, value: object) -> object:
        path = Path(value) if isinstance(value, str) else value
        if not isinstance(path, Path) or not path.is_absolute() or ".." in path.parts:
            raise ValueError("must be an absolute path without `..`")
        return path

    @pydantic.field_validator("agents", mode="before")
    @classmethod
    def _directories(cls, value: object) -> object:
        return tuple(cls._absolute(one) for one in value) if isinstance(value, list) else value

    @pydantic.field_validator("path_owners", "resolvers", "callers", "publish_ports", "host_ports", mode="before")
    @classmethod
    def _tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @pydantic.field_validator("resolvers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            try:
                ipaddress.ip_address(one)
            except ValueError:
                raise ValueError("must be a list of addresses") from None
        return value

    @pydantic.field_validator("metrics")
    @classmethod
    def _of_this_machine(cls, value: str) -> str:
        if value.startswith("unix:"):
            cls._absolute(value.removeprefix("unix:"))
        elif value:
            host, _, port = value.rpartition(":")
            try:
                fine = ipaddress.ip_address(host.strip("[]")).is_loopback and 0 < int(port) < 65_536
            except ValueError:
                fine = False
            if not fine:
                raise ValueError("must be `unix:/path` or an address of the loopback with a port, as 127.0.0.1:9464")
        return value

    @pydantic.field_validator("host")
    @classmethod
    def _host_name(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError("must be a host name")
        return value

    @pydantic.field_validator("uplink")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if value and not _DEVICE.fullmatch(value):
            raise ValueError("must be the name of a network interface")
        return value

    @pydantic.model_validator(mode="after")
    def _no_agent_asks(self) -> Config:
        if any(self.uid_first <= uid < self.uid_first + self.uid_count for uid in self.callers):
            raise ValueError("`callers` has a uid of the range that agents run as")
        return self

    @pydantic.field_validator("trusted_local_user")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", value):
            raise ValueError("must be a plain lower-case name")
        return value


def load(state: Path) -> Config:
    """Return the configuration that holds for ``state`` (COVENANT_STATE).

    Raises:
        errors.ConfigError: Raised when the file is malformed, too large, or writable by others.
    """
    for path in files(state):
        raw = read_private(path)
        if raw is not None:
            return parse(raw, file=str(path), state=state)
    return Config(state=state)


def files(state: Path) -> tuple[Path, Path]:
    """Return the paths of the configuration, the first to count first."""
    return state / "config.toml", SYSTEM_FILE


def parse(raw: bytes, *, file: str, state: Path) -> Config:
    """Parse a configuration; ``file`` is its name in errors.

    Raises:
        errors.ConfigError: Raised when the bytes are no configuration; ``errors.each`` lists all faults.
    """
    try:
        document: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:  # an integer of thousands of digits is no TOMLDecodeError
        raise errors.ConfigError(f"configuration is not valid TOML: {text.visible(str(e))}", where=file) from e
    if "state" in document:
        raise errors.ConfigError("`state` cannot be configured", hint="set COVENANT_STATE", where=file)
    try:
        return Config(**document, state=state)
    except pydantic.ValidationError as e:
        found = e.errors(include_url=False, include_context=False)[:_MOST_ERRORS]
        raise errors.together([_error(one["type"], one["loc"], one["msg"], file) for one in found]) from e


def _error(kind: str, place: tuple[int | str, ...], message: str, file: str) -> errors.ConfigError:
    """Return one fault of the configuration in the words of this project."""
    key = text.visible(".".join(str(part) for part in place))
    if kind == "extra_forbidden":
        table = Config.model_fields[str(place[0])].annotation if len(place) > 1 else Config
        hint = nearest_key(str(place[-1]), table if isinstance(table, type) else Config)
        return errors.ConfigError(f"`{key}` is no key of the configuration", hint=hint, where=file)
    if kind == "model_type":
        return errors.ConfigError(f"configuration key `{key}`: must be a table", hint=f"write [{key}]", where=file)
    said = message.removeprefix("Value error, ").lower()
    named = f"configuration key `{key}`" if key else "configuration"
    return errors.ConfigError(f"{named}: {said}", where=file)


def nearest_key(word: str, table: type[pydantic.BaseModel]) -> str:
    """Return the key of a table that is nearest to an unknown one, and all that are known there."""
    known = tuple(name for name in sorted(table.model_fields) if name != "state")
    near = text.nearest(word, known)
    return (f"did you mean `{near}`? " if near else "") + f"known here: {', '.join(known)}"


def file_of(state: Path) -> Path:
    """Return the path of the configuration that ``load`` reads, or of the state's own where there is none."""
    own = state / "config.toml"
    return SYSTEM_FILE if not os.path.lexists(own) and os.path.lexists(SYSTEM_FILE) else own


def read_private(path: Path) -> bytes | None:
    """Return a file of the operator's configuration, None if there is none.

    Raises:
        errors.ConfigError: Raised when it is too large, or others can write it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise errors.ConfigError(f"configuration cannot be read: {e.strerror}", where=str(path)) from e
    try:
        info = os.fstat(fd)
        # As root only root's own file counts. Without root, a user's own file harms only that user.
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in {0, os.geteuid()} or info.st_mode & 0o022:
            raise errors.ConfigError(
                "configuration can be written by others",
                hint=f"chown root {path}; chmod 0600 {path}",
                where=str(path),
            )
        raw = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(raw) > MAX_BYTES:
        raise errors.ConfigError(f"configuration is larger than {MAX_BYTES} bytes", where=str(path))
    return raw


def trusted_binary(path: Path) -> Path:
    """Return the program at an absolute path, with symlinks resolved, if only root can have put it there.

    Raises:
        errors.HostError: Raised when it is missing or not executable, or when it or a directory above it has
            another owner.
    """
    real = _resolve(path)
    info = os.lstat(real)
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
        raise errors.HostError(f"program `{path}` is not an executable file", where=str(real))
    return real


def _resolve(path: Path) -> Path:
    """Follow symlinks by hand: each component on the way, links included, must be root's."""
    pending, current, hops = list(path.parts[1:]), Path("/"), 0
    check_owner(current)
    while pending:
        part = pending.pop(0)
        if part == "..":
            current = current.parent
            continue
        info = check_owner(current / part)
        if not stat.S_ISLNK(info.st_mode):
            current /= part
            continue
        hops += 1
        if hops > _MAX_HOPS:
            raise errors.HostError(f"program `{path}` leads through too many symlinks", where=str(path))
        target = Path(os.readlink(current / part))
        pending = [p for p in target.parts if p != "/"] + pending
        current = Path("/") if target.is_absolute() else current
    return current


def check_authorities(key: str, path: Path, *, owned: bool = True) -> None:
    """Check a file of certificates before the process is started that reads it, whose own error would be obscure.

    ``key`` names the setting. With ``owned`` only root may be able to change the file.

    Raises:
        errors.ConfigError: Raised when it is missing or has no certificate in PEM, or others can write it.
    """
    import ssl

    hint = "name a file of certificates in PEM"
    try:
        if owned:
            check_owner(path)
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > _AUTHORITIES_BYTES:
            about = f"is no plain file of at most {_AUTHORITIES_BYTES} bytes"
            raise errors.ConfigError(f"{key}: `{path}` {about}", hint=hint)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except errors.HostError as e:
        raise errors.ConfigError(f"{key}: {e.message}", hint=e.hint or hint) from e
    except ssl.SSLError as e:
        raise errors.ConfigError(f"{key}: `{path}` has no certificate in PEM", hint=hint) from e
    except OSError as e:
        raise errors.ConfigError(f"{key}: `{path}`: {e.strerror}", hint=hint) from e


def check_owner(path: Path) -> os.stat_result:
    """Return the lstat of a path that only root can change.

    Raises:
        errors.HostError: Raised when it is missing, not owned by root, or writable by group or others.
    """
    try:
        info = os.lstat(path)
    except OSError as e:
        raise errors.HostError(f"`{path}` cannot be looked at: {e.strerror}", where=str(path)) from e
    if info.st_uid != 0:
        raise errors.HostError(
            f"`{path}` belongs to uid {info.st_uid}, not to root", hint=f"chown root {path}", where=str(path)
        )
    # A symlink always has mode 0777. In a sticky directory of root, other users cannot replace root's entries.
    loose = info.st_mode & 0o022 and not stat.S_ISLNK(info.st_mode)
    if loose and not (stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX):
        raise errors.HostError(f"`{path}` can be written by others", hint=f"chmod go-w {path}", where=str(path))
    return info
