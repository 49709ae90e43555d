"""Read compiled artefacts and say for every rule in them what caused it.

The rules are read out of the artefacts (the filter out of its BPF), not out of the manifest beside them; the cause
is then looked up in provenance.json. A rule without a cause, or a cause without a rule, is an error: the artefacts
would do something that nobody asked for, or promise something that they do not hold.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policy import data, errors
from policy.compile.artefacts import Artefacts
from policy.compile.oci import TEMPLATE_UID
from policy.decompile import bpf

# The closed set of places in config.json; anything else there is a rule that nobody explained.
_CONFIG_KEYS = {"ociVersion", "hostname", "root", "process", "mounts", "linux"}
_PROCESS_KEYS = {"terminal", "user", "args", "env", "cwd", "capabilities", "noNewPrivileges", "rlimits"}
# What an action of either form says of a call; the second is whether it hangs on arguments.
_EPERM, _ENOSYS = 0x00050001, 0x00050026
_SAYS: dict[tuple[str | int, bool], str] = {
    ("SCMP_ACT_ALLOW", False): "allow",
    ("SCMP_ACT_ALLOW", True): "allow, within its argument rule",
    ("SCMP_ACT_TRACE", False): "errno ENOSYS",
    (bpf.ALLOW, False): "allow",
    (_ENOSYS, False): "errno ENOSYS",
}
# linux/audit.h
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LINUX_KEYS = {"namespaces", "resources", "seccomp"}
_ROOT_KEYS = {"path", "readonly"}
# What is filled in for each run: anything else there would be a user that the explanation does not tell of.
_USER = {"uid": TEMPLATE_UID, "gid": TEMPLATE_UID}


@dataclass(frozen=True, slots=True)
class Explained:
    """One emitted rule: where it stands, what it says, and why it is there.

    ``kind`` is manifest, default or built-in; ``key`` the manifest key or the built-in's name; ``where`` the line
    of the manifest for a key that was written, else empty.
    """

    artefact: str
    rule: str
    says: str
    kind: str
    key: str
    where: str
    reason: str

    def document(self) -> dict[str, str]:
        """As ``policy explain --json`` prints it."""
        return {name: getattr(self, name) for name in self.__slots__}


def explain(artefacts: Artefacts, *, where: Callable[[str], str]) -> tuple[Explained, ...]:
    """Every rule of the artefacts with its cause. ``where`` turns a dotted key into ``agent.toml:LINE``.

    Raises:
        errors.UnexplainedError: a rule has no cause, a cause has no rule, or two artefacts contradict each other.
    """
    causes: Mapping[str, Mapping[str, str]] = artefacts.json("provenance.json")["rules"]
    rows, seen = [], set()
    for rule, says in rules(artefacts):
        cause = causes.get(rule)
        if cause is None:
            raise errors.UnexplainedError(f"rule `{rule}` ({says}) has no cause", where=rule)
        seen.add(rule)
        artefact, _, place = rule.partition(":")
        line = where(cause["key"]) if cause["kind"] == "manifest" else ""
        rows.append(Explained(artefact, place, says, cause["kind"], cause["key"], line, cause.get("reason", "")))
    if orphans := sorted(set(causes) - seen):
        raise errors.UnexplainedError(f"provenance names `{orphans[0]}`, which no artefact holds", where=orphans[0])
    return tuple(rows)


def rules(artefacts: Artefacts) -> Iterator[tuple[str, str]]:
    """Every rule that the artefacts hold, as (``artefact:place``, what it says)."""
    yield from _config(artefacts.json("config.json"), artefacts.json("mounts.json"), artefacts.json("seccomp.json"))
    yield from _filter(artefacts)
    for version in ("v1", "v2"):
        for entry in artefacts.json("cgroup.json")[version]:
            need = "" if entry["required"] else " where it exists"
            yield f"cgroup.json:{version}/{entry['file']}", f"{entry['value']}{need}"
    yield from _mounts(artefacts.json("mounts.json"))
    network = artefacts.json("network.json")
    yield "network.json:mode", f"{network['mode']}, interfaces {', '.join(network['interfaces'])}"
    for index, rule in enumerate(network["rules"]):
        yield f"network.json:rule/{index}", str(rule)
    for flag, value in artefacts.json("runtime.json")["flags"].items():
        yield f"runtime.json:{flag}", value


def _config(config: dict[str, Any], mounts: dict[str, Any], seccomp: dict[str, Any]) -> Iterator[tuple[str, str]]:
    process, linux = config["process"], config["linux"]
    for name, keys, allowed in (
        ("config.json", config, _CONFIG_KEYS),
        ("process", process, _PROCESS_KEYS),
        ("linux", linux, _LINUX_KEYS),
        ("root", config["root"], _ROOT_KEYS),
    ):
        if extra := sorted(set(keys) - allowed):
            raise errors.UnexplainedError(f"`{extra[0]}` of {name} is not known here", where="config.json")
    _agree(config["mounts"], mounts["mounts"])
    for name, found, known in (
        ("process.user", process["user"], _USER),
        ("root.path", config["root"]["path"], "rootfs"),
    ):
        if found != known:
            raise errors.UnexplainedError(f"{name} is `{found}`, not `{known}`", where="config.json")
    if linux["seccomp"] != seccomp:
        raise errors.UnexplainedError("config.json and seccomp.json hold different filters", where="config.json")
    held = {name: caps for name, caps in process["capabilities"].items() if caps}
    yield "config.json:process/args", shlex.join(process["args"])
    yield "config.json:process/cwd", process["cwd"]
    yield "config.json:process/env", shlex.join(process["env"])
    yield "config.json:process/user", "a uid of its own per run"
    yield "config.json:process/capabilities", str(held) if held else "none in any set"
    yield "config.json:process/noNewPrivileges", str(process["noNewPrivileges"]).lower()
    for limit in process["rlimits"]:
        yield f"config.json:process/rlimits/{limit['type']}", f"soft {limit['soft']}, hard {limit['hard']}"
    yield "config.json:hostname", config["hostname"]
    yield "config.json:root", "read-only" if config["root"]["readonly"] else "writable"
    yield "config.json:linux/resources", str(linux["resources"])
    for namespace in linux["namespaces"]:
        yield f"config.json:linux/namespaces/{namespace['type']}", namespace.get("path", "new")


def _agree(config_mounts: list[dict[str, Any]], plan: list[dict[str, Any]]) -> None:
    # A bind's source is its place in the plan: the supervisor puts the mount of that number there.
    planned = [
        {
            "destination": mount["destination"],
            "type": mount["type"],
            "source": f"mounts/{index}" if mount["type"] == "bind" else mount["source"],
            "options": [*(["bind"] if mount["type"] == "bind" else []), *mount["options"]],
        }
        for index, mount in enumerate(plan)
    ]
    if config_mounts != planned:
        raise errors.UnexplainedError("config.json and mounts.json hold different mounts", where="config.json")


def _mounts(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for closure in plan["root"]["closures"]:
        says = f"files with digest {closure['digest'][:16]}, start {closure['entry']}"
        yield f"mounts.json:closure/{closure['name']}", says
    for mount in plan["mounts"]:
        options = ",".join(mount["options"])
        yield f"mounts.json:{mount['destination']}", f"{mount['type']} of {mount['source']}, {options}"


def _filter(artefacts: Artefacts) -> Iterator[tuple[str, str]]:
    read = _decisions(artefacts.files["seccomp.bpf"], artefacts.json("effective.json")["arch"])
    listed: dict[str, str] = {}
    for entry in artefacts.json("seccomp.json")["syscalls"]:
        for name in entry["names"]:
            listed[name] = _SAYS[entry["action"], bool(entry.get("args"))]
    if difference := sorted(set(read.items()) ^ set(listed.items())):
        name, says = difference[0]
        raise errors.UnexplainedError(f"seccomp.bpf and seccomp.json differ in `{name}` ({says})", where="seccomp.bpf")
    yield "seccomp.bpf:default", "errno EPERM"
    for name in sorted(read):
        yield f"seccomp.bpf:{name}", read[name]


def _decisions(program: bytes, arch: str) -> dict[str, str]:
    """What the filter says of each call that it does not refuse with EPERM, read out of its instructions."""
    tag = _AUDIT_ARCH[arch]
    names = {number: name for name, number in data.syscalls(arch).numbers.items()}
    found: dict[str, str] = {}
    refused: set[int] = set()
    for region in bpf.regions(program):
        if region.action == _EPERM:
            refused.update(
                n for low, high in region.ranges(bpf.NUMBER) if high - low < 4096 for n in range(low, high + 1)
            )
            continue
        if region.ranges(bpf.ARCH) != ((tag, tag),):
            raise errors.UnexplainedError("the filter decides about calls of another architecture", where="seccomp.bpf")
        for low, high in region.ranges(bpf.NUMBER):
            for number in range(low, min(high, low + 4096) + 1):
                if number not in names:
                    raise errors.UnexplainedError(
                        f"the filter lets call {number} by, which has no name", where="seccomp.bpf"
                    )
                found[names[number]] = _SAYS.get((region.action, False), f"action {region.action:#x}")
    # A call that is allowed on one path and refused on another hangs on its arguments.
    return {
        name: f"{says}, within its argument rule" if data.syscalls(arch).numbers[name] in refused else says
        for name, says in found.items()
    }
