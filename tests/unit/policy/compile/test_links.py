"""Granted paths that are links: what is mounted, which names the root has, and what the proof makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.explain import report
from policy.host import ClosureFile, GrantedPath, HostFacts
from policy.why import files
from policy.why.ask import Sight, ask
from tests import proof_kit
from tests.proof_kit import Documents
from tests.unit.policy.compile import sample

LINK = "/usr/lib/ssl/certs"
REAL = "/etc/ssl/certs"
LINKED = GrantedPath(LINK, "dir", real=REAL, links=((LINK, "../../../etc/ssl/certs"),))
FOLLOWED = '[permissions.filesystem]\nread = ["/usr/lib/ssl/certs", "/opt/a"]\n'


def host(*more: GrantedPath) -> HostFacts:
    base = proof_kit.host()
    return structs.replace(base, granted={**base.granted, **{one.path: one for one in (LINKED, *more)}})


def read(*paths: str, allow: str = "") -> str:
    listed = ", ".join(f'"{path}"' for path in paths)
    return f"[permissions.filesystem]\nread = [{listed}]\n{allow}"


def compiled(text: str, *more: GrantedPath) -> proof_kit.Case:
    return proof_kit.case(sample.manifest(more=text), host(*more))


def places(case: proof_kit.Case) -> list[str]:
    return [m["destination"] for m in case.artefacts.json("mounts.json")["mounts"] if m["source"] == m["destination"]]


def links(case: proof_kit.Case) -> dict[str, str]:
    return {one["path"]: one["target"] for one in case.artefacts.json("mounts.json")["root"].get("links", [])}


def test_link_is_a_name_of_what_is_mounted() -> None:
    case = compiled(FOLLOWED)
    assert places(case) == [REAL, "/opt/a"]
    assert links(case) == {LINK: "../../../etc/ssl/certs"}
    proof = case.prove()
    assert list(proof.found.grants.filesystem.read) == [REAL, "/opt/a"]
    assert proof.roundings["filesystem"] == ("link",)
    assert case.effective.canonical()["filesystem"]["read"] == ["/opt/a", LINK]


def test_link_and_its_target_are_mounted_once() -> None:
    direct = GrantedPath(REAL, "dir")
    case = compiled(read(LINK, REAL), direct)
    assert places(case) == [REAL]
    case.prove()
    cause = case.artefacts.json("provenance.json")["rules"][f"mounts.json:{REAL}"]
    assert cause["key"] == "permissions.filesystem.read[1]"


def test_target_in_a_granted_directory_has_no_mount() -> None:
    case = compiled(read(LINK, "/etc/ssl"), GrantedPath("/etc/ssl", "dir"))
    assert places(case) == ["/etc/ssl"]
    assert LINK in links(case)
    case.prove()


def test_link_to_a_written_path_is_a_name_of_it() -> None:
    """The target is in a path for writing, which is mounted once."""
    text = 'filesystem = "host"\n[permissions.filesystem]\nread = ["/etc/data"]\nwrite = ["/srv/data"]\n'
    manifest = sample.manifest(more=text.partition("\n")[2], filesystem="host", resources="disk_mb = 64")
    case = proof_kit.case(
        manifest, host(GrantedPath("/etc/data", "dir", real="/srv/data", links=(("/etc/data", "/srv/data"),)))
    )
    assert places(case) == ["/srv/data"]
    case.prove()


def test_link_to_a_file_of_the_root_is_a_name_alone() -> None:
    linked = GrantedPath(
        "/opt/python", "file", real="/usr/bin/python3.11", links=(("/opt/python", "/usr/bin/python3.11"),)
    )
    case = compiled(read("/opt/python"), linked)
    assert places(case) == []
    assert links(case) == {"/opt/python": "/usr/bin/python3.11"}
    case.prove()
    with pytest.raises(errors.NotEnforceableError, match="covers"):
        compiled(read("/usr/bin/python3.11"), GrantedPath("/usr/bin/python3.11", "file"))


def test_link_out_of_a_granted_directory_asks_for_its_target() -> None:
    inner = GrantedPath("/opt/a/link", "dir", real="/opt/b", links=(("/opt/a/link", "../b"),))
    with pytest.raises(errors.NotEnforceableError, match="leads to `/opt/b`, which is not granted") as refusal:
        compiled(read("/opt/a", "/opt/a/link"), inner)
    assert refusal.value.hint == "grant `/opt/b` as well"
    # The fix.
    case = compiled(read("/opt/a", "/opt/a/link", "/opt/b"), inner)
    assert places(case) == ["/opt/a", "/opt/b"]
    case.prove()


@pytest.mark.parametrize(
    ("name", "real", "link"),
    [
        ("/opt/x", "/tmp/x", "/opt/x"),
        ("/tmp/x", "/opt/b", "/tmp/x"),
        ("/opt/x", "/workspace/x", "/opt/x"),
        ("/opt/x/y", "/opt/b", "/sys/y"),
    ],
)
def test_link_that_meets_our_places_is_refused(name: str, real: str, link: str) -> None:
    with pytest.raises(errors.NotEnforceableError, match="collides with"):
        compiled(read(name), GrantedPath(name, "dir", real=real, links=((link, real),)))


def test_explain_shows_link_with_its_cause() -> None:
    explained = {one.rule: one for one in report.explain(compiled(FOLLOWED).artefacts, where=str)}
    one = explained[next(rule for rule in explained if rule.endswith(f"link{LINK}"))]
    assert (one.says, one.key) == ("link to ../../../etc/ssl/certs", "permissions.filesystem.read[0]")


@pytest.mark.parametrize("path", [LINK, f"{LINK}/ca.pem", REAL, f"{REAL}/ca.pem"])
def test_why_knows_both_names(path: str) -> None:
    answer = ask(files.Open(path), Sight(compiled(FOLLOWED).prove().found))
    assert answer.allowed, answer
    assert not ask(files.Open(path, write=True), Sight(compiled(FOLLOWED).prove().found)).allowed


def put(index: int, **changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["root"]["links"][index].update(changes)


def add(path: str, target: str) -> Callable[[Documents], None]:
    def edit(d: Documents) -> None:
        listed = d["mounts.json"]["root"]["links"]
        listed.append({"path": path, "target": target})
        listed.sort(key=lambda one: one["path"])
        d["provenance.json"]["rules"][f"mounts.json:link{path}"] = {"key": "agent.entry", "kind": "manifest"}

    return edit


FAULTS: dict[str, tuple[Callable[[Documents], None], str]] = {
    "another target": (put(0, target="/opt/a"), "names|missing|more|less"),
    "a target that is nowhere": (put(0, target="/etc/shadow"), "names|more|less"),
    "a link more": (add("/opt/z", "/opt/a"), "as link /opt/z|names"),
    "a link before the interpreter": (add("/usr/bin", "/opt/a"), "would be behind it"),
    "a link before a mount": (add("/opt", "/srv"), "would be behind it"),
    "a link at the root": (add("/", "/opt/a"), "would be behind it|not absolute"),
    "a link in the scratch": (add("/tmp/x", "/opt/a"), "lies in the mount"),
    "a link in the package": (add("/workspace/x", "/opt/a"), "lies in the mount"),
    "a link into the scratch": (add("/opt/z", "../tmp/x"), "leads into the mount"),
    "a link into the package": (add("/opt/z", "/workspace"), "leads into the mount"),
    "a link into /proc": (add("/opt/z", "/proc/self/root"), "leads into the mount"),
    "a loop": (add("/opt/z", "z"), "too many links"),
    "an empty target": (put(0, target=""), "no text of a link"),
    "a NUL": (put(0, target="/opt/a\0b"), "no text of a link"),
    "a lone surrogate": (put(0, target="/opt/\ud800"), "no text of a link"),
    "a number": (put(0, target=7), "target"),
    "a relative path": (put(0, path="usr/lib"), "not absolute and normalised"),
    "twice": (lambda d: d["mounts.json"]["root"]["links"].append(dict(d["mounts.json"]["root"]["links"][0])), "sorted"),
    "a key more": (put(0, mode=4095), "mode"),
    "no link": (lambda d: d["mounts.json"]["root"].update(links=[]), "there is none"),
    "no list": (lambda d: d["mounts.json"]["root"].update(links={}), "links"),
    "no cause": (lambda d: d["provenance.json"]["rules"].pop(f"mounts.json:link{LINK}"), "has no cause"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_falsified_link_is_no_proof(name: str) -> None:
    case = compiled(FOLLOWED)
    case.prove()
    edit, why = FAULTS[name]
    with pytest.raises((errors.ProofError, errors.ArtefactError), match=why):
        case.prove(case.falsified(edit))


def test_program_by_a_link_is_started_by_both_names() -> None:
    """Its closure has the links on the way."""
    base = proof_kit.host()
    found = sample.closure("/bin/sh", "/usr/bin/dash")
    linked = type(found)(
        found.name,
        found.entry,
        (
            *found.files,
            ClosureFile("/bin", "symlink", target="usr/bin"),
            ClosureFile("/usr/bin/sh", "symlink", target="dash"),
        ),
    )
    facts = structs.replace(base, executables={**base.executables, "/bin/sh": linked})
    case = proof_kit.case(sample.manifest(more='[permissions.executables]\nallow = ["/bin/sh"]\n'), facts)
    sight = Sight(case.prove().found, closures=[*facts.runtimes.values(), *facts.executables.values()])
    assert [ask(files.Execute(path), sight).allowed for path in ("/bin/sh", "/usr/bin/sh", "/usr/bin/dash")] == [
        True
    ] * 3
    assert not ask(files.Execute("/usr/bin/bash"), sight).allowed
