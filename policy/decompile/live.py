"""Read a running agent back as artefacts: the state of the kernel and the disk, in the form that policies compile to.

Each layer puts its finding in the place of its compiled artefact, and nothing else. So the readers of this package read
a live sandbox as strictly as they read artefacts, and policy.prove compares the two domain by domain. A layer whose
files come out as compiled allows what was proved of them.

A finding without a form in the artefacts (a foreign mount, another table) is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.decompile import cgroup, config, documents, mounts
from policy.decompile.documents import Files, refuse, shown
from policy.decompile.network import live_nft, nft

# The flags of a mount by which mounts are told apart, in the order in which mounts.json has them.
_FLAGS: Final = ("ro", "rw", "nosuid", "nodev", "noexec", "nosymfollow", "idmapped")
_ROOT: Final = ("ro", "nosuid", "nodev")
# By these annotations runsc reads the root from a file. Any other, and any without such a file, is refused.
_ROOT_FILE: Final = {"dev.gvisor.spec.rootfs.type": "erofs"}
_ROOT_FILE_PLACE: Final = "dev.gvisor.spec.rootfs.source"
# Sources that the supervisor makes itself.
_OWN_SOURCES: Final = ("resolver", "credentials", "limits")


class Readout(Struct, frozen=True):
    """The findings about one run.

    ``config`` is the config.json that runsc was given, ``uid`` and ``run_id`` what had been filled in there. ``flags``
    are those of the sandbox's command line that a policy has a word for; ``runsc_sha256`` is of the file that it runs.
    ``limits`` maps each cgroup file to what it holds, None when this host has no such file; a device in it is written
    ``$DEVICE``. ``mounts`` maps each place that the gofer serves to its flags, "/" being the root. ``firewall`` is
    what ``nft -j list ruleset`` prints in the gateway's namespace, None without one. ``arguments`` start a self-test
    in the place of the agent, and are empty for a run. ``image`` is the EROFS file that has the root, and empty where
    the root is a directory.
    """

    run_id: str
    uid: int
    config: bytes
    flags: tuple[str, ...]
    runsc_sha256: str
    cgroup_version: int
    limits: Mapping[str, str | None]
    mounts: Mapping[str, tuple[str, ...]]
    firewall: bytes | None = None
    arguments: tuple[str, ...] = ()
    image: str = ""


def layers(compiled: Files, found: Readout) -> dict[str, Callable[[], dict[str, bytes]]]:
    """By layer, how to get the artefacts that hold what was found in the place of what was compiled.

    Each raises errors.ArtefactError for what is not understood.
    """
    return {
        "bundle": lambda: _bundle(compiled, found),
        "runtime": lambda: _runtime(compiled, found),
        "cgroup": lambda: _cgroup(compiled, found),
        "mounts": lambda: _mounts(compiled, found),
        "firewall": lambda: _firewall(compiled, found),
    }


def _bundle(compiled: Files, found: Readout) -> dict[str, bytes]:
    """The configuration that runsc was given, with the template's words where the run has its own."""
    where = config.CONFIG
    try:
        whole = json.loads(found.config)
        # It is written in one spelling, so that no key stands twice: who reads it may take another than we do.
        if json.dumps(whole, sort_keys=True).encode() != found.config:
            raise refuse(where, "it is not as it was written")
        if found.image:
            wanted = {**_ROOT_FILE, _ROOT_FILE_PLACE: found.image}
            documents.fixed(whole.pop("annotations"), f"{where}:annotations", wanted)
        process = whole["process"]
        documents.fixed(process["user"], f"{where}:process/user", {"gid": found.uid, "uid": found.uid})
        process["user"] = dict(config.USER)
        own = f"COVENANT_RUN_ID={found.run_id}"
        process["env"] = [config.RUN_ID if entry == own else entry for entry in process["env"]]
        if found.arguments:
            documents.fixed(process["args"], f"{where}:process/args", list(found.arguments))
            # A self-test has no terminal, and an agent that takes its intent as an argument has none either.
            documents.fixed(process["terminal"], f"{where}:process/terminal", False)
            process |= {name: documents.load(compiled, where)["process"][name] for name in ("args", "terminal")}
        return {where: documents.dumps(whole)}
    except (ValueError, RecursionError, KeyError, TypeError):
        raise refuse(where, "it is no configuration") from None


def _runtime(compiled: Files, found: Readout) -> dict[str, bytes]:
    """The flags that the sandbox runs with, and the digest of the file that it runs."""
    where = f"{config.RUNTIME}:flags"
    whole: dict[str, Any] = documents.load(compiled, config.RUNTIME)
    flags: dict[str, str] = {}
    for flag in found.flags:
        name, _, value = flag.partition("=")
        if name in flags:
            raise refuse(where, f"{shown(name)} stands twice")
        flags[name] = value
    whole["flags"] = flags
    whole["runsc"] = {**whole["runsc"], "sha256": found.runsc_sha256}
    return {config.RUNTIME: documents.dumps(whole)}


def _cgroup(compiled: Files, found: Readout) -> dict[str, bytes]:
    """The limits that the kernel holds, in the list of the version that this machine has."""
    version = f"v{found.cgroup_version}"
    whole: dict[str, Any] = documents.load(compiled, cgroup.CGROUP)
    entries = whole.get(version)
    if entries is None:
        raise refuse(cgroup.CGROUP, f"there are no limits for cgroup version {found.cgroup_version}")
    for entry in entries:
        value = found.limits.get(entry["file"])
        if value is None and entry["required"]:
            raise refuse(f"{cgroup.CGROUP}:{version}/{entry['file']}", "the cgroup has no such file")
        if value is not None:
            entry["value"] = value
    return {cgroup.CGROUP: documents.dumps(whole)}


def _mounts(compiled: Files, found: Readout) -> dict[str, bytes]:
    """The flags of everything that is mounted from the host, in both files that have them."""
    where = mounts.MOUNTS
    whole: dict[str, Any] = documents.load(compiled, where)
    configured: dict[str, Any] = documents.load(compiled, config.CONFIG)
    there = dict(found.mounts)
    root = there.pop("/", None)
    if found.image and root is not None:
        raise refuse(f"{where}:root", "a mount is over the root, which is a file")
    if not found.image and (root is None or set(root) != set(_ROOT)):
        raise refuse(f"{where}:root", f"the root is mounted {shown(list(root or ()))}, not {shown(list(_ROOT))}")
    for mount, told in zip(whole["mounts"], configured["mounts"], strict=True):
        if mount["type"] != "bind":
            continue
        place = mount["destination"]
        flags = there.pop(place, None)
        if flags is None:
            raise refuse(f"{where}:{shown(place)}", "nothing is mounted there")
        mount["options"] = _ordered(_inside(mount, flags), place)
        told["options"] = ["bind", *mount["options"]]
    if there:
        place = min(there)
        raise refuse(f"{where}:{shown(place)}", f"a mount that nobody made ({' '.join(there[place])})")
    return {where: documents.dumps(whole), config.CONFIG: documents.dumps(configured)}


def _inside(mount: Mapping[str, Any], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags of a mount in the agent's root by those that it has on the host.

    A mount for reading from the host, and a workspace, has noexec in the root alone, where the configuration says so.
    On the host it would keep the agent's own libraries from being mapped.
    """
    mapped = "ro" in mount["options"] or mount["source"].startswith("workspace")
    if not mapped or "noexec" not in mount["options"] or mount["source"] in _OWN_SOURCES:
        return flags
    if "noexec" in flags:
        place = shown(mount["destination"])
        raise refuse(f"{mounts.MOUNTS}:{place}", f"flags {shown(list(flags))}: noexec is not set on the host")
    return (*flags, "noexec")


def _ordered(flags: tuple[str, ...], place: str) -> list[str]:
    odd = sorted(set(flags) - set(_FLAGS))
    if odd or len(set(flags)) != len(flags):
        raise refuse(f"{mounts.MOUNTS}:{shown(place)}", f"flags {shown(list(flags))} are not understood")
    return [flag for flag in _FLAGS if flag in flags]


def _firewall(compiled: Files, found: Readout) -> dict[str, bytes]:
    """The rules that the gateway holds; where there is none, the policy must have none."""
    if found.firewall is None:
        if documents.raw(compiled, nft.FIREWALL):
            raise refuse(nft.FIREWALL, "there is no gateway that could hold the rules")
        return {nft.FIREWALL: b""}
    return {nft.FIREWALL: live_nft.text(found.firewall)}


def said(error: errors.ArtefactError) -> str:
    """Return the error of a reader about a layer that it does not understand, in one line."""
    return f"{error.where}: {error.message}" if error.where else error.message
