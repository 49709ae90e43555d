"""``policy why``: answers come from compiled artefacts, and what to add makes the answer yes."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from msgspec import structs

from policy import errors
from policy.compile.mounts import ANCHORS
from policy.decompile import read
from policy.grants.effective import Effective
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants
from policy.grants.syscalls import SyscallSet
from policy.host import Closure, ClosureFile, GrantedPath
from policy.manifest import parse
from policy.why import ask, files, kernel
from policy.why import sight as sights
from tests.unit.policy.compile import sample

GRANTS = """
[permissions.filesystem]
read = ["/srv/data"]
[permissions.syscalls]
allow = ["getcpu"]
[permissions.executables]
allow = ["/usr/bin/grep"]
[permissions.credentials]
grants = ["key"]
"""
CLOSURE = Closure(
    "python3",
    "/usr/bin/python3.11",
    (
        ClosureFile("/lib", "symlink", target="usr/lib/../lib/python3.11"),
        ClosureFile("/usr/bin/python3", "symlink", target="python3.11"),
        ClosureFile("/usr/lib/python3.11/os.py", "file"),
    ),
)


def sight(more: str = "", *, filesystem: str = "ephemeral", **given: object) -> ask.Sight:
    compiled = sample.compiled(sample.manifest(more=more, filesystem=filesystem))
    return ask.Sight(read.read(compiled.files), ("main.py", "lib/a.py"), (CLOSURE,), **given)  # type: ignore[arg-type]


def test_trust_anchors_come_with_a_network() -> None:
    base = f'[root]\nbase = "system@sha256:{"0" * 64}"\n'
    for network, more, yes in (("off", "", False), ("full", "", True), ("full", base, False)):
        manifest = sample.manifest(network=network, more=more)
        seen = sights.of(sample.compiled(manifest), manifest, files=(), host=sample.host(), never={})
        answers = [ask.ask(files.Open(path), seen).allowed for path in ANCHORS]
        assert answers == [yes, yes], (network, more)


MUCH = sight(GRANTS)
LEAST = sight(filesystem="read-only-package")


def test_resolver_is_seen_where_names_are_resolved() -> None:
    table = sample.entries(("api.example.com", "[80]", "tcp"))
    named = ask.Sight(read.read(sample.compiled(sample.manifest(network="full", more=table)).files), (), (CLOSURE,))
    for question, yes in ((files.Open("/etc/resolv.conf"), True), (files.Open("/etc/resolv.conf", write=True), False)):
        answer = ask.ask(question, named)
        assert (answer.allowed, "the gateway" in answer.because) == (yes, True), answer
    assert not ask.ask(files.Open("/etc/resolv.conf"), MUCH).allowed


@pytest.mark.parametrize(
    ("question", "yes", "because"),
    [
        (files.Open("/srv/data/x"), True, "/srv/data is mounted read-only"),
        (files.Open("/srv/data", write=True), False, "/srv/data is mounted read-only"),
        (files.Open("/srv/data2"), False, "does not exist there"),
        (files.Open("/workspace/lib/a.py"), True, "the package is mounted there"),
        (files.Open("/workspace/lib"), True, "the package is mounted there"),
        (files.Open("/workspace/li"), False, "the package has no such file"),
        (files.Open("/workspace/main.py", write=True), False, "the package is mounted read-only"),
        (files.Open("/tmp/x", write=True), True, "a scratch of"),
        (files.Open("/usr/lib/python3.11/os.py"), True, "closure of python3"),
        (files.Open("/usr/lib/python3.11/os.py", write=True), False, "read-only root"),
        (files.Open("/usr/lib/python3.11/os"), False, "does not exist there"),
        (files.Open("/etc/shadow"), False, "does not exist there"),
        (files.Open("/etc/passwd"), True, "the agent's uid has the name agent"),
        (files.Open("/proc/self/status"), True, "nothing of the host"),
        (files.Open("/dev/null"), True, "nothing of the host"),
        (files.Open("/dev/null", write=True), True, "nothing of the host"),
        (files.Open("/dev/kmsg", write=True), False, "read-only"),
        (files.Open("/proc/self/comm", write=True), True, "nothing of the host"),
        (files.Open("/proc/sys/kernel/hostname", write=True), False, "read-only"),
        (files.Open("/srv"), True, "what leads to /srv/data"),
        (files.Open("/"), True, "read-only root"),
        (files.Open("/srv", write=True), False, "read-only root"),
        (files.Open("/lib/os.py"), True, "closure of python3"),
        (files.Open("/lib/etc/os.py"), False, "does not exist there"),
        (files.Open("/sys"), True, "empty mount"),
        (files.Open("/sys", write=True), False, "empty mount"),
        (files.Open("/dev/net/tun"), False, "empty mount"),
        (files.Execute("/usr/bin/python3.11"), True, "started again"),
        (files.Execute("/usr/bin/python3"), True, "started again"),
        (files.Open("/sys/kernel"), False, "empty mount"),
        (files.Execute("/usr/bin/grep"), True, "with content sha256:"),
        (files.Execute("/usr/bin/cat"), False, "nothing else in the root"),
        (kernel.Call("getcpu"), True, "the filter allows it"),
        (kernel.Call("clone"), True, "argument 0 & 0x7e020000 is 0x0"),
        (kernel.Call("clone3"), False, "ENOSYS"),
        (kernel.Call("ptrace"), False, "EPERM"),
        (kernel.Credential("key"), True, "covers it"),
        (kernel.Credential("other"), False, "does not cover it"),
        (kernel.Connect("example.org", 443), False, "loopback"),
        (kernel.Connect("2001:db8::1", 53, "udp"), False, "loopback"),
    ],
)
def test_artefacts_answer(question: ask.Question, yes: bool, because: str) -> None:
    answer = ask.ask(question, MUCH)
    assert (answer.allowed, because in answer.because) == (yes, True), answer


FILE = "/srv/list"


def beside_a_file(table: str = "read") -> ask.Sight:
    """A granted file beside a granted directory."""
    facts = sample.host(room_mb=5)
    granted = {**facts.granted, FILE: GrantedPath(FILE, "file", 5)}
    lists = f'read = ["/srv/data", "{FILE}"]' if table == "read" else f'read = ["/srv/data"]\nwrite = ["{FILE}"]'
    more = f"[permissions.filesystem]\n{lists}\n"
    found = sample.manifest(more=more, filesystem="host" if table == "write" else "ephemeral")
    compiled = sample.compiled(found, structs.replace(facts, granted=granted))
    return ask.Sight(read.read(compiled.files), ("main.py",), (CLOSURE,))


@pytest.mark.parametrize("table", ["read", "write"])
@pytest.mark.parametrize("write", [False, True])
def test_nothing_lies_below_granted_file(table: str, write: bool) -> None:
    seen = beside_a_file(table)
    assert ask.ask(files.Open(FILE, write), seen).allowed == (not write or table == "write")
    for path in (f"{FILE}/x", f"{FILE}/x/y"):
        answer = ask.ask(files.Open(path, write), seen)
        assert not answer.allowed
        assert "is a file, and nothing lies below a file (ENOTDIR)" in answer.because
        # No line of a manifest can change that.
        assert (answer.add, answer.never) == ((), answer.because)
    # In the directory; and where a name only begins as the file's does, another reason.
    assert ask.ask(files.Open("/srv/data/list/x"), seen).allowed
    assert "ENOTDIR" not in ask.ask(files.Open(f"{FILE}2/x"), seen).because
    assert ask.ask(files.Execute(f"{FILE}/x"), seen).add == ()


@pytest.mark.parametrize(
    "path",
    [
        *("/workspace/main.py/x", "/usr/lib/python3.11/os.py/x", "/lib/os.py/x", "/dev/null/x", "/dev/pts/0/x"),
        *("/proc/self/comm/x", "/proc/1/task/1/environ/x"),
    ],
)
def test_nothing_lies_below_any_known_file(path: str) -> None:
    assert ask.ask(files.Open(path.removesuffix("/x")), MUCH).allowed
    assert not ask.ask(files.Open(path), MUCH).allowed


@pytest.mark.parametrize("path", ["/srv/data/../x", "/srv/list/", "/srv//data", "/srv/./data", "srv", ""])
def test_path_not_normal_is_refused(path: str) -> None:
    with pytest.raises(errors.UsageError):
        files.Open(path)
    with pytest.raises(errors.UsageError):
        files.Execute(path)


@pytest.mark.parametrize(
    ("question", "never"),
    [
        (files.Open("/proc/1/mem", write=True), "/proc"),
        (files.Open("/etc/shadow"), "/etc/shadow"),
        (files.Open("/etc/hosts", write=True), "/etc"),
        (files.Open("/workspace/main.py", write=True), "signed"),
        (files.Execute("/workspace/main.py"), "entry"),
        (files.Open("/srv/home/x"), "Covenant's own"),
        (kernel.Call("ptrace"), "another process"),
        (kernel.Call("clone3"), "pointer"),
        (kernel.Connect("224.0.0.1", 53), "no single destination"),
        (kernel.Connect("localhost", 80), "single label"),
        (kernel.Connect("www.localhost", 80), "this machine"),
    ],
)
def test_what_nobody_can_be_granted_says_why(question: ask.Question, never: str) -> None:
    answer = ask.ask(question, structs.replace(LEAST, never={"/srv/home": "it is Covenant's own"}))
    assert not answer.allowed
    assert never in answer.never
    assert answer.add == ()


@pytest.mark.parametrize(
    "question",
    [
        files.Open("/srv/data/x"),
        files.Open("/tmp/x", write=True),
        files.Execute("/usr/bin/grep"),
        kernel.Call("getcpu"),
        kernel.Credential("key"),
        kernel.Connect("example.org", 443),
        kernel.Connect("192.0.2.7", 8080),
        kernel.Connect("2001:db8::1", 53, "udp"),
        kernel.Connect("::ffff:10.0.0.1", 80),
        kernel.Connect("2001:0DB8::1", 80),
    ],
)
def test_what_it_says_to_add_makes_answer_yes(question: ask.Question) -> None:
    denied = ask.ask(question, LEAST)
    assert not denied.allowed
    tables = tomllib.loads("\n".join(denied.add))
    mode = tables.get("sandbox", {}).get("filesystem", "read-only-package")
    network = tables.get("resources", {}).get("network", "off")
    changes = ("[sandbox]", "filesystem =", "[resources]", "network =")
    more = "\n".join(line for line in denied.add if not line.startswith(changes))
    filled = sample.TOML.format(more=more, resources="", filesystem=mode, runtime="python3")
    manifest = parse.parse(filled.replace('network = "off"', f'network = "{network}"').encode())
    host = sample.host(granted={"/srv/data/x": GrantedPath("/srv/data/x", "file")})
    found = read.read(sample.compiled(manifest, host).files)
    assert ask.ask(question, ask.Sight(found)).allowed


@pytest.mark.parametrize(
    ("question", "beside", "there"),
    [
        (
            files.Execute("/usr/bin/cat"),
            'allow = ["/usr/bin/grep"]',
            "has allow of [permissions.executables]: put the new items into its list",
        ),
        (
            kernel.Connect("example.org", 443),
            'network = "off"',
            "has network of [resources]: replace its value",
        ),
        (
            files.Open("/srv/other", write=True),
            "[permissions.filesystem]",
            "has [permissions.filesystem]: write write below it",
        ),
    ],
)
def test_what_manifest_has_already_is_named_by_its_line(question: ask.Question, beside: str, there: str) -> None:
    manifest = sample.manifest(more=GRANTS)
    line = manifest.source.text.split("\n").index(beside) + 1
    found = ask.ask(question, structs.replace(sight(GRANTS), manifest=manifest))
    assert f"agent.toml:{line} {there}" in found.there
    assert found.document()["there"] == list(found.there)


def test_who_is_above_is_asked_same() -> None:
    parent = replace(Effective.bottom(), network=Network.of([("*.example.org", [(443, 443)], "tls")]))
    bounds = {"parent `boss`": parent, "role `all`": Effective.top()}
    for host, by_parent in (("a.example.org", True), ("example.org", False)):
        answer = ask.ask(kernel.Connect(host, 443), structs.replace(LEAST, bounds=bounds))
        assert answer.bounds == {"parent `boss`": by_parent, "role `all`": True}


@pytest.mark.parametrize(
    ("question", "grants"),
    [
        (files.Open("/a/b", write=True), {"filesystem": FilesystemGrants.of("host", write=["/a"])}),
        (files.Open("/a/b"), {"filesystem": FilesystemGrants.of("host", write=["/a"])}),
        (kernel.Call("read"), {"syscalls": SyscallSet.of(["read"])}),
    ],
)
def test_set_of_grants_is_asked_by_its_domain(question: ask.Question, grants: dict[str, object]) -> None:
    assert question.granted(replace(Effective.bottom(), **grants))  # type: ignore[arg-type]
    assert not question.granted(Effective.bottom())


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a/", "//a", "", "/a\0b"])
def test_path_is_asked_in_its_one_spelling(path: str) -> None:
    with pytest.raises(errors.UsageError):
        files.Open(path)
    with pytest.raises(errors.UsageError):
        files.Execute(path)


@pytest.mark.parametrize(
    ("host", "port"), [("*.example.org", 1), ("10.0.0.0/8", 1), ("a b", 1), ("a.org", 0), ("a.org", 65536)]
)
def test_one_destination_is_asked_about(host: str, port: int) -> None:
    with pytest.raises(errors.UsageError):
        ask.ask(kernel.Connect(host, port), LEAST)


def test_what_is_allowed_is_not_called_never_grantable() -> None:
    # Without a table every name is resolved, also one that no entry could name.
    compiled = sample.compiled(sample.manifest(network="full"))
    answer = ask.ask(kernel.Connect("localhost", 443), ask.Sight(read.read(compiled.files)))
    assert (answer.allowed, answer.never) == (True, "")


def test_misspelt_call_is_named() -> None:
    with pytest.raises(errors.UnknownSyscallError) as caught:
        ask.ask(kernel.Call("opneat"), LEAST)
    assert "openat" in caught.value.hint
