"""Facts beside the grants: the package and its entry, the host's runtime and programs, the runsc binary.

None of them is a grant, so comparing grants cannot show a fault in them. The compiler has these facts and hands them to
the proof. For artefacts in a directory there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from msgspec import Struct

from policy import data, errors, symlinks
from policy.decompile.documents import shown
from policy.decompile.read import Decompiled
from policy.host import Closure, HostFacts
from policy.manifest.agent import Manifest
from policy.manifest.process import inject_variables


class Facts(Struct, frozen=True):
    """The facts that artefacts must name. Digests are hex SHA-256.

    ``closures`` maps the runtime (a word) and each granted program (a path) to its closure; ``kinds`` each granted
    path to ``file`` or ``dir``; ``args`` starts the agent; by ``secret_files`` what is granted of secrets is files.
    ``stack`` is whose network stack the operator has agents with a network use. ``env``, ``cwd``, ``contract`` and
    ``layers`` are the manifest's, ``variables`` those that it writes, ``shared_mb`` its size of /dev/shm. ``links`` are
    the links of the host that granted paths lead through. ``workspace`` are the terms of the caller's directory: its
    place, MiB, where it may lie, what is masked and protected, and how it is applied. None without one.
    ``placeholders`` are the hosts at which the gate adds a secret, each with the variable of its placeholder.
    """

    arch: str
    package_digest: str
    args: tuple[str, ...]
    runtime: str
    runsc: tuple[str, str] | None
    closures: Mapping[str, Closure] = msgspec.field(default_factory=dict)
    kinds: Mapping[str, str] = msgspec.field(default_factory=dict)
    rooms: Mapping[str, int] = msgspec.field(default_factory=dict)
    secret_files: bool = False
    stack: str = "sandbox"
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    cwd: str = "/workspace"
    contract: str = "line"
    layers: tuple[tuple[str, str], ...] = ()
    shared_mb: int = 0
    links: Mapping[str, str] = msgspec.field(default_factory=dict)
    workspace: tuple[object, ...] | None = None
    placeholders: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, host: HostFacts, package_digest: str) -> Facts:
        """The facts of a manifest on a host."""
        agent = manifest.agent
        runtime = host.runtimes.get(agent.runtime)
        process = manifest.process
        started = (f"/workspace/{agent.entry}",) if runtime is None or agent.runtime == "rust-bin" else (runtime.entry,)
        script = (agent.entry,) if runtime is not None and agent.runtime in ("python3", "node") else ()
        return cls(
            host.arch,
            package_digest,
            (*started, *script, *process.args),
            agent.runtime,
            None if host.runsc is None else (host.runsc.version, host.runsc.sha256),
            {**host.runtimes, **host.executables},
            {found.place: found.kind for found in host.granted.values()},
            {**{path: found.room_mb for path, found in host.granted.items()}, **_volumes(manifest, host)},
            manifest.permissions.credentials.files,
            host.network.stack,
            dict(process.env),
            process.cwd,
            process.contract,
            tuple((one.name, one.digest) for one in manifest.root.stack),
            manifest.sandbox.dev_shm_mb,
            {link: target for found in host.granted.values() for link, target in found.links},
            _workspace(manifest),
            manifest.permissions.placeholders,
        )

    def environment(
        self, own: tuple[str, ...], injected: Collection[str] = (), *, ssh: bool = False, telemetry: bool = False
    ) -> list[str]:
        """The variables that the first process must have: those of ``own`` that are ours, and the manifest's.

        ``injected`` are the hosts at which the gate adds a secret; with ``ssh`` there is an ssh-agent service, with
        ``telemetry`` one for telemetry.
        """
        scratch, home = "TMPDIR=/tmp" in own, "/tmp" if "TMPDIR=/tmp" in own else "/workspace"  # noqa: S108
        ours = {"HOME": home, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        ours |= {"TMPDIR": home} if scratch else {}
        ours |= {"TERM": "xterm-256color"} if self.contract == "terminal" else {}
        ours |= inject_variables(self.placeholders, injected)
        ours |= {"SSH_AUTH_SOCK": "/tmp/.covenant-ssh-agent"} if ssh else {}  # noqa: S108 (the agent's own)
        if telemetry:
            ours |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://telemetry.covenant"}
            ours |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        run = [one for one in own if one.startswith(("COVENANT_RUN_ID=", "CREDENTIALS_DIRECTORY="))]
        return sorted([*run, *(f"{name}={value}" for name, value in {**ours, **self.variables}.items())], key=_name)


def check(facts: Facts, found: Decompiled, package_digest: str) -> None:
    """Hold what was found to the facts. ``package_digest`` is the one that effective.json names.

    Raises:
        errors.ProofError: something else would be started, or shown, than what the facts say.
    """
    seen = found.seen
    pairs: list[tuple[str, object, object]] = [
        ("arch", found.arch, facts.arch),
        ("package", package_digest, facts.package_digest),
        ("arguments", list(found.args), list(facts.args)),
        (
            "environment",
            list(found.process.env),
            facts.environment(
                found.process.env,
                found.grants.inject.hosts,
                ssh=found.relay,
                telemetry=bool(found.grants.telemetry),
            ),
        ),
        ("directory", found.process.cwd, facts.cwd),
        ("contract", found.process.contract, facts.contract),
        ("intent", found.process.intent, _intent(facts)),
        ("layers", list(seen.image.layers), list(facts.layers)),
        ("workspace", _read_workspace(found), facts.workspace),
        ("MiB of /dev/shm", seen.shared_mb, facts.shared_mb if seen.scratch_mb is not None else 0),
        ("programs of layers", list(seen.image.programs), _programs(facts, found)),
        ("runtime", seen.runtime.name, facts.runtime),
        ("secrets as files", seen.secrets, facts.secret_files and bool(found.grants.credentials.listing())),
        ("network stack", found.runsc.stack, facts.stack if found.reached.linked else ""),
        ("runsc", [found.runsc.version, found.runsc.sha256], None if facts.runsc is None else list(facts.runsc)),
    ]
    for closure in (seen.runtime, *seen.programs):
        known = facts.closures.get(closure.name)
        pairs.append((f"files of {closure.name}", closure.digest, known.digest if known else None))
        pairs.append((f"program of {closure.name}", closure.entry, known.entry if known else None))
        if closure.sha256:
            pairs.append((f"content of {closure.name}", closure.sha256, _content(known)))
    pairs += [(f"kind of {place}", kind, facts.kinds.get(place)) for place, kind in seen.granted.items()]
    pairs += [(f"MiB at {place}", mb, facts.rooms.get(place)) for place, mb in seen.rooms.items()]
    pairs += [(f"link {path}", target, facts.links.get(path)) for path, target in seen.links.items()]
    pairs += [(f"target of link {path}", _target(path, facts, found), True) for path in seen.links]
    for name, here, expected in pairs:
        if here != expected:
            raise errors.ProofError(
                f"the artefacts name {shown(here)} as {name}, and not {shown(expected)}", domain="facts"
            )


def _volumes(manifest: Manifest, host: HostFacts) -> dict[str, int]:
    """The MiB of each volume that the manifest names, by its place."""
    return {one.place: host.volumes[one.name].mb for _, one in manifest.volumes if one.name in host.volumes}


def _workspace(manifest: Manifest) -> tuple[object, ...] | None:
    """The terms that the artefacts must have, taken from the manifest and from the built-in lists."""
    one, files = manifest.workspace, data.workspace_files()
    if one.mode != "overlay":
        return None
    mask, protect = sorted({*one.mask, *files.mask}), sorted({*one.protect, *files.protect})
    return (one.path, one.max_mb, tuple(sorted(one.below)), tuple(mask), tuple(protect), one.apply)


def _read_workspace(found: Decompiled) -> tuple[object, ...] | None:
    one = found.seen.workspace
    return None if one is None else (one.place, one.max_mb, one.below, one.mask, one.protect, one.apply)


def _name(variable: str) -> str:
    return variable.partition("=")[0]


def _intent(facts: Facts) -> str:
    """How the intent must reach the agent."""
    if facts.contract in ("stdio", "terminal"):
        return "none"
    return "argument" if any("{intent}" in one for one in facts.args[1:]) else "stdin"


def _programs(facts: Facts, found: Decompiled) -> list[str]:
    """The started programs that stand in layers."""
    closures = [facts.closures.get(one.name) for one in (found.seen.runtime, *found.seen.programs)]
    return sorted({one.entry for one in closures if one is not None and one.layered})


def _target(path: str, facts: Facts, found: Decompiled) -> bool:
    """Whether a link of the root leads to what is mounted, to a directory above that, or to a file of a closure."""
    seen = found.seen
    place = symlinks.follow(path, seen.links) or path
    names = (seen.runtime.name, *(program.name for program in seen.programs))
    return (
        found.grants.filesystem.readable().covers(place)
        or any(one.startswith(place.rstrip("/") + "/") for one in seen.granted)
        or any(facts.closures[name].below(place) is not None for name in names if name in facts.closures)
    )


def _content(closure: Closure | None) -> str | None:
    """The digest of the file that a closure starts."""
    files = () if closure is None else closure.files
    return next((file.sha256 for file in files if closure and file.path == closure.entry), None)
