"""Check a compiled policy: each grant has a rule, no rule lacks a grant, and the manifest's order is irrelevant."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.compile import bundle, oci, plan
from policy.compile.artefacts import NAMES, Artefacts, Cause, Provenance, canonical
from policy.explain import report
from policy.manifest import parse
from tests.unit.policy.compile import sample

FULL = """
[permissions.filesystem]
read = {read}
[permissions.syscalls]
allow = {calls}
[permissions.executables]
allow = {programs}
"""
HERMES = """\
[agent]
id = "h"
name = "h"
version = "1"
runtime = "hermes"
[resources]
network = "off"
[sandbox]
backend = "linux-gvisor"
"""
READ = ["/usr/share/doc", "/opt/a", "/opt/b", "/srv/data"]
CALLS = ["getcpu", "sched_yield", "sync"]
PROGRAMS = ["/usr/bin/cat", "/usr/bin/grep"]


def _full(rng: random.Random | None = None) -> Artefacts:
    lists = [list(READ), list(CALLS), list(PROGRAMS)]
    facts = sample.host()
    if rng is not None:
        for one in lists:
            rng.shuffle(one)
        shuffled: dict[str, Any] = {
            name: dict(rng.sample(sorted(getattr(facts, name).items()), len(getattr(facts, name))))
            for name in ("runtimes", "executables", "granted")
        }
        facts = structs.replace(facts, **shuffled)
    read, calls, programs = (json.dumps(one) for one in lists)
    return sample.compiled(sample.manifest(more=FULL.format(read=read, calls=calls, programs=programs)), facts)


def test_same_policy_is_same_bytes_whatever_order() -> None:
    # provenance names places in the manifest's lists, so it may follow their order; enforced artefacts may not.
    first = _full()
    for seed in range(20):
        other = _full(random.Random(seed))
        for name in set(NAMES) - {"provenance.json"}:
            assert other.files[name] == first.files[name], (seed, name)


def test_same_input_has_same_digest_and_changed_one_has_not() -> None:
    assert sample.compiled(sample.manifest()).digest == sample.compiled(sample.manifest()).digest
    digests = {
        sample.compiled(sample.manifest()).digest,
        sample.compiled(sample.manifest(resources="memory_mb = 513")).digest,
        sample.compiled(sample.manifest(), sample.host(runsc=structs.replace(_runsc(), sha256="e" * 64))).digest,
        sample.compiled(sample.manifest(more='[permissions.syscalls]\nallow = ["getcpu"]')).digest,
        sample.compiled(sample.manifest(more='[permissions.filesystem]\nread = ["/opt/a"]')).digest,
        sample.compiled(sample.manifest(filesystem="read-only-package")).digest,
    }
    assert len(digests) == 6


def _runsc() -> Any:
    return sample.host().runsc


def _config(artefacts: Artefacts) -> dict[str, Any]:
    return dict(artefacts.json("config.json"))


def test_no_grant_means_no_mount_and_no_execve() -> None:
    artefacts = sample.compiled(sample.manifest(filesystem="read-only-package"))
    mounts = {m["destination"]: m for m in _config(artefacts)["mounts"]}
    assert set(mounts) == {"/proc", "/workspace", "/tmp", "/sys", "/dev/shm", "/dev/net", "/run/covenant"}
    assert all("ro" in m["options"] or m["type"] == "proc" for m in mounts.values())
    assert all({"nosuid", "nodev", "noexec"} <= set(m["options"]) for m in mounts.values())
    names = {n for s in artefacts.json("seccomp.json")["syscalls"] for n in s["names"]}
    assert not names & {"execve", "execveat", "memfd_create", "socket", "connect", "ptrace", "mount"}


def test_execve_comes_with_executables_grant_and_in_no_other_way() -> None:
    granted = sample.compiled(sample.manifest(more='[permissions.executables]\nallow = ["/usr/bin/cat"]'))
    names = {n for s in granted.json("seccomp.json")["syscalls"] for n in s["names"]}
    assert "execve" in names
    assert not names & {"execveat", "memfd_create"}


def test_process_has_no_rights_of_its_own() -> None:
    process = _config(sample.compiled(sample.manifest()))["process"]
    assert process["user"]["uid"] != 0
    assert process["noNewPrivileges"] is True
    assert set(process["capabilities"]) == set(oci.CAPABILITY_SETS)
    assert not any(process["capabilities"].values())
    assert {entry.partition("=")[0] for entry in process["env"]} == {
        "COVENANT_RUN_ID",
        "HOME",
        "LANG",
        "PATH",
        "TMPDIR",
    }


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ('[permissions.filesystem]\nread = ["/usr"]', errors.NotEnforceableError),
        ('[permissions.filesystem]\nread = ["/usr/lib"]', errors.NotEnforceableError),
        ('[permissions.filesystem]\nread = ["/tmp/x"]', errors.NotEnforceableError),
        ('[permissions.filesystem]\nread = ["/workspace"]', errors.NotEnforceableError),
        ('[permissions.filesystem]\nread = ["/missing"]', errors.NotEnforceableError),
        ('[permissions.executables]\nallow = ["/usr/bin/missing"]', errors.NotEnforceableError),
    ],
)
def test_what_cannot_be_mounted_safely_is_refused_with_its_line(more: str, kind: type[errors.CovenantError]) -> None:
    with pytest.raises(kind) as caught:
        sample.compiled(sample.manifest(more=more))
    assert caught.value.where.startswith("agent.toml:")


def test_no_runsc_and_no_runtime_are_refused() -> None:
    without: tuple[dict[str, Any], ...] = ({"runsc": None}, {"runtimes": {}})
    for changes in without:
        with pytest.raises(errors.NotEnforceableError):
            sample.compiled(sample.manifest(), sample.host(**changes))


def test_runtime_no_process_here_is_refused_with_its_line() -> None:
    with pytest.raises(errors.NotEnforceableError, match="nothing to confine") as caught:
        sample.compiled(parse.parse(HERMES.encode()))
    assert caught.value.where == "agent.toml:5"


def test_run_fills_in_its_uid_and_run_id_and_nothing_else() -> None:
    artefacts = sample.compiled(sample.manifest())
    run_id = "01234567-89ab-cdef-0123-456789abcdef"
    filled, template = json.loads(bundle.instantiate(artefacts, run_id=run_id, uid=70000)), _config(artefacts)
    assert filled["process"].pop("user") == {"uid": 70000, "gid": 70000}
    assert f"COVENANT_RUN_ID={run_id}" in filled["process"].pop("env")
    for key in ("user", "env"):
        template["process"].pop(key)
    assert filled == template
    for bad in ({"run_id": "../x", "uid": 70000}, {"run_id": run_id, "uid": 0}):
        with pytest.raises(ValueError, match="a run needs"):
            bundle.instantiate(artefacts, **bad)  # type: ignore[arg-type]


# --- explain ------------------------------------------------------------------------------------------


def _changed(artefacts: Artefacts, name: str, change: Any) -> Artefacts:
    document = artefacts.json(name)
    change(document)
    return Artefacts({**artefacts.files, name: json.dumps(document).encode()})


def test_every_rule_is_explained_and_manifests_rule_has_its_line() -> None:
    more = '[permissions.filesystem]\nread = ["/opt/a"]\n[permissions.syscalls]\nallow = ["sync"]'
    found = sample.manifest(more=more)
    rows = {f"{r.artefact}:{r.rule}": r for r in report.explain(sample.compiled(found), where=found.where)}
    assert rows["mounts.json:/opt/a"].where == "agent.toml:15"
    assert rows["seccomp.bpf:sync"].where == "agent.toml:17"
    assert rows["cgroup.json:v2/memory.max"].kind == "default"
    assert rows["config.json:process/capabilities"].kind == "built-in"
    assert rows["network.json:mode"].where == "agent.toml:8"
    assert all(row.says for row in rows.values())


TAMPERED: dict[str, Any] = {
    "a capability more": ("config.json", lambda d: d["process"].update(extra=1)),
    "a mount more": ("config.json", lambda d: d["mounts"].append({"destination": "/x", "type": "bind", "options": []})),
    "a mount writable": ("config.json", lambda d: d["mounts"][-1].update(options=["bind"])),
    "a mount of another source": ("config.json", lambda d: d["mounts"][-1].update(source="/etc")),
    "a mount with another's number": ("config.json", lambda d: d["mounts"][-1].update(source="mounts/0")),
    "a mount that maps ids": ("config.json", lambda d: d["mounts"][-1].update(uidMappings=[])),
    "another root": ("config.json", lambda d: d["root"].update(path="/")),
    "a root with more": ("config.json", lambda d: d["root"].update(x=1)),
    "root as the user": ("config.json", lambda d: d["process"]["user"].update(uid=0)),
    "a group more": ("config.json", lambda d: d["process"]["user"].update(additionalGids=[0])),
    "another filter in the config": ("config.json", lambda d: d["linux"]["seccomp"].update(defaultAction="X")),
    "hooks": ("config.json", lambda d: d.update(hooks={})),
    "annotations": ("config.json", lambda d: d.update(annotations={"dev.gvisor.flag.host-uds": "all"})),
    "devices": ("config.json", lambda d: d["linux"].update(devices=[])),
    "a rlimit more": ("config.json", lambda d: d["process"]["rlimits"].append({"type": "X", "soft": 1, "hard": 1})),
    "a planned mount more": ("mounts.json", lambda d: d["mounts"].append(dict(d["mounts"][0], destination="/x"))),
    "a cgroup file more": ("cgroup.json", lambda d: d["v2"].append({"file": "x", "value": "1", "required": True})),
    "a cgroup file less": ("cgroup.json", lambda d: d["v2"].pop()),
    "a flag more": ("runtime.json", lambda d: d["flags"].update({"--debug": "true"})),
    "a network grant": ("network.json", lambda d: d["grants"].append({"id": "g_0"})),
    "another gateway": ("network.json", lambda d: d.update(gateway={"agent": "eth1"})),
    "network rules": ("network.json", lambda d: d.update(rules=["accept"])),
    "a gate": ("gates.json", lambda d: d.update(socks={})),
    "a credential": ("credentials.json", lambda d: d["names"].append("db")),
    "a tool": ("supervision.json", lambda d: d["skills"]["allow"].append("x")),
    "a right of the supervisor's": ("supervision.json", lambda d: d["spawn"].update(shell=True)),
    "a section of the supervisor's": ("supervision.json", lambda d: d.update(x=1)),
    "a mount point more": ("mounts.json", lambda d: d["root"]["mount_points"].append({"path": "/x", "kind": "dir"})),
    "a closure more": ("mounts.json", lambda d: d["root"]["closures"].append(dict(d["root"]["closures"][0], name="x"))),
    "a cause of another form": ("provenance.json", lambda d: next(iter(d["rules"].values())).update(x="1")),
    "a cause less": ("provenance.json", lambda d: d["rules"].popitem()),
    "a cause more": ("provenance.json", lambda d: d["rules"].update({"x:y": {"kind": "built-in", "key": "k"}})),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_rule_that_nothing_caused_is_error(case: str) -> None:
    name, change = TAMPERED[case]
    artefacts = sample.compiled(sample.manifest())
    report.explain(artefacts, where=str)
    with pytest.raises(errors.UnexplainedError):
        report.explain(_changed(artefacts, name, change), where=str)


def test_arguments_and_variables_are_told_whole() -> None:
    def change(document: Any) -> None:
        document["process"]["args"][-1] = "main.py --all"
        document["process"]["env"][-1] = "PATH=/tmp: ok"

    artefacts = _changed(sample.compiled(sample.manifest()), "config.json", change)
    rows = {row.rule: row.says for row in report.explain(artefacts, where=str)}
    assert rows["process/args"].endswith(" 'main.py --all'")
    assert rows["process/env"].endswith(" 'PATH=/tmp: ok'")


def test_filter_that_allows_one_call_more_is_error() -> None:
    less = sample.compiled(sample.manifest())
    more = sample.compiled(sample.manifest(more='[permissions.syscalls]\nallow = ["sync"]'))
    swapped = Artefacts({**less.files, "seccomp.bpf": more.files["seccomp.bpf"]})
    with pytest.raises(errors.UnexplainedError):
        report.explain(swapped, where=str)


def test_runsc_gets_each_flag_stated() -> None:
    flags = sample.compiled(sample.manifest()).json("runtime.json")["flags"]
    assert flags == {flag: value for flag, (value, _) in plan.RUNSC_FLAGS.items()}
    assert flags["--oci-seccomp"] == "true"
    assert flags["--network"] == "none"


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/usr", "/usr/bin/python3.11"),
        ("/usr/lib", "/usr/lib/libc.so.6"),
        ("/usr/lib/libc.so.6", "/usr/lib/libc.so.6"),
        ("/usr/lib/libc.so", None),
        ("/usr/lib/libc.so.6/x", None),
        ("/usr/l", None),
        ("/lib", "/lib"),
        ("/opt", None),
        ("/zzz", None),
    ],
)
def test_what_mount_would_hide_is_found_by_component(directory: str, found: str | None) -> None:
    assert sample.closure("python3", "/usr/bin/python3.11").below(directory) == found


def test_provenance_is_written_as_any_other_document() -> None:
    provenance = Provenance()
    shared = Cause("manifest", "resources.memory_mb", 'a "reason" with é and \\', "asked for more")
    for rule in ('x:"quoted"', "a:b", "x:é\n\u2028", "a:a"):
        provenance.add(rule, shared)
    provenance.add("b:b", Cause("default", "k"))
    provenance.add("b:b", shared)
    rules = {rule: cause.document() for rule, cause in provenance.causes.items()}
    assert rules["b:b"] == {"kind": "default", "key": "k"}
    assert provenance.encoded() == canonical({"version": 2, "rules": rules})
    found = sample.compiled(sample.manifest()).files["provenance.json"]
    assert found == canonical(json.loads(found))
