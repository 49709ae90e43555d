"""Collect the files that a program needs to run, by reading them and never by running it.

A closure is the interpreter, its loader, the libraries that DT_NEEDED names (transitively), and for an interpreter its
standard library: not the host's /usr. Every file must belong to root, be writable only by root and readable by all, so
that its copy in an agent's root reveals nothing. Modes are ours: 0755 for the program and the loader, 0644 for all
else, no setuid bit.

Left out on purpose: /etc (``local_names`` adds two files), certificates (``trust_anchors``), time zones, locales
other than C.UTF-8, dist-packages. An agent that needs one of them is granted it by path, in its manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path

from policy import errors
from policy.host import Closure
from sandbox.config import Config
from sandbox.rootfs import closure_cache, closure_files, elf, loader_patch

RUNTIMES = ("python3", "node")

_MAX_LIBRARIES = 512
_MAX_NAME = 255  # NAME_MAX of linux/limits.h

# The directories that Debian's and Ubuntu's loaders search without a cache (there is none in an agent's root).
_MULTIARCH = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
# glibc opens it by name when a thread ends (pthread_exit, pthread_cancel), so no DT_NEEDED shows it.
_ALSO_WITH = {"libc.so.6": ("libgcc_s.so.1",)}
# The C and C++ libraries that a compiled wheel may expect of any machine (manylinux2014, PEP 599), and so an addon of
# node. glibc keeps some of these names for old programs alone.
_EXPECTED = (
    *("libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1"),
    *("libstdc++.so.6", "libutil.so.1"),
)
# LANG is C.UTF-8 in every run, and Debian's C library reads it from here: a third of a megabyte.
_LOCALE = "/usr/lib/locale/C.utf8"
# Links of a merged /usr, so that #!-less lookups such as /bin/NAME and /lib/NAME keep their meaning.
_MERGED_USR = ("/bin", "/lib", "/lib64")

_PYTHON = re.compile(r"python3\.\d{1,3}")
_NOT_FOR_AGENTS = frozenset(
    {"dist-packages", "site-packages", "ensurepip", "idlelib", "lib2to3", "test", "tests", "tkinter", "turtledemo"}
)
# Tests of CPython itself, and two modules for what no agent has: NIS (which alone brings Kerberos) and /dev/dsp.
_NO_EXTENSION = re.compile(r"(_test|xx|_xx|_ctypes_test|nis\.|ossaudiodev)")
# Debian's node keeps parts of itself outside its binary and names them in it.
_NODE_PARTS = re.compile(rb"/usr/share/nodejs/[A-Za-z0-9._/-]{1,200}\.m?js")


def of_runtime(name: str, config: Config, *, libraries: Collection[str] = ()) -> Closure:
    """The closure of a language runtime on this host; remembered until one of its files changes.

    ``libraries`` are sonames that native modules of the package need. Those that this host has are added, each with
    what it needs itself.

    Raises:
        errors.HostError: the interpreter or something that it needs is missing or in other hands.
    """
    if name not in RUNTIMES:
        raise errors.HostError(f"there is no runtime `{name}`", hint="known: python3, node, rust-bin")
    path = getattr(config, name)

    def build(builder: closure_files.Builder) -> str:
        real = builder.add(str(path), mode=closure_files.PROGRAM_MODE)
        if name == "python3" and not _PYTHON.fullmatch(os.path.basename(real)):
            raise errors.HostError(f"`{path}` is not a Python 3 interpreter of a distribution", where=real)
        complete(builder, real)
        for soname in sorted({*_EXPECTED, *libraries}):
            _library(builder, soname)
        return real

    key = f"runtime-{name}"
    if libraries:
        key += "-" + hashlib.sha256("\0".join(sorted(libraries)).encode()).hexdigest()[:32]
    return _remembered(key, name, build, config, extra=str(path))


def needed_by(package: Mapping[str, bytes]) -> frozenset[str]:
    """Return the sonames that ELF files of a package need and that no file of the package has as its name.

    Raises:
        errors.ProgramError: they are more than a closure takes.
    """
    own = {os.path.basename(name) for name in package}
    needed = set[str]()
    for name, data in package.items():
        if data[:4] == b"\x7fELF":
            with contextlib.suppress(errors.NotElfError):
                needed |= set(elf.parse(data, name=name).needed) - own
        if len(needed) > _MAX_LIBRARIES:
            raise errors.ProgramError(f"the package needs more than {_MAX_LIBRARIES} libraries", where=name)
    return frozenset(needed)


def unloadable(package: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return each ELF file of a package that cannot be loaded on this host, with the reason in words.

    Raises:
        errors.ProgramError: as ``needed_by``.
    """
    builder, arch = closure_files.Builder(), os.uname().machine
    missing = {soname for soname in needed_by(package) if not _library(builder, soname)}
    found = []
    for name, data in sorted(package.items()):
        if data[:4] != b"\x7fELF":
            continue
        try:
            parsed = elf.parse(data, name=name)
        except errors.NotElfError as e:
            found.append((name, e.message))
            continue
        if parsed.arch != arch:
            found.append((name, f"it is built for {parsed.arch}, and this host is {arch}"))
            continue
        lacking = sorted(missing & set(parsed.needed))
        found += [(name, f"it needs library `{one}`, which neither the package nor this host has") for one in lacking]
    return found


def _library(builder: closure_files.Builder, soname: str) -> bool:
    """Add a library of the host with what it needs. Returns False, and adds nothing, where the host lacks one."""
    attempt = builder.fork()
    try:
        found = _find(attempt, soname, (), os.uname().machine)
        if found is None:
            return False
        _libraries(attempt, *found)
    except (errors.MissingLibraryError, errors.NotElfError):
        return False
    builder.adopt(attempt)
    return True


def of_elf(
    source: Path | bytes, config: Config, *, entry: str = "", siblings: Mapping[str, bytes] | None = None
) -> Closure:
    """The closure of one program: a granted executable by path, or a package's entry by its bytes.

    For bytes, ``entry`` is the program's path in the agent's root and the program itself is not part of the
    closure, since the package is mounted; a static program has an empty closure. ``siblings`` are the package's
    own libraries by base name. Its RPATH is not followed on the host: it is the package's word.

    Raises:
        errors.ProgramError: it is a script, for another machine, names an unknown loader or a library that is missing.
        errors.HostError: a file of the host that it needs is in other hands.
    """
    if isinstance(source, bytes):
        return _of_package(source, config, entry or "/workspace/entry", siblings or {})
    path = str(source)

    def build(builder: closure_files.Builder) -> str:
        real = builder.add(path, mode=closure_files.PROGRAM_MODE)
        head = builder.read(real)[:2]
        if head == b"#!":
            raise errors.ProgramError(
                f"executable `{path}` is a script", hint="grant the interpreter, and the script as a read path"
            )
        try:
            complete(builder, real)
        except errors.NotElfError as e:
            raise errors.ProgramError(f"executable `{path}` cannot be granted: {e.message}") from e
        return real

    return _remembered("elf-" + hashlib.sha256(path.encode()).hexdigest()[:32], path, build, config, extra=path)


def complete(builder: closure_files.Builder, real: str) -> None:
    """Add what the program at ``real`` needs beside itself.

    Raises:
        errors.NotElfError: it is a library, or names another loader.
    """
    parsed = elf.parse(builder.read(real), name=real)
    if not parsed.interpreter and (parsed.needed or (parsed.kind == elf.ET_DYN and not parsed.dynamic)):
        raise errors.NotElfError(f"`{real}` is a library, not a program")
    for link in _MERGED_USR:
        builder.add_link(link)
    _libraries(builder, parsed, real)
    if _PYTHON.fullmatch(os.path.basename(real)):
        _standard_library(builder, real, parsed.arch)
    if any(os.path.basename(p).startswith(("libnode.so", "node")) for p in builder.files):
        _node_parts(builder)


def _libraries(
    builder: closure_files.Builder, program: elf.Elf, real: str, siblings: Mapping[str, bytes] | None = None
) -> None:
    """Add the loader and every library that is needed, breadth first as the loader searches."""
    if program.interpreter:
        expected = loader_patch.LOADERS[program.arch]
        if program.interpreter != expected:
            raise errors.NotElfError(f"`{real}` names the loader `{program.interpreter}`, not `{expected}`")
        builder.add(expected, mode=closure_files.PROGRAM_MODE)
        if builder.resolve(_LOCALE, {}) is not None:
            for path in builder.tree(_LOCALE, skip=()):
                builder.add(path)
    package = siblings is not None
    queue: deque[tuple[elf.Elf, str, tuple[str, ...]]] = deque([(program, real, ())])
    seen: set[str] = set()
    while queue:
        parsed, at, inherited = queue.popleft()
        rpaths = inherited if parsed.runpath else (*expand(parsed.rpath, at), *inherited)
        search = () if package else expand(parsed.runpath, at) or rpaths
        optional = [extra for name in parsed.needed for extra in _ALSO_WITH.get(name, ())]
        for name in (*parsed.needed, *optional):
            if name in seen:
                continue
            seen.add(name)
            if len(seen) > _MAX_LIBRARIES:
                raise errors.NotElfError(f"`{real}` needs more than {_MAX_LIBRARIES} libraries")
            if siblings and name in siblings:
                queue.append((elf.parse(siblings[name], name=name), name, ()))
                continue
            found = _find(builder, name, search, program.arch)
            if found is not None:
                queue.append((*found, rpaths))
            elif name in parsed.needed:
                raise errors.MissingLibraryError(f"`{at}` needs library `{name}`, which this host does not have")
            else:
                seen.discard(name)  # only wished for: another file may need it


def expand(entries: tuple[str, ...], at: str) -> tuple[str, ...]:
    """Return the directories of a search path, with $ORIGIN filled in."""
    origin = os.path.dirname(at)
    expanded = (e.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for e in entries)
    # A relative entry would mean the agent's working directory, and the other variables have no fixed meaning.
    return tuple(os.path.normpath(e) for e in expanded if e.startswith("/") and "$" not in e)


def _find(builder: closure_files.Builder, name: str, search: tuple[str, ...], arch: str) -> tuple[elf.Elf, str] | None:
    if "/" in name:
        raise errors.NotElfError(f"library `{name}` is named by a path")
    if len(name) > _MAX_NAME:
        raise errors.NotElfError(f"a library has a name of {len(name)} characters")
    triple = _MULTIARCH[arch]
    system = (f"/lib/{triple}", f"/usr/lib/{triple}", "/lib", "/usr/lib", "/lib64", "/usr/lib64")
    for folder in (*search, *system):
        attempt = builder.fork()
        real = attempt.resolve(f"{folder}/{name}", {})
        if real is None or not os.path.isfile(builder.root + real):
            continue
        try:
            parsed = elf.parse(attempt.read(real), name=real)
        except errors.NotElfError:
            continue
        if parsed.arch == arch:
            builder.add(f"{folder}/{name}")
            return parsed, real
    return None


def _standard_library(builder: closure_files.Builder, real: str, arch: str) -> None:
    version = os.path.basename(real)
    top = f"{os.path.dirname(os.path.dirname(real))}/lib/{version}"
    tag = "cpython-" + version.removeprefix("python").replace(".", "")
    files = builder.tree(top, skip=_NOT_FOR_AGENTS)
    sources = {p for p in files if "/__pycache__/" not in p and "/config-" not in p}
    if f"{top}/os.py" not in sources:
        raise errors.HostError(f"`{real}` has no standard library at `{top}`", where=top)
    for path in sorted(sources):
        if path.endswith(".so"):
            if not _NO_EXTENSION.match(os.path.basename(path)):
                _extension_module(builder, path)
        elif path.endswith(".py"):
            builder.add(path)
            cached = f"{os.path.dirname(path)}/__pycache__/{os.path.basename(path)[:-3]}.{tag}.pyc"
            if cached in files and _is_current(builder, cached, path):
                builder.add(cached)
    # Any Python process of root may write byte code at any time, so byte code does not make a closure new.
    for path in [p for p in builder.watch if "__pycache__" in p or p.endswith(".py")]:
        del builder.watch[path]


def _extension_module(builder: closure_files.Builder, path: str) -> None:
    """Add a module of lib-dynload with its libraries, or nothing when the host lacks one of them."""
    attempt = builder.fork()
    try:
        attempt.add(path)
        _libraries(attempt, elf.parse(attempt.read(path), name=path), path)
    except errors.MissingLibraryError:
        return
    builder.adopt(attempt)


def _is_current(builder: closure_files.Builder, cached: str, source: str) -> bool:
    """Whether Python would take this byte code (PEP 552: flags, then the source's mtime and size)."""
    head = builder.read(cached)[:16]
    info = os.lstat(builder.root + source)
    flags, mtime, size = (int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12))
    return bool(flags & 1) or (mtime == int(info.st_mtime) & 0xFFFFFFFF and size == info.st_size & 0xFFFFFFFF)


def _node_parts(builder: closure_files.Builder) -> None:
    for real in [p for p in builder.files if os.path.basename(p).startswith("libnode.so")]:
        if builder.files[real].kind != "file":
            continue
        for match in sorted(set(_NODE_PARTS.findall(builder.read(real)))):
            path = match.decode("ascii")
            if ".." not in path and os.path.isfile(builder.root + path):
                builder.add(path)


def _of_package(data: bytes, config: Config, entry: str, siblings: Mapping[str, bytes]) -> Closure:
    if data[:2] == b"#!":
        raise errors.ProgramError(f"entry `{entry}` is a script", hint="runtime rust-bin takes an ELF program")
    try:
        parsed = elf.parse(data, name=entry)
        if parsed.arch != os.uname().machine:
            raise errors.NotElfError(f"`{entry}` is built for {parsed.arch}")
        if not parsed.interpreter:
            if parsed.needed:
                raise errors.NotElfError(f"`{entry}` is a library, not a program")
            return Closure("rust-bin", entry, ())

        def build(builder: closure_files.Builder) -> str:
            for link in _MERGED_USR:
                builder.add_link(link)
            _libraries(builder, parsed, entry, siblings)
            return entry

        identity = hashlib.sha256(data)
        for name, content in sorted(siblings.items()):
            identity.update(f"\0{name}\0".encode() + hashlib.sha256(content).digest())
        return _remembered(f"package-{identity.hexdigest()[:32]}", "rust-bin", build, config, extra=entry)
    except errors.NotElfError as e:
        raise errors.ProgramError(f"entry cannot be run: {e.message}", where=entry) from e


def _remembered(
    key: str, name: str, build: closure_cache.Build[closure_files.Builder], config: Config, *, extra: str
) -> Closure:
    cached = closure_cache.load(config.state, key, extra)
    if cached is not None:
        return cached
    builder = closure_files.Builder()
    try:
        entry = build(builder)
    except OSError as e:
        raise errors.HostError(f"a file of `{name}` cannot be read: {e.strerror}", where=str(e.filename)) from e
    made = builder.closure(name, entry)
    closure_cache.store(config.state, key, extra, made, builder.watch)
    return made
