"""One golden decision: inputs in a JSON file, and the result of the deciding half.

``tests/golden/decisions/NAME.json`` holds ``inputs``, written by hand, and ``outputs``, which this module computes:

    about       the property that the case shows
    manifest    the lines of agent.toml
    files       further files of the package; main.py alone when absent
    host        one of HOSTS; ``host_changes`` replaces single facts
    signature   null for an unsigned package, else the differences from a well-signed one: ``signers`` (the fixed
                keys), ``scopes`` (the trust root's limits on keys), ``revoked`` (what it revokes), ``statement``
                (fields), ``envelope`` (its bytes), ``accepted`` (by this host before), ``now_days`` (from the
                signature), ``change`` (files after it)
    parent      null, or {manifest, remaining_seconds, drawn, ancestors}: ``on_excess`` says reject or narrow
    owners      the current holders of the agent id, as [place, payload digest]

The verdict is that of the signature, the parser, the nine rules, the compilers and the proof. ``run`` is the error that
refuses a run on this host today although the rules allow it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from msgspec import structs

from policy import data, decide, errors, package, prove
from policy.compile import plan
from policy.compile.artefacts import NAMES
from policy.host import CgroupFacts, Closure, ClosureFile, HostFacts, NetworkFacts
from policy.manifest import parse
from policy.rules import enforceable, nine
from policy.rules.case import Owner, Unsigned
from policy.rules.parent import Ancestor, Drawn, Parent
from policy.signing import trust
from tests import signing_kit as kit
from tests.unit.policy.compile import sample

HERE = pathlib.Path(__file__).resolve().parent / "decisions"
DIGEST = "0123456789abcdef" * 4  # of the program that is there to be granted
_CONTROLLERS = frozenset({"cpu", "io", "memory", "pids"})


def _host(**changes: Any) -> HostFacts:
    path = "/usr/bin/cat"
    program = Closure(path, path, (ClosureFile(path, "file", 0o755, 10, DIGEST),))
    made = sample.host(audience=kit.HOST, executables={path: program}, **changes)
    return structs.replace(made, providers=("local",), searchers=("local",), agent_servers=("here",), collects=True)


_NETWORKED = NetworkFacts("", "")
HOSTS: dict[str, HostFacts] = {
    "x86_64-v2": _host(cgroup=CgroupFacts(2, _CONTROLLERS, swap_accounting=True), room_mb=8, network=_NETWORKED),
    "x86_64-v1": _host(network=_NETWORKED),
    "aarch64": _host(arch="aarch64", cgroup=CgroupFacts(2, _CONTROLLERS)),
}


def names() -> list[str]:
    """The cases, sorted."""
    return sorted(path.stem for path in HERE.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """The document of a case."""
    document: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return document


def written(inputs: dict[str, Any]) -> str:
    """The document of a case with its outputs computed anew."""
    return json.dumps({"inputs": inputs, "outputs": outputs(inputs)}, indent=1, ensure_ascii=True) + "\n"


def outputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the decision."""
    try:
        return _allowed(inputs)
    except errors.CovenantError as refusal:
        return {"verdict": "refused", **_refusal(refusal)}


def _refusal(refusal: errors.CovenantError) -> dict[str, Any]:
    told = {
        "code": refusal.code,
        "actor": str(refusal.actor),
        "rule": getattr(refusal, "rule", 2 if isinstance(refusal, errors.SignatureError) else None),
        "grant": getattr(refusal, "grant", refusal.details.get("grant")),
        "where": refusal.where,
        "message": refusal.message,
        "hint": refusal.hint,
    }
    return told | {key: refusal.details[key] for key in ("errors", "excess", "domains") if key in refusal.details}


def _allowed(inputs: dict[str, Any]) -> dict[str, Any]:
    host = structs.replace(HOSTS[inputs["host"]], **inputs.get("host_changes", {}))
    made = _package(inputs)
    now_ms = kit.NOW + _signature(inputs).get("now_days", 0) * kit.DAY
    trusted = _trusted(inputs, made, now_ms)
    manifest = decide.manifest_of(made)
    parent = _parent(inputs["parent"])
    owners = {manifest.agent.id: [Owner(*one) for one in inputs.get("owners", [])]}
    verdict = decide.rules(
        trusted,
        manifest,
        host=host,
        now_ms=now_ms,
        parent=parent,
        on_excess=inputs.get("on_excess", "reject"),
        identities=owners,
        package_name="/agents/hello",
    )
    out: dict[str, Any] = {"verdict": "allowed", "effective": verdict.effective.canonical()}
    if verdict.delegation is not None:
        out["delegation"] = verdict.delegation.report()
    if manifest.sandbox.backend == "linux-gvisor":
        ceiling = None if parent is None else parent.ceiling
        artefacts = plan.compile(verdict.effective, manifest, host, package_digest=made.digest, parent=ceiling)
        known = prove.Facts.of(manifest, host, made.digest)
        proof = prove.prove(verdict.effective, artefacts, known=known)
        out["roundings"] = {name: sorted(used) for name, used in proof.roundings.items() if used}
        out["digest"] = artefacts.digest
        out["artefacts"] = {name: hashlib.sha256(artefacts.files[name]).hexdigest() for name in NAMES}
        out["run"] = [_refusal(finding) for finding in enforceable.findings(manifest, host)]
    return out


def _signature(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs["signature"] or {}


def _package(inputs: dict[str, Any]) -> package.Package:
    manifest = "\n".join(inputs["manifest"]).encode() + b"\n"
    files = inputs.get("files", {"main.py": "print('hi')\n"})
    return package.Package({"agent.toml": manifest, **{name: text.encode() for name, text in files.items()}})


def _trusted(inputs: dict[str, Any], made: package.Package, now_ms: int) -> trust.TrustedPackage | Unsigned:
    if inputs["signature"] is None:
        return Unsigned(made, allowed=inputs.get("allow_unsigned", False))
    told = inputs["signature"]
    signed = made.with_envelope(_envelope(told, kit.statement(made, **told.get("statement", {})).encode()))
    root = kit.root(
        *(kit.operator(int(n), **changes) for n, changes in told.get("scopes", {"1": {}}).items()), **_root(told)
    )
    serials = kit.Serials()
    if "accepted" in told:
        serials[told["accepted"][0]] = trust.Accepted(*told["accepted"][1:])
    changed = package.Package(
        dict(signed.files) | {k: v.encode() for k, v in told.get("change", {}).items()}, signed.envelope
    )
    return trust.verify(changed, root, now_ms=now_ms, audience=kit.HOST, serials=serials)


def _root(told: dict[str, Any]) -> dict[str, Any]:
    return {"revoked": kit.revoked(**told["revoked"])} if "revoked" in told else {}


def _envelope(told: dict[str, Any], payload: bytes) -> bytes:
    if told.get("envelope") is not None:
        return str(told["envelope"]).encode()
    return kit.envelope(payload, *told.get("signers", [1]))


def _parent(told: dict[str, Any] | None) -> Parent | None:
    if told is None:
        return None
    mine = nine.requested(parse.parse(("\n".join(told["manifest"]) + "\n").encode()), roles=data.roles())
    above = tuple(_ancestors(told, mine.spawning))
    last = above[-1]
    drawn = Drawn(**told.get("drawn", {}))
    return Parent(last.run_id, last.agent_id, "cd" * 32, mine, told.get("remaining_seconds"), drawn, above)


def _ancestors(told: dict[str, Any], own: Any) -> Iterator[Ancestor]:
    for depth, one in enumerate(told.get("ancestors", [])):
        limits = dataclasses.replace(own, **one.get("spawning", {}))
        yield Ancestor(f"run-{depth}", one["agent_id"], depth, limits, one["live"])
    depth = len(told.get("ancestors", []))
    yield Ancestor(f"run-{depth}", "boss", depth, own, told.get("live", 0))
