"""Read back what confines a running agent, and check that it is within the manifest.

    (1) the processes, their rights, namespaces and cgroups                     sandbox.attest.processes
        the tracers of their threads                                            sandbox.attest.tracers
        the files behind the agent's descriptors 0 to 2                         sandbox.attest.streams
    (2) gVisor's own filters of the sandbox and its gofer                       kernel.seccomp.reader
    (3) what is mounted, and that it is what was opened for it                  mountinfo of the gofer
        the file that has the root, where it is one                             sandbox.attest.root_file
        the images of volumes                                                   sandbox.attest.volumes
        that no mount of the host covers what is granted                        sandbox.rootfs.covered
        the record, the layers and the masked files of a workspace              sandbox.attest.workspace
    (4) limits, flags, bundle and rules, proved in place of the artefacts       policy.prove.live
    (5) the package's copy and the runsc binary, by digest
    (6) links, addresses, routes and members of the run's network namespaces    sandbox.attest.network

``ReferenceValues`` is what the supervisor made for a run. It is in the run's directory, which only root can enter, so
that another process can attest the run. ``covenant attest`` trusts only the signed log for the digest of the run's
policy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.decompile.live import Readout
from policy.leases.book import Lease
from policy.prove import live
from policy.prove.live import Layer, Standing
from sandbox.attest import cgroups, leases, processes, root_file, streams, tracers, volumes, workspace
from sandbox.attest import network as attest_network
from sandbox.attest.network_view import ListingCache, View
from sandbox.attest.processes import Family
from sandbox.attest.reference import ReferenceValues
from sandbox.kernel import libc, procfs, small_files
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.fs import filesystems, hanging
from sandbox.kernel.net import netns
from sandbox.kernel.procfs import Binary, Name
from sandbox.kernel.seccomp import reader
from sandbox.rootfs import covered
from sandbox.storage import json_cache, package_reader

# The file below ``closures`` of the state that remembers which filters a runsc binary loads.
FILTERS = "host-filters.json"
# The digest of the last binary, with the identity of its file.
BINARY = "binary.json"
_BESIDE: Final = ("process", "rights", "namespace", "cgroup", "filter", "mounts", "package", "network", "streams")
_BENEATH: Final = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS


@dataclass
class VerifierCache:
    """Cache of findings that cannot change unseen: files by identity, filters by process."""

    digests: dict[Binary, str] = field(default_factory=dict)
    filters: dict[Name, tuple[str, ...]] = field(default_factory=dict)
    packages: dict[str, tuple[object, str]] = field(default_factory=dict)
    network: ListingCache = field(default_factory=ListingCache)


class Examination(Struct, frozen=True):
    """Result of one examination.

    ``gone``: the sandbox did not exist or ended meanwhile, so there is no finding. ``missed``: the sandbox exists, but
    something to be read of it did not.
    """

    run_id: str
    layers: tuple[Layer, ...]
    gone: bool = False
    missed: bool = False

    @property
    def holds(self) -> bool:
        """Whether all that was examined is within the manifest."""
        return not self.gone and all(layer.holds for layer in self.layers)


class _LeftError(Exception):
    """Raised when the run is over during an examination; its result is not needed any more."""


def examine(
    made: ReferenceValues,
    artefacts: Artefacts,
    known: VerifierCache,
    *,
    state: Path,
    over: Callable[[], bool] = lambda: False,
) -> Examination:
    """Examine a run once. Remembers below ``state`` which filters a runsc binary loads.

    A run that is ``over`` counts as gone, and the examination stops at its next part.
    """
    report = _examine(made, artefacts, known, state=state, over=over)
    # Process ids may be reused during an examination. An object that a second one misses as well was removed.
    return _examine(made, artefacts, known, state=state, over=over) if report.missed else report


def _examine(
    made: ReferenceValues, artefacts: Artefacts, known: VerifierCache, *, state: Path, over: Callable[[], bool]
) -> Examination:
    gone = Examination(made.run_id, (), gone=True)
    if over():
        return gone
    # Another process (nft) makes the listing, which takes most of the time. The rest is read meanwhile.
    granted = leases.noted(made.directory)
    view = _viewed(made, known, state)
    found: Family | None = None
    try:
        members = _members(made)
        found = processes.family(made.runner, set().union(*members.values()))
        if found is None:
            return gone
        expected, mounts = _expected(made), procfs.mounts(found.gofer.name.pid)
        _go_on(over)
        readout = _readout(made, artefacts, found, mounts, expected, known, state)
        beside: list[Layer] = []
        for part in _beside(made, artefacts, found, members, mounts, expected, known, readout, state):
            _go_on(over)
            beside += part
        if made.network is not None and (network := view()) is not None:
            readout = structs.replace(readout, firewall=network.gateway.listing)
            family = {one.name.pid for one in found.all()}
            rules = artefacts.files["firewall.nft"]
            beside += attest_network.judge(made.network, network, rules, state=state, family=family)
            beside += _leased(made, artefacts, network, granted, known, state)
    except _LeftError:
        return gone
    except (OSError, errors.CovenantError) as e:
        failed = Layer("read-out", Standing.UNREADABLE, "a kernel that says what it holds", str(e))
        there = processes.still_there(found) if found else procfs.name(made.runner.pid) == made.runner
        missed = isinstance(e, FileNotFoundError | ProcessLookupError)
        return Examination(made.run_id, (failed,), missed=missed) if there else gone
    finally:
        # No thread outlives its examination; its findings are reported above.
        with contextlib.suppress(Exception):
            view()
    layers = {layer.name: layer for layer in live.compare(artefacts, readout)}
    beside_it = _BESIDE if made.root_file is None else (*_BESIDE, root_file.NAME)
    beside_it = beside_it if made.workspace is None else (*beside_it, workspace.NAME)
    layers |= {name: Layer(name, Standing.EQUAL) for name in beside_it if name not in layers}
    for layer in beside:
        if layers[layer.name].holds:
            layers[layer.name] = layer
    # Processes and files of an ending sandbox disappear one by one. It is drift only if the sandbox still exists.
    return Examination(made.run_id, tuple(layers.values())) if processes.still_there(found) else gone


def _beside(
    made: ReferenceValues,
    artefacts: Artefacts,
    found: Family,
    members: Mapping[str, set[int]],
    mounts: tuple[procfs.ProcessMount, ...],
    expected: processes.Expected,
    known: VerifierCache,
    readout: Readout,
    state: Path,
) -> Iterator[Iterator[Layer]]:
    """(1), (2), (3), (5): yield the findings that no artefact describes, part by part."""
    # The cgroups' lists before the processes' lists: a thread born in between is in no list and is read by itself.
    expected = structs.replace(expected, threads=_threads(made))
    yield processes.judge(found, expected, members)
    yield judge_filters(found, known, readout, made.nice, state / "closures" / FILTERS)
    yield tracers.judge(found, () if made.network is None else made.network.bounded)
    yield streams.judge(found.sandbox, found.gofer, made.streams)
    yield cgroups.judge(made.cgroup_files.values(), "the run")
    yield cgroups.scheduled({task for one in found.all() for task in procfs.threads(one.name.pid)})
    yield _identities(made, found, mounts)
    if made.root_file is not None:
        yield root_file.judge(made.root_file, found.sandbox.name.pid, known.digests)
    if made.volumes:
        yield volumes.judge(made.volumes, found.gofer.name.pid)
    yield _covered(made, artefacts, mounts)
    if made.workspace is not None:
        terms = artefacts.json("mounts.json")["workspace"]
        yield workspace.judge(made.workspace, terms, mounts, found.gofer.name.pid, made.uid)
    yield _package(made, artefacts, known)


def _leased(
    made: ReferenceValues,
    artefacts: Artefacts,
    network: View,
    granted: tuple[Lease, ...],
    known: VerifierCache,
    state: Path,
) -> tuple[Layer, ...]:
    """(4) Check that asked names have addresses under a lease alone; ``granted`` is older than ``network``."""
    assert made.network is not None
    gates = artefacts.json("gates.json")
    found = tuple(leases.judge(gates, network.gateway.listing, (*granted, *leases.noted(made.directory))))
    if found:
        # An element that expires by itself is no transaction: the listing may be an old one.
        known.network.listings.pop("gateway", None)
        granted, again = leases.noted(made.directory), attest_network.view(made.network, known.network, state=state)
        found = tuple(leases.judge(gates, again.gateway.listing, (*granted, *leases.noted(made.directory))))
    return found


def _go_on(over: Callable[[], bool]) -> None:
    if over():
        raise _LeftError


def _viewed(made: ReferenceValues, known: VerifierCache, state: Path) -> Callable[[], View | None]:
    """Begin to examine the run's network. The returned function waits for the view; it is None without a network."""
    network = made.network
    if network is None:
        return lambda: None
    return netns.aside(lambda: attest_network.view(network, known.network, state=state))


def _expected(made: ReferenceValues) -> processes.Expected:
    inode = None if made.network is None else made.network.agent.inode
    return processes.Expected(made.places, made.memberships, inode)


def _members(made: ReferenceValues) -> dict[str, set[int]]:
    """Return the processes in the run's cgroups by controller. On version 2 all controllers share one cgroup."""
    found: dict[str, set[int]] = {}
    for controller, directory in made.cgroup_files.items():
        if controller not in made.memberships and "" in found:
            continue
        text = small_files.whole(f"{directory}/cgroup.procs")
        found[controller if controller in made.memberships else ""] = {int(line) for line in text.split()}
    return found


def _threads(made: ReferenceValues) -> dict[str, set[int]]:
    """Return the threads in the run's cgroups by controller. Empty on version 2: a process has one cgroup there."""
    found = {}
    for controller in made.memberships:
        if directory := made.cgroup_files.get(controller):
            text = small_files.whole(f"{directory}/tasks")
            found[controller] = {int(line) for line in text.split()}
    return found


def _readout(
    made: ReferenceValues,
    artefacts: Artefacts,
    found: Family,
    mounts: tuple[procfs.ProcessMount, ...],
    expected: processes.Expected,
    known: VerifierCache,
    state: Path,
) -> Readout:
    return Readout(
        run_id=made.run_id,
        uid=made.uid,
        config=Path(made.directory, "bundle", "config.json").read_bytes(),
        flags=processes.flags(found, expected),
        runsc_sha256=_digest(found.sandbox.name.pid, known, state),
        cgroup_version=made.cgroup_version,
        limits=dict(_limits(made, artefacts)),
        mounts={mount.place: mount.options for mount in mounts},
        arguments=made.arguments,
        image=made.image,
    )


def _limits(made: ReferenceValues, artefacts: Artefacts) -> Iterator[tuple[str, str | None]]:
    """Yield each file of the policy with its content; the policy's value if it holds what was written."""
    for entry in artefacts.json("cgroup.json")[f"v{made.cgroup_version}"] or ():
        name = entry["file"]
        directory = made.cgroup_files.get(entry["controller"])
        try:
            held = None if directory is None else small_files.whole(f"{directory}/{name}").decode().strip()
        except OSError:
            held = None
        yield name, entry["value"] if held is not None and cgroup.same(held, made.limits.get(name, "")) else held


def _identities(made: ReferenceValues, found: Family, mounts: tuple[procfs.ProcessMount, ...]) -> Iterator[Layer]:
    """(3) Check that each place has exactly one mount, of the file or directory that was opened for it."""
    places = [mount.place for mount in mounts]
    for place in sorted({place for place in places if places.count(place) > 1}):
        yield Layer("mounts", Standing.WIDER, f"one mount at {place}", "one over another")
    root = os.open(f"/proc/{found.gofer.name.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for place, identity in made.mounts.items():
            at = _identity(root, place)
            if at != identity:
                yield Layer("mounts", Standing.WIDER, f"at {place} what was opened for it", "another file or directory")
    finally:
        os.close(root)


def _covered(made: ReferenceValues, artefacts: Artefacts, mounts: tuple[procfs.ProcessMount, ...]) -> Iterator[Layer]:
    """(3) Check that no mount of the host covers a granted path, by the mount table of the run's shim."""
    if made.granted:
        table = small_files.text(f"/proc/{procfs.parent(made.runner.pid)}/mountinfo")
        plan = artefacts.json("mounts.json")["mounts"]
        roots = {mount.place: mount.root for mount in mounts}
        for path, point in covered.found(plan, made.granted, [*filesystems.mounts(table)], roots):
            yield Layer("mounts", Standing.WIDER, f"on the host no mount over or in {path}", f"one at {point}")


def _identity(root: int, place: str) -> tuple[int, int] | None:
    if place == "/":
        info = os.fstat(root)
        return info.st_dev, info.st_ino
    with hanging.within(f"the file system of what the agent has at `{place}`"):
        try:
            fd = libc.openat2(place.lstrip("/"), os.O_PATH | os.O_NOFOLLOW, dir_fd=root, resolve=_BENEATH)
        except OSError:
            return None
        info = os.fstat(fd)
    os.close(fd)
    return info.st_dev, info.st_ino


def _digest(pid: int, known: VerifierCache, state: Path) -> str:
    """(5) Return the SHA-256 of the file that a process executes. It is computed once for each file."""
    fd, binary = procfs.open_binary(pid)
    with os.fdopen(fd, "rb") as stream:
        if binary not in known.digests:
            path, which = state / "closures" / BINARY, list(structs.astuple(binary))
            held = json_cache.read(path) or {}
            if held.get("which") != which:
                held = {"which": which, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
                json_cache.write(path, held)
            known.digests[binary] = str(held["sha256"])
    return known.digests[binary]


def judge_filters(found: Family, known: VerifierCache, readout: Readout, nice: int, path: Path) -> Iterator[Layer]:
    """(2) Check that gofer and sandbox have the filters that this runsc, with these flags, loaded before.

    Filters of runsc's caller come first: every child inherits them and none can remove them. They are not compared.
    """
    # gVisor's filter contains the number of its control socket. It follows one descriptor for each mount and the log.
    before_it = (
        len(readout.mounts)
        + bool(readout.image)
        + any(one.startswith("--debug-log-fd=") for one in found.sandbox.arguments)
    )
    made_for: list[object] = ["own", readout.runsc_sha256, sorted(readout.flags), before_it, os.uname().release]
    if readout.image:
        made_for.append("erofs")
    if nice:
        made_for.append(nice)  # the filter allows setpriority(2) with this number as well
    key = hashlib.sha256(json.dumps(made_for).encode())
    remembered: dict[str, Any] = json_cache.read(path) or {}
    before = remembered.get(key.hexdigest())
    now: dict[str, list[str]] = {}
    for process in (found.gofer, found.sandbox):
        # A tracer may have suspended the filters since they were read (PTRACE_O_SUSPEND_SECCOMP). Reading them again
        # waits for a tracer that only reads.
        kept = None if process.tracer else known.filters.get(process.name)
        digests = kept or reader.digests(process.name.pid)
        if not kept and procfs.name(process.name.pid) != process.name:
            raise ProcessLookupError(process.name.pid)  # the process id may have been reused before the read
        if digests is None:
            return  # (1) checks that there is a filter; this kernel cannot show its content, or not now
        if len(digests) > found.runner.filters:  # otherwise it has not loaded its own yet, and is read again
            known.filters[process.name] = digests
        now[process.arguments[0]] = list(digests[found.runner.filters :])
    # INVARIANT: never remember a sandbox that has not loaded its own yet. The entry is used for every later run.
    if before is None and all(now.values()):
        json_cache.write(path, {**remembered, key.hexdigest(): now})
    for name, loaded in now.items():
        if before is not None and before.get(name) != loaded:
            yield Layer("filter", Standing.WIDER, f"{name} under {before.get(name)}", f"{loaded}")


def _package(made: ReferenceValues, artefacts: Artefacts, known: VerifierCache) -> Iterator[Layer]:
    """(5) Check that the running copy is the package that was signed."""
    expected = str(artefacts.json("effective.json")["package_digest"])
    state = tuple(_tree(made.package))
    before = known.packages.get(made.package)
    if before is None or before[0] != state:
        try:
            digest = package_reader.read(Path(made.package)).digest
        except errors.PackageError as e:
            digest = e.message
        before = known.packages[made.package] = (state, digest)
    if before[1] != expected:
        yield Layer("package", Standing.WIDER, f"the package {expected}", before[1])


def _tree(top: str) -> Iterator[tuple[object, ...]]:
    for path, directories, plain in os.walk(top):
        directories.sort()
        for name in (".", *sorted(plain)):
            info = os.lstat(os.path.join(path, name))
            yield path, name, info.st_ino, info.st_mode, info.st_size, info.st_ctime_ns
