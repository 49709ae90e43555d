"""Look up what a session needs of this host: layers, its program, granted paths, volumes, secrets. Nothing is made.

Each refusal names the option or the word that asked, and the command that mends it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from covenant.session import package, typed
from policy import errors
from policy.compile.oci import SEARCH_PATH
from policy.layers import LayerRef
from policy.manifest import text
from policy.manifest.permissions import VOLUME, VOLUME_NAME

if TYPE_CHECKING:
    from covenant.session.profiles import Profile
    from sandbox.config import Config
    from sandbox.layers.store import LayerInfo, LayerStore


# Where the root of a session has files of its own, so that no workspace can be there.
_ROOT_PLACES = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/proc", "/run", "/sbin", "/sys"),
    *("/tmp", "/usr", "/var", "/workspace"),  # noqa: S108
)
_WORK = "/work"


def cores() -> int:
    """Return the number of processors that this process may use, which is what a run may be granted."""
    return len(os.sched_getaffinity(0))


def layers(state: Path, profile: Profile, named: Sequence[str]) -> list[tuple[LayerRef, tuple[str, ...]]]:
    """Return the layers of a session, the base first, each with its directories of programs.

    The layers of the profile are the newest of their names.

    Raises:
        errors.LayerError: Raised when the store lacks one, or a name means several.
    """
    from sandbox.layers.store import LayerStore

    store = LayerStore(state)
    known = store.listed()
    found = [_newest(known, name) for name in (profile.base, *profile.layers)]
    found += [_named(store, known, word) for word in named]
    by_digest = {one.digest: (LayerRef(name, one.digest), one.search) for name, one in reversed(found)}
    return [by_digest.pop(one.digest) for _, one in found if one.digest in by_digest]


def _newest(known: Sequence[LayerInfo], name: str) -> tuple[str, LayerInfo]:
    found = [one for one in known if name in one.names]
    if not found:
        raise errors.LayerError(
            f"the layer `{name}` of the profile is not in the store", hint=f"covenant layer build {_source_of(name)}"
        )
    return name, max(found, key=lambda one: one.made_ms)


def _named(store: LayerStore, known: Sequence[LayerInfo], word: str) -> tuple[str, LayerInfo]:
    name, at, _ = word.partition("@")
    same = [one for one in known if name in one.names]
    try:
        found = store.find(word)
    except errors.LayerError as e:
        e.message = f"--layer {text.quote(word)}: {e.message}"
        if at and same:
            e.hint = f"the store has {same[-1].ref()}: give that, or build the layer again from what it was made of"
        elif not same:
            names = sorted({other for one in known for other in one.names})
            near = text.nearest(name, tuple(names))
            e.hint = f"did you mean `{near}`? or: " if near else ""
            e.hint += f"covenant layer build {_source_of(name)}"
        raise
    return (name if name in found.names else found.names[-1]), found


def _source_of(name: str) -> str:
    """Return the words after `covenant layer build` for this name."""
    from sandbox.layers import presets

    return name if name in presets.PRESETS else f"{name} --from DIR (or: venv DIR, npm DIR, host-packages PACKAGE)"


def check_program(
    config: Config, refs: Sequence[LayerRef], options: package.Options, profile: Profile, program: str
) -> None:
    """Check that the root of a session has the program.

    Raises:
        errors.ProgramError: Raised when it has not.
        errors.LayerError: Raised when a layer was removed meanwhile.
    """
    from sandbox.host import started

    if "/" in program and not program.startswith("/"):
        started_by_env = f"start it by a program of the root: -- env {program}"
        raise errors.ProgramError(
            f"`{program}` is a path of this directory, and a session starts a program of its root",
            hint=started_by_env
            if options.workspace is not None
            else f"with --workspace . {started_by_env}; or, without it: covenant layer build NAME --from DIR "
            "--prefix /opt/NAME; then --layer NAME -- /opt/NAME/PROGRAM",
        )
    name = posixpath.normpath(program) if program.startswith("/") else program
    places = started.candidates(name, package.variables(profile, options).get("PATH", SEARCH_PATH))
    if any(started.of_layers(refs, place, config) for place in places):
        return
    others = _layers_with(config.state, refs, places)
    hint = f"add --layer {others[0]}, which has it" if others else _packed(program)
    raise errors.ProgramError(f"program `{program}` is not in {', '.join(one.name for one in refs)}", hint=hint)


def _packed(program: str) -> str:
    return (
        f"build a layer that has it: covenant layer build {posixpath.basename(program).lower() or 'NAME'} "
        "host-packages PACKAGE (or: --from DIR, venv DIR, npm DIR); then add --layer"
    )


def _layers_with(state: Path, refs: Sequence[LayerRef], places: Sequence[str]) -> list[str]:
    """Return the names of other layers of the store that have a program at one of these places."""
    from sandbox.layers.store import LayerStore

    store, here, found = LayerStore(state), {one.digest for one in refs}, []
    for info in store.listed():
        if info.digest not in here:
            wanted = (
                {*places, *(f"{folder}/{posixpath.basename(places[0])}" for folder in info.search)} if places else ()
            )
            if any(e.path in wanted and e.kind != "dir" for e in store.listing(info.ref())):
                found.append(info.names[-1])
    return found


def readable(path: str) -> str:
    """Return the absolute form of a path of ``--read``.

    Raises:
        errors.GrantedPathError: Raised when there is nothing at that path, or the session has a mount of its own there.
    """
    from sandbox.layers import sources

    place = os.path.abspath(path)
    covered = next((one for one in sources.COVERED if (place + "/").startswith(one)), "")
    if covered:
        raise errors.GrantedPathError(
            f"--read {text.quote(path)}: every session has a {covered.rstrip('/')} of its own",
            hint=f"move it; or covenant layer build NAME --from {place} --prefix /opt/NAME, then --layer NAME",
        )
    if not os.path.lexists(place):
        raise errors.GrantedPathError(
            f"--read {text.quote(path)}: there is nothing at `{place}`", hint="make it, or leave it out"
        )
    return place


def volume(path: str, state: Path) -> package.Volume:
    """Return what ``--write`` names: a directory that has a file system of its own, or ``volume:NAME:/place``.

    Raises:
        errors.VolumeError: Raised when there is no volume of that name.
        errors.GrantedPathError: Raised when there is no directory at that path.
        errors.NotEnforceableError: Raised when nothing bounds what can be written there.
    """
    from sandbox.rootfs import writable_size

    if path.startswith(VOLUME):
        from sandbox.volumes.store import VolumeStore

        return package.Volume(path, VolumeStore(state).find(path.split(":")[1], suggest=True).mb)
    place = os.path.abspath(path)
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        name, _, inside = path.partition(":")
        is_volume = inside.startswith("/") and VOLUME_NAME.fullmatch(name)
        hint = f"a volume is written --write {VOLUME}{path}" if is_volume else f"mkdir {place}"
        raise errors.GrantedPathError(f"--write {text.quote(path)}: {e.strerror}", hint=hint) from e
    try:
        limit = writable_size.of(fd, os.path.realpath(place))
    finally:
        os.close(fd)
    if limit.lacking:
        raise errors.NotEnforceableError(
            f"--write {text.quote(path)} has no bound: {limit.lacking}", hint=writable_size.MEND.replace("PATH", place)
        )
    return package.Volume(place, limit.mb)


def workspace(directory: Path, profile: Profile, never: Mapping[str, str]) -> package.Project:
    """Return a directory of the caller as the session's workspace: at its own path where the root has room for it.

    ``never`` are the paths that no manifest is granted, with their reasons.

    Raises:
        errors.UsageError: there is no such directory, or a manifest cannot name it.
        errors.WorkspaceError: it is more than a project: the root, a home, or a place that is never granted.
    """
    try:
        real = os.path.realpath(directory, strict=True)
    except OSError as e:
        raise errors.UsageError(
            f"--workspace {text.quote(str(directory))}: {e.strerror}", hint="give a directory that exists"
        ) from e
    from sandbox.workspace import repository

    _check_project(real, never)
    taken = any(real == one or real.startswith(f"{one}/") or one.startswith(f"{real}/") for one in _ROOT_PLACES)
    return package.Project(real, _WORK if taken else real, profile.disk_mb, repository.path_of(Path(real)))


def checkout(directory: Path, profile: Profile, never: Mapping[str, str]) -> tuple[package.Project | None, str]:
    """Return a directory as the session's workspace when it is a checkout of git that a run takes; else the reason.

    A directory without `.git` may hold what its user never meant to show, as a directory of keys or settings does.
    """
    try:
        owners = {os.stat(directory).st_uid, os.lstat(directory / ".git").st_uid}
    except OSError:
        return None, "this directory is no checkout of git"
    if len(owners) > 1:
        # As in /tmp, where another user could make one.
        return None, "`.git` of this directory belongs to another user than the directory"
    try:
        project = workspace(directory, profile, never)
        check_run_takes(project, never)
    except (errors.UsageError, errors.WorkspaceError, errors.NeverGrantableError, errors.KernelError) as e:
        return None, e.message
    return project, ""


def check_run_takes(project: package.Project, never: Mapping[str, str]) -> None:
    """Check what a run checks of its workspace, as its owner.

    Raises:
        errors.WorkspaceError: another file system, or an owner whose groups do not fit.
        errors.NeverGrantableError: no manifest is granted it.
    """
    from sandbox.workspace import caller, session

    terms = {"below": [one for one in (project.directory, project.repository) if one]}
    with contextlib.ExitStack() as held:
        fds = []
        for path in terms["below"]:
            try:
                fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            except OSError as e:
                raise errors.WorkspaceError(f"{text.quote(path)} cannot be opened: {e.strerror}") from e
            held.callback(os.close, fds[-1])
        info = os.fstat(fds[0])
        beside = fds[1] if len(fds) > 1 else -1
        given = session.GivenDirectory(fds[0], caller.of(info.st_uid, info.st_gid), repository=beside)
        session.check_repository(given, session.check(given, terms, never), terms, never)


def _check_project(real: str, never: Mapping[str, str]) -> None:
    from sandbox.rootfs import host_paths

    why = "it is the root of the file system" if real == "/" else ""
    if real in _homes(real):
        why = "it is a home directory, whose files start programs and hold keys"
    try:
        host_paths.check_never(real, never)
    except errors.NeverGrantableError as e:
        why = why or e.message
    if why:
        raise errors.WorkspaceError(
            f"{text.quote(real)} cannot be a workspace: {why}",
            hint="cd to the directory of a project, or give --workspace DIR; --no-workspace starts without one",
        )


def _homes(real: str) -> set[str]:
    """Return the homes of the caller, of the user that called sudo, and of the directory's owner."""
    import pwd

    found = {os.environ.get("HOME", "")}
    uids = {os.getuid(), os.stat(real).st_uid, *map(int, filter(str.isdecimal, [os.environ.get("SUDO_UID", "")]))}
    for uid in uids:
        with contextlib.suppress(KeyError, OverflowError):
            found.add(pwd.getpwuid(uid).pw_dir)
    return {os.path.realpath(home) for home in found if home}


def check_secrets(config: Config, agent_id: str, secrets: Sequence[typed.SecretWord]) -> None:
    """Check that the vault has each secret of a session.

    Raises:
        errors.SecretError: Raised when it lacks one.
        errors.VaultError: Raised when there is no vault, or it cannot be opened.
    """
    from sandbox.vault import open as vault_open

    if not secrets:
        return
    names = {one.name for one in vault_open.configured(config).entries(agent_id)}
    for one in secrets:
        if one.name not in names:
            raise errors.SecretError(
                f"--secret {one.name}: the vault has no secret of that name for `{agent_id}`",
                hint=f"covenant vault put {agent_id} {one.name} < FILE",
            )
