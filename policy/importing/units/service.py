"""A unit of systemd: the [Service] section of a .service file.

Settings that repeat add up, and an empty one takes back those before it (systemd.syntax(7)). Sources of the meanings:
systemd.exec(5), systemd.resource-control(5), systemd.service(5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pydantic_core import PydanticCustomError

from policy.importing import command_words, host_grants, path_grants, quantities
from policy.importing.path_grants import SourcePath
from policy.importing.units import system_calls, unit_file
from policy.importing.units.unit_file import Setting
from policy.importing.vocabulary import Context, Draft, shown
from policy.manifest import paths

_LISTS: Final = frozenset(
    {"ReadWritePaths", "ReadOnlyPaths", "TemporaryFileSystem", "InaccessiblePaths", "BindPaths"}
    | {"BindReadOnlyPaths", "IPAddressAllow"}
    | {"IPAddressDeny", "SystemCallFilter", "Environment", "EnvironmentFile", "ExecStart", "RestrictAddressFamilies"}
    | {"LoadCredential", "LoadCredentialEncrypted", "SetCredential", "SetCredentialEncrypted", "PassEnvironment"}
    | {"StateDirectory", "CacheDirectory", "LogsDirectory", "RuntimeDirectory", "ConfigurationDirectory"}
)
_OLD_NAMES: Final = {
    "ReadWriteDirectories": "ReadWritePaths",
    "ReadOnlyDirectories": "ReadOnlyPaths",
    "InaccessibleDirectories": "InaccessiblePaths",
    "MemoryLimit": "MemoryMax",
}
# Each holds in every sandbox of ours, with any value: nothing is lost.
_ALWAYS: Final = frozenset(
    {"NoNewPrivileges", "PrivateDevices", "PrivateTmp", "PrivateUsers", "PrivateIPC", "PrivateMounts", "ProtectClock"}
    | {"ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectControlGroups"}
    | {"ProtectProc", "ProcSubset", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality"}
    | {"ProtectSystem", "CapabilityBoundingSet", "AmbientCapabilities", "DevicePolicy", "KeyringMode", "RemoveIPC"}
    | {"Type", "Description", "Documentation", "SystemCallErrorNumber", "SystemCallArchitectures", "UMask"}
)
_DIRECTORIES: Final = {
    "StateDirectory": "/var/lib",
    "CacheDirectory": "/var/cache",
    "LogsDirectory": "/var/log",
    "RuntimeDirectory": "/run",
    "ConfigurationDirectory": "/etc",
}
_HOMES: Final = ("/home", "/root", "/run/user")
_TEMPORARY: Final = ("/tmp", "/var/tmp")  # noqa: S108 - places of a unit, and no file of ours
_YES: Final = frozenset({"1", "yes", "true", "on"})
_ANY: Final = frozenset({"any", "0.0.0.0/0", "::/0"})


class _Unit:
    """The settings of [Service] as systemd adds them up."""

    def __init__(self, found: Sequence[Setting]) -> None:
        self.lists: dict[str, list[Setting]] = {}
        self.last: dict[str, Setting] = {}
        self.others: list[Setting] = []
        for one in found:
            key = _OLD_NAMES.get(one.key, one.key)
            if one.section != "Service":
                self.others.append(one)
            elif key in _LISTS and not one.value:
                self.lists.pop(key, None)
            elif key in _LISTS:
                self.lists.setdefault(key, []).append(one)
            else:
                self.last[key] = one

    def words(self, key: str) -> list[tuple[Setting, str]]:
        """Return the words of a list, each with its setting."""
        return [(one, word) for one in self.lists.get(key, []) for word in unit_file.words(one)]

    def value(self, key: str) -> str:
        """Return the value of a setting in lower case, empty where it is absent."""
        return self.last[key].value.lower() if key in self.last else ""


def read(raw: bytes, context: Context) -> Draft:
    """Read a unit.

    Raises:
        errors.ImportSourceError: it is malformed, or has a limit that no manifest can hold.
    """
    draft = Draft(context)
    unit = _Unit(unit_file.settings(raw))
    _program(draft, unit)
    _filesystem(draft, unit)
    _network(draft, unit)
    _limits(draft, unit)
    draft.denied_calls = system_calls.denied(draft, unit.lists.get("SystemCallFilter", []))
    _secrets(draft, unit)
    for one in unit.others:
        if one.section not in ("Unit", "Install"):
            draft.inexpressible(one.place, f"[{shown(one.section)}] has no meaning for this import")
    for key, one in unit.last.items():
        if key not in _ALWAYS | _HANDLED:
            draft.inexpressible(one.place, f"{shown(key)} is no setting that this import knows")
    return draft


def _program(draft: Draft, unit: _Unit) -> None:
    starts = unit.lists.get("ExecStart", [])
    for one in starts[1:]:
        draft.inexpressible(one.place, "a second ExecStart= is left out: an agent is one program")
    if not starts:
        draft.inexpressible("ExecStart", "the unit starts no program", 'agent.entry = "PROGRAM"')
        return
    first, *rest = unit_file.words(starts[0]) or [""]
    bare = first.lstrip("@-:+!")
    if "+" in first[: len(first) - len(bare)] or "!" in first[: len(first) - len(bare)]:
        draft.refused(starts[0].place, "full privileges (`+`, `!`) are not granted")
    command_words.take(draft, starts[0].place, [bare, *(rest[1:] if first[:1] == "@" else rest)], expands="$%")


def _filesystem(draft: Draft, unit: _Unit) -> None:
    closed, fixed = _paths(draft, unit, "InaccessiblePaths"), _paths(draft, unit, "ReadOnlyPaths")
    readable = fixed + _bound(draft, unit, "BindReadOnlyPaths")
    writable = _paths(draft, unit, "ReadWritePaths") + _bound(draft, unit, "BindPaths")
    home, homes = unit.value("ProtectHome"), [SourcePath("ProtectHome", one, one) for one in _HOMES]
    if home in _YES or home == "tmpfs":
        closed += homes
    elif home == "read-only" or unit.value("DynamicUser") in _YES:
        fixed = fixed + homes
    closed += _hidden(draft, unit)
    other_root = next((key for key in ("RootDirectory", "RootImage") if unit.value(key) not in ("", "/")), "")
    if other_root:
        for one in (*readable, *writable):
            draft.narrower(one.place, f"{shown(one.written)} is not granted: {other_root} gives it another root")
        return
    draft.read += path_grants.granted(draft, "permissions.filesystem.read", readable, closed, write=False)
    # A path that is read-only wins over a writable one above it and on it, and not over one below it.
    for one in writable:
        below = [two for two in fixed if path_grants.within(two.path, one.path) or not two.exact]
        draft.write += path_grants.granted(draft, "permissions.filesystem.write", [one], [*closed, *below], write=True)
    draft.read = [one for one in draft.read if one not in draft.write]
    if draft.write:
        draft.narrower("ReadWritePaths", path_grants.WRITE_NOTE, path_grants.WRITE_LINE)
    for key, tree in _DIRECTORIES.items():
        for setting, word in unit.words(key):
            line = f'permissions.filesystem.write = ["volume:NAME:{tree}/{word}"]'
            draft.narrower(setting.place, f"{shown(word)} below {tree} is not granted: systemd makes it itself", line)


def _hidden(draft: Draft, unit: _Unit) -> list[SourcePath]:
    """Return the places where the unit sees other files than the host's."""
    out = []
    for key in ("PrivateTmp", "DynamicUser"):
        if unit.value(key) in (*_YES, "disconnected"):
            out += [SourcePath(key, one, one) for one in _TEMPORARY]
    for setting, word in unit.words("TemporaryFileSystem"):
        out.append(_path(draft, setting, word.partition(":")[0]))
    for key in ("BindPaths", "BindReadOnlyPaths"):
        for setting, word in unit.words(key):
            source, _, rest = word.removeprefix("-").partition(":")
            if rest and rest.split(":")[0] != source:
                out.append(_path(draft, setting, rest.split(":")[0]))
    return out


def _paths(draft: Draft, unit: _Unit, key: str) -> list[SourcePath]:
    return [_path(draft, setting, word) for setting, word in unit.words(key)]


def _bound(draft: Draft, unit: _Unit, key: str) -> list[SourcePath]:
    """Return the bound paths that keep their place."""
    found = []
    for setting, word in unit.words(key):
        source, _, rest = word.removeprefix("-").partition(":")
        if rest and rest.split(":")[0] != source:
            draft.narrower(setting.place, f"{shown(word)} is not granted: a path keeps its place")
        else:
            found.append(_path(draft, setting, source))
    return found


def _path(draft: Draft, setting: Setting, word: str) -> SourcePath:
    bare = word.lstrip("-+")
    if "+" in word[: len(word) - len(bare)] or "%" in bare or not bare.startswith("/"):
        # INVARIANT: a path that is not known may be any: as a denial it closes all, as an allowance nothing.
        draft.inexpressible(setting.place, f"{shown(word)} is known to systemd alone: its path depends on the unit")
        return SourcePath(setting.place, word, "/", exact=False)
    try:
        # A path of systemd is no pattern.
        paths.absolute(bare.rstrip("/") or "/")
    except PydanticCustomError:
        found = path_grants.read(draft, setting.place, bare)
        return SourcePath(setting.place, word, found.path, exact=found.exact)
    return SourcePath(setting.place, word, bare.rstrip("/"))


def _network(draft: Draft, unit: _Unit) -> None:
    allowed = unit.words("IPAddressAllow")
    families = [word for _, word in unit.words("RestrictAddressFamilies")]
    if not allowed:
        draft.narrower("", "no address is granted", 'resources.network = "outbound-https-only"')
        return
    if unit.value("PrivateNetwork") in _YES:
        draft.narrower("PrivateNetwork", "no address is granted: the unit has a network of its own")
        return
    found = list[str]()
    for setting, word in allowed:
        if word in _ANY:
            line = 'resources.network = "full"'
            draft.narrower(setting.place, f"{shown(word)} is not granted: it is every address, private ones too", line)
        elif word in ("localhost", "link-local", "multicast"):
            draft.narrower(setting.place, f"{shown(word)} is not granted: the agent has a network of its own")
        else:
            found += host_grants.blocks(draft, setting.place, [word])
    for host in found:
        if not _family(families, ":" in host):
            draft.narrower("RestrictAddressFamilies", f"{shown(host)} is not granted: its family is closed")
            continue
        draft.network += [(host, '["1-65535"]', "tcp"), (host, '["1-65535"]', "udp")]
    if draft.network:
        draft.narrower("IPAddressAllow", "addresses are granted by TCP and UDP, and to this agent's connections alone")


def _family(families: Sequence[str], v6: bool) -> bool:
    """Whether sockets of a family are allowed. A list is of allowed families, or with `~` of closed ones."""
    name = "AF_INET6" if v6 else "AF_INET"
    if not families:
        return True
    if any(word.startswith("~") for word in families):
        # A mixed list is read as if each of its words closed a family.
        return families[0].startswith("~") and name not in {word.lstrip("~") for word in families}
    return name in families


def _limits(draft: Draft, unit: _Unit) -> None:
    for key, name, convert in _LIMITS:
        if key in unit.last and unit.last[key].value:
            one = unit.last[key]
            number = convert(one.value, one.place)
            if number is None:
                draft.narrower(one.place, f"{shown(key)} has no end there: the manifest's own default holds", f"{name}")
            else:
                # Two settings may limit one thing: the lower holds.
                draft.limits[name] = min(number, draft.limits.get(name, number))


def _secrets(draft: Draft, unit: _Unit) -> None:
    for setting, word in unit.words("Environment"):
        name = word.partition("=")[0]
        line = f'[process] env = {{ {name} = "VALUE" }}, or [permissions.credentials] grants = ["{name}"]'
        draft.narrower(setting.place, f"variable {shown(name)} is not copied: its value may be a secret", line)
    for key in ("EnvironmentFile", "PassEnvironment"):
        for setting, word in unit.words(key):
            draft.narrower(setting.place, f"{shown(word)} is not read: {key} names variables elsewhere")
    for key in ("LoadCredential", "LoadCredentialEncrypted", "SetCredential", "SetCredentialEncrypted"):
        for setting in unit.lists.get(key, []):
            name = setting.value.partition(":")[0]
            line = f'[permissions.credentials] grants = ["{name}"]'
            draft.narrower(setting.place, f"credential {shown(name)} is not granted", line)


_Convert = Callable[[str, str], int | None]
_LIMITS: Final[tuple[tuple[str, str, _Convert], ...]] = (
    ("MemoryMax", "memory_mb", quantities.mebibytes),
    ("MemoryHigh", "memory_mb", quantities.mebibytes),
    ("MemorySwapMax", "swap_mb", quantities.swap_mebibytes),
    ("CPUQuota", "cpu_millis", quantities.cpu_share),
    ("CPUWeight", "cpu_weight", quantities.cpu_weight),
    ("TasksMax", "pids_max", quantities.tasks),
    ("LimitNPROC", "pids_max", quantities.tasks),
    ("LimitCPU", "cpu_time_ms", quantities.cpu_seconds),
    ("RuntimeMaxSec", "cpu_ms_per_task", quantities.span_ms),
)
_HANDLED: Final = frozenset(
    {"DynamicUser", "ProtectHome", "PrivateNetwork", "RootDirectory", "RootImage", *(k for k, _, _ in _LIMITS)}
)
