"""Read compiled artefacts and say for every rule in them what caused it.

The rules are read out of the artefacts (the filter out of its BPF), not out of the manifest beside them; the cause
is then looked up in provenance.json. A rule without a cause, or a cause without a rule, is an error: the artefacts
would do something without a request, or promise something that they do not hold.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from policy import data, errors
from policy.compile import init
from policy.compile.artefacts import Artefacts
from policy.compile.oci import TEMPLATE_UID
from policy.decompile import calls, conditions, oci_seccomp
from policy.explain import documents
from policy.explain.documents import closed

# The closed set of places in config.json; anything else there is a rule without an explanation.
_CONFIG_KEYS = {"ociVersion", "hostname", "root", "process", "mounts", "linux"}
_PROCESS_KEYS = {"terminal", "user", "args", "env", "cwd", "capabilities", "noNewPrivileges", "rlimits"}
_LINUX_KEYS = {"namespaces", "resources", "seccomp", "gidMappings", "uidMappings"}
_MAPPINGS = ("gidMappings", "uidMappings")
_ROOT_KEYS = {"path", "readonly"}
_CAUSE_KEYS = {"kind", "key", "reason", "parent"}
_RUNTIME_KEYS = {"version", "runsc", "flags"}
_CGROUP_KEYS = {"version", "overhead", "v1", "v2", "oci"}
_CGROUP_FILE_KEYS = {"controller", "file", "value", "required"}
_CLOSURE_KEYS = {"name", "entry", "digest", "sha256"}
_MOUNT_KEYS = {"destination", "type", "source", "kind", "options"}
_SHARED = (
    "other runs may write the same at the same time: locks of one are not seen by another, and a database in it loses "
    "commits"
)
# What is filled in for each run: anything else there would be a user that the explanation does not tell of.
_USER = {"uid": TEMPLATE_UID, "gid": TEMPLATE_UID}


class Explained(Struct, frozen=True):
    """One emitted rule: where it stands, what it says, and why it is there.

    ``kind`` is manifest, default or built-in; ``key`` the manifest key or the built-in's name; ``where`` the line
    of the manifest for a key that was written, else empty; ``parent`` what a parent's ceiling took of it, else empty.
    """

    artefact: str
    rule: str
    says: str
    kind: str
    key: str
    where: str
    reason: str
    parent: str = ""

    def document(self) -> dict[str, str]:
        """As ``policy explain --json`` prints it."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


def explain(artefacts: Artefacts, *, where: Callable[[str], str]) -> tuple[Explained, ...]:
    """Every rule of the artefacts with its cause. ``where`` turns a dotted key into ``agent.toml:LINE``.

    Raises:
        errors.UnexplainedError: a rule has no cause, a cause has no rule, or two artefacts contradict each other.
        errors.ArtefactError: a filter cannot be read.
    """
    causes: Mapping[str, Mapping[str, str]] = artefacts.json("provenance.json")["rules"]
    rows, seen = [], set()
    for rule, says in rules(artefacts):
        cause = causes.get(rule)
        if cause is None:
            raise errors.UnexplainedError(f"rule `{rule}` ({says}) has no cause", where=rule)
        seen.add(rule)
        artefact, _, place = rule.partition(":")
        if not {"kind", "key"} <= set(cause) <= _CAUSE_KEYS:
            raise errors.UnexplainedError(f"the cause of `{rule}` has another form", where="provenance.json")
        line = where(cause["key"]) if cause["kind"] == "manifest" else ""
        reason, parent = cause.get("reason", ""), cause.get("parent", "")
        rows.append(Explained(artefact, place, says, cause["kind"], cause["key"], line, reason, parent))
    if orphans := sorted(set(causes) - seen):
        raise errors.UnexplainedError(f"provenance names `{orphans[0]}`, which no artefact holds", where=orphans[0])
    return tuple(rows)


def rules(artefacts: Artefacts) -> Iterator[tuple[str, str]]:
    """Every rule that the artefacts hold, as (``artefact:place``, what it says)."""
    yield from _config(artefacts.json("config.json"), artefacts.json("mounts.json"), artefacts.json("seccomp.json"))
    yield from _filter(artefacts)
    yield from _cgroup(artefacts.json("cgroup.json"))
    yield from _mounts(artefacts.json("mounts.json"))
    yield from documents.network(artefacts.json("network.json"))
    yield from documents.ruleset(artefacts)
    yield from documents.gates(artefacts.json("gates.json"))
    yield from documents.credentials(artefacts.json("credentials.json"))
    yield from documents.supervision(artefacts.json("supervision.json"))
    runtime = artefacts.json("runtime.json")
    closed("runtime.json", runtime, _RUNTIME_KEYS)
    for flag, value in runtime["flags"].items():
        yield f"runtime.json:{flag}", value


def _cgroup(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    closed("cgroup.json", document, _CGROUP_KEYS)
    for version in ("v1", "v2"):
        # None: this version cannot hold what is granted.
        for entry in document[version] or ():
            closed("a file of cgroup.json", entry, _CGROUP_FILE_KEYS)
            need = "" if entry["required"] else " where it exists"
            yield f"cgroup.json:{version}/{entry['file']}", f"{entry['value']}{need}"


def _started_by(args: list[str]) -> Iterator[tuple[str, str]]:
    """Take what starts the agent out of its arguments."""
    if args[0] == init.PROGRAM:
        yield "config.json:process/init", f"{args.pop(0)} starts the agent, passes signals on and reaps orphans"
    if args[0] == init.SSH_RELAY:
        says = f"{args.pop(0)} listens at {init.SSH_SOCKET} for the ssh-agent service, and starts the agent"
        yield "config.json:process/ssh-relay", says


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
    args = process["args"]
    yield from _started_by(args)
    yield "config.json:process/args", shlex.join(args)
    yield "config.json:process/cwd", process["cwd"]
    yield "config.json:process/env", shlex.join(process["env"])
    if process["terminal"]:
        yield "config.json:process/terminal", "a terminal of its own"
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
    for name in _MAPPINGS:
        if name in linux:
            yield f"config.json:linux/{name}", str(linux[name])


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
    known = {"version", "rooms", "root", "mounts", "workspace", "shared"}
    closed("mounts.json", {"workspace": None, "shared": False, **plan}, known)
    if plan.get("shared"):
        yield "mounts.json:shared", _SHARED
    if "workspace" in plan:
        yield from _workspace(plan["workspace"])
    root = {"image": None, "links": [], **plan["root"]}
    closed("root of mounts.json", root, {"readonly", "closures", "mount_points", "image", "links"})
    if root["image"] is not None:
        yield from _image(root["image"])
    points = [{"path": mount["destination"], "kind": mount["kind"]} for mount in plan["mounts"]]
    if plan["root"]["mount_points"] != points:
        raise errors.UnexplainedError("the mount points are not those of the mounts", where="mounts.json")
    for closure in plan["root"]["closures"]:
        closed("a closure of mounts.json", {"sha256": "", **closure}, _CLOSURE_KEYS)
        pinned = f", program {closure['sha256'][:16]}" if "sha256" in closure else ""
        says = f"files with digest {closure['digest'][:16]}, start {closure['entry']}{pinned}"
        yield f"mounts.json:closure/{closure['name']}", says
    for link in root["links"]:
        closed("a link of mounts.json", link, {"path", "target"})
        yield f"mounts.json:link{link['path']}", f"link to {link['target']}"
    for mount in plan["mounts"]:
        closed("a mount of mounts.json", mount, _MOUNT_KEYS)
        options = ",".join(mount["options"])
        room = f", {plan['rooms'][mount['destination']]} MiB at most" if mount["destination"] in plan["rooms"] else ""
        yield f"mounts.json:{mount['destination']}", f"{mount['type']} of {mount['source']}, {options}{room}"


_APPLY = {
    "ask": "the caller applies the changes",
    "operator": "the caller applies the changes that an operator has approved",
    "never": "no changes are applied",
}


def _workspace(terms: dict[str, Any]) -> Iterator[tuple[str, str]]:
    closed("workspace of mounts.json", terms, {"apply", "below", "mask", "max_mb", "protect"})
    yield "mounts.json:workspace/apply", _APPLY[terms["apply"]]
    yield "mounts.json:workspace/below", f"the caller's directory lies in {', '.join(terms['below'])}"
    yield "mounts.json:workspace/mask", f"shown empty and never applied: {' '.join(terms['mask'])}"
    yield "mounts.json:workspace/protect", f"never applied: {' '.join(terms['protect'])}"
    yield "mounts.json:workspace/max_mb", f"changes of {terms['max_mb']} MiB at most"


def _image(image: dict[str, Any]) -> Iterator[tuple[str, str]]:
    closed("image of mounts.json", image, {"layers", "executable", "programs"})
    for layer in image["layers"]:
        closed("a layer of mounts.json", layer, {"name", "digest"})
        yield f"mounts.json:layer/{layer['name']}", f"the files with digest {layer['digest']}"
    for tree in image["executable"]:
        yield f"mounts.json:programs/{tree}", f"every program of {tree.replace(':', ' ')} can be started"


def _filter(artefacts: Artefacts) -> Iterator[tuple[str, str]]:
    arch = artefacts.json("effective.json")["arch"]
    numbers = data.syscalls(arch).numbers
    read = calls.read_bpf(artefacts.files["seccomp.bpf"], arch, {number: name for name, number in numbers.items()})
    listed = oci_seccomp.read(artefacts.json("seccomp.json"), arch, numbers)
    for difference in calls.differences(read, listed):
        raise errors.UnexplainedError(difference.describe("seccomp.bpf", "seccomp.json"), where="seccomp.bpf")
    says = {
        name: "allow" if condition == conditions.ALWAYS else "allow, within its argument rule"
        for name, condition in read.allowed.items()
    }
    says |= dict.fromkeys(read.missing, "errno ENOSYS")
    yield "seccomp.bpf:default", "errno EPERM"
    for name in sorted(says):
        yield f"seccomp.bpf:{name}", says[name]
