"""A `docker run` command line, as it stands in a script: one command, with its lines continued by a backslash."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final

from policy.importing import container, documents
from policy.importing.container import Container, Said
from policy.importing.vocabulary import Context, Draft, malformed, shown

# Options without an argument that change nothing of what is allowed.
_PLAIN: Final = frozenset({"--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--init", "-q", "--quiet"})
_DANGEROUS: Final = frozenset(
    {"--privileged", "--cap-add", "--device", "--device-cgroup-rule", "--pid", "--ipc", "--uts", "--userns", "--gpus"}
    | {"--cgroupns", "--cgroup-parent", "--security-opt", "--runtime", "--volumes-from", "--sysctl", "--group-add"}
)
_NO_ARGUMENT: Final = frozenset(
    {"--privileged", "--no-healthcheck", "--oom-kill-disable", "-P", "--publish-all", "--disable-content-trust"}
    | {"--sig-proxy", "--read-only"}
)
# What our sandbox does to every agent.
_ALWAYS: Final = frozenset({"--cap-drop", "--user", "-u", "--name", "--hostname", "-h", "--label", "-l", "--restart"})
_OTHERS: Final = frozenset(
    {"--add-host", "--attach", "-a", "--cidfile", "--cpu-shares", "-c", "--cpuset-cpus", "--dns", "--env-file"}
    | {"--health-cmd", "--expose", "--ip", "--link", "--log-driver", "--log-opt", "--mac-address", "--memory-swap"}
    | {"--memory-reservation", "--network-alias", "--platform", "--pull", "--shm-size", "--stop-signal"}
    | {"--stop-timeout", "--storage-opt", "--ulimit", "--workdir", "-w", "--device-read-bps", "--device-write-bps"}
)
_WORDS: Final = 2_000
_SHELL: Final = frozenset({"|", "||", "&", "&&", ">", ">>", "<", "<<", "2>&1"})


def read(raw: bytes, context: Context) -> Draft:
    """Read the command line.

    Raises:
        errors.ImportSourceError: it is no `docker run`, or has an option that this import does not know.
    """
    found = Container()
    words = _words(documents.decoded(raw))
    while words and words[0].startswith("-") and words[0] != "-":
        words = _option(found, words)
    if not words:
        raise malformed("the command names no image", where=documents.FILE, hint="end it with the image and a command")
    found.image = Said("image", words[0])
    found.command = words[1:]
    return container.drafted(found, context, expands="$`")


def _words(document: str) -> list[str]:
    lines = [line for line in document.splitlines() if not line.lstrip().startswith("#")]
    try:
        words = shlex.split("\n".join(lines).replace("\\\n", " "))
    except ValueError as e:
        hint = "close each quote, and give one command"
        raise malformed(f"the command cannot be split: {e}", where=documents.FILE, hint=hint) from None
    if words[:1] == ["sudo"]:
        words = words[1:]
    start = next((size for size in (2, 3) if words[1:size] in (["run"], ["container", "run"])), 0)
    if words[:1] not in (["docker"], ["podman"]) or not start:
        message = f"the source begins with {shown(' '.join(words[:2]))}"
        raise malformed(message, where=documents.FILE, hint="give one `docker run ...` command line")
    if several := next((word for word in words if word in _SHELL or word.endswith(";")), ""):
        message = f"the source is more than one command: {shown(several)}"
        raise malformed(message, where=documents.FILE, hint="give the `docker run ...` alone")
    if len(words) > _WORDS:
        message = f"the command has more than {_WORDS} words"
        raise malformed(message, where=documents.FILE, hint="give one command")
    return words[start:]


def _option(found: Container, words: list[str]) -> list[str]:
    """Take one option and return the words behind it."""
    name, equals, value = words[0].partition("=")
    if name in _PLAIN or (not name.startswith("--") and set(name[1:]) <= set("ditq")):
        return words[1:]
    if not name.startswith("--") and len(name) > 2:
        # `-m512m`, `-p80:80`
        name, equals, value = words[0][:2], "=", words[0][2:].removeprefix("=")
    rest = words[1:]
    if not equals and name not in _NO_ARGUMENT:
        if not rest:
            raise malformed(f"{shown(name)} has no argument", where=name, hint="complete the command")
        value, rest = rest[0], rest[1:]
    _take(found, name, value)
    return rest


def _take(found: Container, name: str, value: str) -> None:
    if name in _DANGEROUS:
        if name != "--security-opt" or not value.startswith("no-new-privileges"):
            found.dangers.append(Said(name, f"{name} {value}".strip()))
    elif name == "--read-only":
        found.read_only = value.lower() != "false"
    elif name in _TAKERS:
        _TAKERS[name](found, Said(name, value))
    elif name in _OTHERS or name in _NO_ARGUMENT:
        found.others.append(Said(name, name))
    elif name not in _ALWAYS:
        # INVARIANT: it is not known whether an unknown option takes the next word, which may be the image.
        raise malformed(f"the option {shown(name)} is not known", where=name, hint="take it out of the command")


def _mount(found: Container, said: Said) -> None:
    """`--mount type=bind,source=/a,target=/b,readonly` as a volume."""
    pairs = dict(part.partition("=")[::2] for part in said.value.split(","))
    source = pairs.pop("source", pairs.pop("src", ""))
    target = next((pairs.pop(key) for key in ("target", "destination", "dst") if key in pairs), "")
    kind = pairs.pop("type", "volume")
    if kind == "tmpfs":
        size = pairs.get("tmpfs-size", "")
        found.tmpfs.append(Said(said.place, f"{target}:size={size}" if size else target))
        return
    closed = any(pairs.pop(key, "false") in ("", "true", "1") for key in ("readonly", "ro"))
    options = [*pairs, *(["ro"] if closed else [])]
    found.volumes.append(Said(said.place, f"{source}:{target}:{','.join(options)}"))


def _entrypoint(found: Container, said: Said) -> None:
    found.entrypoint = [said.value] if said.value else []


_Taker = Callable[[Container, Said], None]
_LISTS: Final[dict[str, str]] = {
    **dict.fromkeys(("-v", "--volume"), "volumes"),
    **dict.fromkeys(("-e", "--env"), "variables"),
    **dict.fromkeys(("-p", "--publish"), "ports"),
    **dict.fromkeys(("-m", "--memory"), "memory"),
    **dict.fromkeys(("--network", "--net"), "networks"),
    "--tmpfs": "tmpfs",
    "--cpus": "cpus",
    "--pids-limit": "pids",
}


def _append(name: str) -> _Taker:
    return lambda found, said: getattr(found, name).append(said)


_TAKERS: Final[dict[str, _Taker]] = {
    **{option: _append(name) for option, name in _LISTS.items()},
    "--mount": _mount,
    "--entrypoint": _entrypoint,
}
