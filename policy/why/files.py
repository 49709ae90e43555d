"""Questions about files: may the agent open this path, may it start this program?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from policy import data, errors, symlinks
from policy.compile.mounts import ANCHORS
from policy.decompile import conditions
from policy.decompile.config import INIT, SSH_RELAY
from policy.decompile.mounts import OWN_LIMITS, RESOLVER, SHARED_MEMORY, ReadWorkspace
from policy.decompile.read import Grants
from policy.grants import paths
from policy.grants.effective import Effective
from policy.host import Closure
from policy.manifest import text
from policy.manifest.permissions import VolumeGrant
from policy.rules import never
from policy.why.ask import LayerAnswer, Sight, toml
from policy.why.hints import SHARED_MB
from policy.workspace import globs

WORKSPACE, SCRATCH = "/workspace", "/tmp"  # noqa: S108 - of the agent's own root
# What gVisor shows in every sandbox, with nothing of the host in it; and what of it an agent can write, as a
# sandbox was seen to have it (tests/kernel/test_why_and_the_sandbox.py).
_OWN = {"/proc": "gVisor's own processes", "/dev": "gVisor's own devices"}
_OWN_WRITABLE = re.compile(
    r"/dev/(full|fuse|null|ptmx|random|std(in|out|err)|tty|urandom|zero|(fd|pts)/[0-9]+)"
    r"|/proc/(self|thread-self|[0-9]+)/(task/[0-9]+/)?(comm|oom_score_adj|[ug]id_map|fd/[0-9]+)"
)
# Of these, what is a file by its name: nothing lies below one. What fd/N leads to may be a directory.
_OWN_FILE = re.compile(
    r"/dev/(full|fuse|kmsg|null|ptmx|random|tty|urandom|zero|pts/[0-9]+)"
    r"|/proc/(self|thread-self|[0-9]+)/(task/[0-9]+/)?(comm|environ|oom_score_adj|[ug]id_map)"
)
# Files of every root (sandbox.rootfs.local_names, identity_files), and what each says.
OWN_FILES = {
    "/etc/hosts": "that localhost is the loopback",
    "/etc/nsswitch.conf": "that localhost is the loopback",
    "/etc/passwd": "that the agent's uid has the name agent",
    "/etc/group": "that the agent's gid has the name agent",
}
_OWN_LIMITS = (f"{OWN_LIMITS}/policy.json", f"{OWN_LIMITS}/denials.jsonl")
_COVERED = ("/dev/net", "/sys")


class Open(Struct, frozen=True):
    """Open a path of the agent's root, which for granted paths is that of the host."""

    path: str
    write: bool = False

    def __post_init__(self) -> None:
        try:
            paths.check_normalised(self.path)
        except errors.ManifestError as e:
            raise errors.UsageError(e.message, hint=e.hint) from None

    def describe(self) -> str:
        """The path, and how."""
        return f"open {text.visible(self.path)} to {'write' if self.write else 'read'}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the mount that the path lies on; the innermost decides, as in the kernel."""
        real = Open(_resolved(self.path, sight), self.write)
        place, allowed, what = max(real._mounts(sight), key=lambda mount: len(mount[0]))
        return LayerAnswer(allowed, what, f"mounts.json:{place}")

    def _mounts(self, sight: Sight) -> Iterator[tuple[str, bool, str]]:
        """Each mount that holds the path: its place, whether the path can be opened so, and why."""
        read = not self.write
        yield "/", *self._in_root(sight)
        yield from self._in_own(read=read)
        for place in _COVERED:
            if _within(self.path, place):
                # The mount itself is there to be opened, and nothing is in it.
                yield place, read and self.path == place, f"{place} is covered by an empty mount"
        if _within(self.path, SHARED_MEMORY):
            yield SHARED_MEMORY, *self._in_shared_memory(sight, read=read)
        if _within(self.path, WORKSPACE):
            yield WORKSPACE, *self._in_package(sight)
        if _within(self.path, SCRATCH):
            size = sight.found.seen.scratch_mb
            held = size is not None or (read and self.path == SCRATCH)
            yield SCRATCH, held, _scratch(size)
        if _within(self.path, OWN_LIMITS):
            held = read and self.path in (OWN_LIMITS, *_OWN_LIMITS)
            yield OWN_LIMITS, held, f"{OWN_LIMITS} has the agent's own limits and denials, read-only"
        if sight.found.seen.resolver and self.path == RESOLVER:
            yield RESOLVER, read, "it names the gateway as the one to ask for names, read-only"
        yield from self._in_grants(sight, read=read)

    def _in_grants(self, sight: Sight, *, read: bool) -> Iterator[tuple[str, bool, str]]:
        """The mounts of the caller's directory and of granted paths."""
        grants, callers = sight.found.grants.filesystem, sight.found.seen.workspace
        if callers is not None and _within(self.path, callers.place):
            yield callers.place, *self._in_workspace(callers)
        for volume in sight.found.seen.volumes:
            if _within(self.path, volume.place):
                yield volume.place, True, f"it is in the volume {volume.name}, mounted to read and write"
        for place in grants.read:
            if _within(self.path, place):
                yield self._granted(sight, place, read, f"{text.visible(place)} is mounted read-only")
        for place in grants.write:
            if _within(self.path, place):
                yield self._granted(sight, place, True, f"{text.visible(place)} is mounted to read and write")

    def _granted(self, sight: Sight, place: str, held: bool, because: str) -> tuple[str, bool, str]:
        if self.path != place and sight.found.seen.granted.get(place) == "file":
            return place, False, _no_directory(place)
        return place, held, because

    def _in_own(self, *, read: bool) -> Iterator[tuple[str, bool, str]]:
        for place, what in _OWN.items():
            if not _within(self.path, place):
                continue
            if file := next((above for above in _above(self.path) if _OWN_FILE.fullmatch(above)), None):
                yield place, False, _no_directory(file)
                continue
            held = read or _OWN_WRITABLE.fullmatch(self.path) is not None
            yield place, held, f"{place} shows {what}, and nothing of the host" + ("" if held else ", read-only")

    def _in_root(self, sight: Sight) -> tuple[bool, str]:
        read = not self.write
        for closure in _closures(sight):
            if closure.below(self.path) is not None or any(f.path == self.path for f in closure.files):
                return read, f"it belongs to the closure of {text.visible(closure.name)}, in a read-only root"
        if sight.anchors and self.path in ANCHORS:
            return read, "it has the trust anchors of this host, in a read-only root"
        if self.path in OWN_FILES:
            return read, f"it says {OWN_FILES[self.path]}, in a read-only root"
        if self.path == INIT and sight.found.init:
            return read, "it starts the agent, in a read-only root"
        if self.path == SSH_RELAY and sight.found.relay:
            return read, "it serves the socket of the ssh-agent service, in a read-only root"
        own = (*([INIT] if sight.found.init else []), *(ANCHORS if sight.anchors else ()))
        there = (*sight.found.seen.mounted, *OWN_FILES, *own)
        below = next((place for place in there if _within(place, self.path)), None)
        if below is not None:
            return read, f"it is an empty directory of a read-only root, but for what leads to {text.visible(below)}"
        return False, "it is not in the agent's root, so it does not exist there"

    def _in_shared_memory(self, sight: Sight, *, read: bool) -> tuple[bool, str]:
        if size := sight.found.seen.shared_mb:
            return True, f"{SHARED_MEMORY} is shared memory of {size} MiB, thrown away with the run"
        return read and self.path == SHARED_MEMORY, f"{SHARED_MEMORY} is covered by an empty mount"

    def _in_package(self, sight: Sight) -> tuple[bool, str]:
        name = self.path.removeprefix(WORKSPACE).lstrip("/")
        if self.write:
            return False, "the package is mounted read-only"
        held = not name or any(_within(f"/{file}", f"/{name}") for file in sight.files)
        return held, "the package is mounted there" if held else "the package has no such file"

    def _in_workspace(self, callers: ReadWorkspace) -> tuple[bool, str]:
        path = self.path.removeprefix(callers.place).lstrip("/")
        if path and globs.matching(callers.mask)(path):
            return (
                not self.write,
                "it is masked: the agent sees an empty file, and its own of that name is never applied",
            )
        if path and globs.matching(callers.protect)(path):
            return True, "it is in the workspace, and protected: a change of it is never applied"
        after = ", which an operator has to approve" if callers.apply == "operator" else ""
        after = "; the manifest says that it is never applied" if callers.apply == "never" else after
        return True, f"it is in the workspace: a change of it waits for `covenant workspace apply`{after}"

    def granted(self, grants: Grants | Effective) -> bool:
        """By the filesystem domain."""
        if self._in_memory():
            return grants.filesystem.mode != "read-only-package"
        volumes = map(VolumeGrant.of, grants.filesystem.volumes.listing())
        if any(_within(self.path, one.place) for one in volumes):
            return True
        held = grants.filesystem.write if self.write else grants.filesystem.readable()
        return held.covers(self.path)

    def _in_memory(self) -> bool:
        """Whether it asks for the scratch, or for shared memory: both come with a file system that can be written."""
        return _within(self.path, SHARED_MEMORY) or (self.write and _within(self.path, SCRATCH))

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The list of the path, with the mode that writing needs."""
        if _within(self.path, SHARED_MEMORY):
            return self._shared_memory(sight)
        if not self.write:
            return "[permissions.filesystem]", f"read = [{toml(self.path)}]"
        mode = sight.found.grants.filesystem.mode
        if _within(self.path, SCRATCH):
            return "[sandbox]", 'filesystem = "ephemeral"'
        change = () if mode == "host" else ("[sandbox]", 'filesystem = "host"')
        return (*change, "[permissions.filesystem]", f"write = [{toml(self.path)}]")

    def _shared_memory(self, sight: Sight) -> tuple[str, ...]:
        """The size of shared memory, and as much more of disk_mb: /tmp keeps its size."""
        grants = sight.found.grants
        change = () if grants.filesystem.mode != "read-only-package" else ('filesystem = "ephemeral"',)
        disk_mb = (grants.resources.disk_mb or 0) + SHARED_MB
        return "[sandbox]", *change, f"dev_shm_mb = {SHARED_MB}", "[resources]", f"disk_mb = {disk_mb}"

    def never(self, sight: Sight) -> str:
        """The data file's trees, those of this host, what is the agent's own place, and what no tree has."""
        if _within(self.path, SHARED_MEMORY):
            return ""
        if _within(self.path, WORKSPACE):
            return "a package is what was signed: nothing writes to it" if self.write else ""
        granted = sight.found.seen.granted
        if file := next((above for above in _above(self.path) if granted.get(above) == "file"), None):
            return _no_directory(file)
        refusal = never.refusal(self.path, data.never_grantable(), sight.never or {}, write=self.write)
        return "" if refusal is None else refusal.message


class Execute(Struct, frozen=True):
    """Start a program file."""

    path: str

    def __post_init__(self) -> None:
        Open(self.path)

    def describe(self) -> str:
        """The program."""
        return f"start {text.visible(self.path)}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the filter, and by which files of the root can be started."""
        if sight.found.calls.condition("execve") == conditions.NEVER:
            return LayerAnswer(False, "the filter refuses execve: no program can be started", "seccomp.bpf:default")
        seen, real = sight.found.seen, _resolved(self.path, sight)
        for program in seen.programs:
            if self.path == program.name or real == program.entry:
                rule = f"mounts.json:closure/{program.name}"
                return LayerAnswer(True, f"it is granted, with content sha256:{program.sha256}", rule)
        if real in (seen.runtime.entry, sight.found.args[0]):
            because = "it is the runtime of the agent, which can be started again beside a granted program"
            return LayerAnswer(True, because, f"mounts.json:closure/{seen.runtime.name}")
        if real == INIT and sight.found.init:
            because = "it is the init of the run, which starts what its arguments name and nothing more"
            return LayerAnswer(True, because, "config.json:process/init")
        if real == SSH_RELAY and sight.found.relay:
            because = "it is the relay of the ssh-agent service, which starts what its arguments name and nothing more"
            return LayerAnswer(True, because, "config.json:process/ssh-relay")
        callers = seen.workspace
        if callers is not None and callers.programs and _within(real, callers.place):
            return LayerAnswer(True, "every program of the workspace can be started", f"mounts.json:{callers.place}")
        for volume in seen.volumes:
            if volume.programs and _within(real, volume.place):
                because = "every program of the workspace can be started"
                return LayerAnswer(True, because, f"mounts.json:{volume.place}")
        return LayerAnswer(False, "nothing else in the root is executable", "mounts.json:closure")

    def granted(self, grants: Grants | Effective) -> bool:
        """By the executables domain, with any content."""
        return grants.executables.any or self.path in grants.executables.paths

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The list of programs."""
        return "[permissions.executables]", f"allow = [{toml(self.path)}]"

    def never(self, sight: Sight) -> str:
        """A file that may not be read may not be started; the package's own files are never granted programs."""
        if _within(self.path, WORKSPACE):
            return "a file of the package is started as the entry, or not at all"
        return Open(self.path).never(sight)


def _closures(sight: Sight) -> Iterator[Closure]:
    """Those that are in the agent's root, of all that this host has."""
    seen = sight.found.seen
    names = {seen.runtime.name, *(program.name for program in seen.programs)}
    return (closure for closure in sight.closures if closure.name in names)


def _resolved(path: str, sight: Sight) -> str:
    """The path with the links of the agent's root followed, such as ``/bin`` to ``/usr/bin``."""
    links = {file.path: file.target for one in _closures(sight) for file in one.files if file.kind == "symlink"}
    return symlinks.follow(path, {**links, **sight.found.seen.links}) or path


def _above(path: str) -> Iterator[str]:
    """The directories that the path lies in, by its name, without ``/``; the innermost first."""
    while (path := path.rpartition("/")[0]) != "":
        yield path


def _no_directory(file: str) -> str:
    return f"{text.visible(file)} is a file, and nothing lies below a file (ENOTDIR)"


def _within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it, by component."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _scratch(size_mb: int | None) -> str:
    if size_mb is None:
        return f"{SCRATCH} is covered by an empty mount"
    return f"{SCRATCH} is a scratch of {size_mb} MiB, thrown away with the run"
