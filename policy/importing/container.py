"""A container, as `docker run` and compose describe it, as a manifest.

Its image is not here: a manifest names a base by digest. What a container may do by default (write its own files,
reach every address, run as root of its namespace) is written nowhere, and so not granted.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from policy.importing import command_words, path_grants, quantities
from policy.importing.path_grants import SourcePath
from policy.importing.vocabulary import Context, Draft, shown
from policy.manifest.permissions import VOLUME_NAME

_OPTIONS_READ_ONLY: Final = frozenset({"ro", "readonly"})
# Without an effect on what may be written or read: labels of SELinux, propagation, caches.
_OPTIONS_NEUTRAL: Final = frozenset({"rw", "z", "Z", "private", "rprivate", "cached", "delegated", "consistent", ""})
_SCRATCH: Final = "/tmp"  # noqa: S108 - the agent's own, and no file of ours
NETWORKS_NONE: Final = "none"


class Said(Struct, frozen=True):
    """A word of the source with its place."""

    place: str
    value: str


class Container(Struct):
    """The words of a container that this import knows; each list in the order of the source."""

    image: Said | None = None
    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    volumes: list[Said] = field(default_factory=list)
    tmpfs: list[Said] = field(default_factory=list)
    variables: list[Said] = field(default_factory=list)
    ports: list[Said] = field(default_factory=list)
    memory: list[Said] = field(default_factory=list)
    cpus: list[Said] = field(default_factory=list)
    pids: list[Said] = field(default_factory=list)
    networks: list[Said] = field(default_factory=list)
    read_only: bool = False
    # Words by which a container leaves its confinement, and words without a meaning here.
    dangers: list[Said] = field(default_factory=list)
    others: list[Said] = field(default_factory=list)


def drafted(found: Container, context: Context, *, expands: str) -> Draft:
    """Return the draft of a container. ``expands`` are characters that the source itself replaces in its words.

    Raises:
        errors.ImportSourceError: a limit is malformed, or one that no manifest can hold.
    """
    draft = Draft(context)
    _program(draft, found, expands)
    for one in found.volumes:
        _volume(draft, one, expands, _hidden(draft, found))
    _overlaps(draft)
    _scratch(draft, found)
    _limits(draft, found)
    _network(draft, found)
    for one in found.variables:
        name = one.value.partition("=")[0]
        line = f'[process] env = {{ {name} = "VALUE" }}, or [permissions.credentials] grants = ["{name}"]'
        draft.narrower(one.place, f"variable {shown(name)} is not copied: its value may be a secret", line)
    for one in found.ports:
        line = '[[publish]] port = PORT, to = "127.0.0.1:PORT"'
        draft.narrower(one.place, f"port {shown(one.value)} is not published", line)
    for one in found.dangers:
        draft.refused(one.place, f"{shown(one.value)} is not granted: it opens the container to the machine")
    for one in found.others:
        draft.inexpressible(one.place, f"{shown(one.value)} has no meaning for this import")
    return draft


def _program(draft: Draft, found: Container, expands: str) -> None:
    words = [*found.entrypoint, *found.command]
    if found.image is not None:
        line = '[root] base = "NAME@sha256:DIGEST", as `covenant layer list` shows it'
        draft.inexpressible(found.image.place, f"the image {shown(found.image.value)} is not taken over", line)
    # A command alone may be the arguments of the image's own entry point, which is not known here.
    if not words or (not found.entrypoint and words[0].startswith("-")):
        draft.inexpressible("", "the program stands in the image", 'agent.entry = "PROGRAM"')
        return
    command_words.take(draft, "command", words, expands=expands)


def _hidden(draft: Draft, found: Container) -> list[SourcePath]:
    """Return the places of the container where a mount hides the host's files of this path."""
    out = []
    for one in found.volumes:
        source, _, rest = one.value.partition(":")
        target = rest.partition(":")[0] or source
        mine, theirs = (path_grants.read(draft, one.place, path) for path in (source, target))
        if not source.startswith(("/", ".", "~")) or not rest or mine.path != theirs.path:
            out.append(SourcePath(one.place, one.value, theirs.path, exact=theirs.exact))
    for one in found.tmpfs:
        place = path_grants.read(draft, one.place, one.value.partition(":")[0])
        out.append(SourcePath(one.place, one.value, place.path, exact=place.exact))
    return out


def _volume(draft: Draft, one: Said, expands: str, hidden: list[SourcePath]) -> None:
    source, _, rest = one.value.partition(":")
    target, _, options = rest.partition(":")
    if not rest:
        draft.narrower(one.place, f"{shown(one.value)} is not granted: it is a place without a source")
        return
    if set(one.value) & set(expands):
        draft.narrower(one.place, f"{shown(one.value)} is not granted: its words are replaced at the start")
        return
    words = set(options.split(","))
    odd = sorted(words - _OPTIONS_READ_ONLY - _OPTIONS_NEUTRAL)
    if odd:
        draft.narrower(one.place, f"{shown(one.value)} is not granted: the option {shown(odd[0])} is not known here")
        return
    write = not words & _OPTIONS_READ_ONLY
    if not source.startswith(("/", ".", "~")):
        _named(draft, one, source, target, write=write)
        return
    found = path_grants.read(draft, one.place, source)
    if found.exact and found.path != path_grants.read(draft, one.place, target).path:
        message = f"{shown(one.value)} is not granted: a path keeps its place"
        draft.narrower(one.place, message, f'permissions.filesystem.{"write" if write else "read"} = ["{found.path}"]')
        return
    key = f"permissions.filesystem.{'write' if write else 'read'}"
    wanted = draft.write if write else draft.read
    wanted += path_grants.granted(draft, key, [found], hidden, write=write)


def _named(draft: Draft, one: Said, name: str, target: str, *, write: bool) -> None:
    """A volume by its name. Ours has the same name and other contents, so it is a loss with its line."""
    line = f'permissions.filesystem.write = ["volume:{name}:{target}"]' if VOLUME_NAME.fullmatch(name) else ""
    draft.narrower(one.place, f"volume {shown(name)} is not granted: its files are in another store", line)


def _overlaps(draft: Draft) -> None:
    """Leave out each path to write with one that is read-only below it or on it."""
    for path in list(draft.write):
        closed = next((two for two in draft.read if path_grants.within(two, path)), None)
        if closed is not None:
            draft.write = [two for two in draft.write if two != path]
            draft.narrower("", f"{shown(path)} is not granted for writing: {shown(closed)} is read-only")
    # Of what is written, a part is read as well.
    draft.read = [one for one in draft.read if not any(path_grants.within(one, two) for two in draft.write)]
    if draft.write:
        draft.narrower("", path_grants.WRITE_NOTE, path_grants.WRITE_LINE)


def _scratch(draft: Draft, found: Container) -> None:
    for one in found.tmpfs:
        place, _, options = one.value.partition(":")
        if place.rstrip("/") != _SCRATCH:
            draft.narrower(one.place, f"{shown(place)} is not granted: /tmp is the one place of scratch")
            continue
        draft.scratch = True
        size = next((word.removeprefix("size=") for word in options.split(",") if word.startswith("size=")), "")
        if size and (number := quantities.mebibytes(size, one.place)) is not None:
            draft.limits["disk_mb"] = number
    if not found.read_only and not draft.scratch and not draft.write:
        draft.narrower("", "a file system that can be written is not granted", 'sandbox.filesystem = "ephemeral"')


def _limits(draft: Draft, found: Container) -> None:
    for name, words, convert in (
        ("memory_mb", found.memory, quantities.mebibytes),
        ("cpu_millis", found.cpus, quantities.cpus),
        ("pids_max", found.pids, quantities.tasks),
    ):
        for one in words:
            # Docker's words for no limit.
            number = None if one.value in ("0", "-1") else convert(one.value, one.place)
            if number is not None:
                draft.limits[name] = min(number, draft.limits.get(name, number))


def _network(draft: Draft, found: Container) -> None:
    for one in found.networks:
        if one.value == "host" or one.value.startswith("container:"):
            draft.refused(one.place, f"the network {shown(one.value)} is not granted: it is of others")
        elif one.value != NETWORKS_NONE:
            line = "[[permissions.network]], for each host that it needs"
            draft.narrower(one.place, f"the network {shown(one.value)} is not granted", line)
    if not found.networks:
        draft.narrower("", "no address is granted", 'resources.network = "outbound-https-only"')
