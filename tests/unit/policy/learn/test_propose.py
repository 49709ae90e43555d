"""Proposals from observations: what is collapsed, what is left out, and the evidence of each line."""

from __future__ import annotations

import errno
from typing import Any

from msgspec import structs

from policy import data, denials
from policy.learn import presets
from policy.learn.ceiling import Ceiling, Directory, HostPlace
from policy.learn.observed import Observed, SeenAccess, access
from policy.learn.propose import LearntProposal, propose

CEILING = Ceiling(
    reads=("/srv/docs",),
    volumes=("/data",),
    workspace=HostPlace("/home/ann/project", "/work"),
    programs=True,
    trees=frozenset({"root"}),
    reach=True,
    never=data.never_grantable().trees,
    directories={
        "/srv/docs": Directory(40),
        "/srv/docs/all": Directory(4),
        "/home/ann/project": Directory(5),
        "/home/ann/project/keys": Directory(3, sensitive=True),
    },
)


def seen(*paths: str, kind: Any = "open", **fields: Any) -> Observed:
    made = Observed()
    for number, path in enumerate(paths):
        made.saw(SeenAccess(kind, path, "python3", 1_000 + number, **fields))
    return made


def values(found: LearntProposal, key: str) -> list[str]:
    return [line.value for line in found.lines if line.key == key]


def test_single_files_stay_single() -> None:
    found = propose(seen("/srv/docs/a", "/srv/docs/b/c", "/usr/lib/libc.so.6", "/proc/stat", "/tmp/x"), CEILING, {})
    assert values(found, "read") == ["/srv/docs/a", "/srv/docs/b/c"]
    assert found.used == {"/usr/lib/libc.so.6"}


def test_workspace_file_is_granted_at_own_place() -> None:
    found = propose(seen("/work/app.py"), CEILING, {})
    assert values(found, "read") == ["/home/ann/project/app.py"]
    assert found.workspace is None


def test_written_workspace_is_one_grant() -> None:
    observed = seen("/work/app.py", "/work/lib.py")
    observed.saw(SeenAccess("open", "/work/out", "cc", 2_000, writes=True))
    found = propose(observed, CEILING, {})
    assert values(found, "read") == []
    assert found.workspace is not None
    assert (found.workspace.value, found.workspace.count, found.workspace.paths) == ("/home/ann/project", 3, 3)
    assert found.workspace.note == "1 of them opened to write"


def test_many_files_become_directory() -> None:
    paths = [f"/srv/docs/all/{n}" for n in range(9)]
    assert values(propose(seen(*paths[:8]), CEILING, {}), "read") == paths[:8]
    assert values(propose(seen(*paths), CEILING, {}), "read") == ["/srv/docs/all"]


def test_unit_is_taken_as_whole() -> None:
    ceiling = Ceiling(
        reads=("/srv",), directories={"/srv/.git": Directory(9), "/srv/b/.git": Directory(9, sensitive=True)}
    )
    found = propose(seen("/srv/.git/objects/7f/39", "/srv/b/.git/HEAD"), ceiling, {})
    assert values(found, "read") == ["/srv/.git", "/srv/b/.git/HEAD"]


def test_listed_directory_needs_half() -> None:
    for opened, wanted in ((2, ["/srv/docs/all"]), (1, ["/srv/docs/all/0"]), (0, ["/srv/docs/all"])):
        observed = seen(*(f"/srv/docs/all/{n}" for n in range(opened)))
        observed.saw(SeenAccess("open", "/srv/docs/all", "ls", 5_000, lists=True))
        assert values(propose(observed, CEILING, {}), "read") == wanted, opened


def test_sensitive_is_neither_granted_nor_covered() -> None:
    paths = [f"/work/keys/{n}" for n in range(20)]
    observed = seen(*paths, "/work/.env", "/work/.ssh/config", "/work/keys/server.key")
    observed.saw(SeenAccess("open", "/work/keys", "ls", 5_000, lists=True))
    found = propose(observed, CEILING, {})
    assert set(values(found, "read")) == {path.replace("/work", "/home/ann/project") for path in paths}
    left = {one.what for one in found.left_out}
    assert left == {f"/home/ann/project/{name}" for name in (".env", ".ssh/config", "keys/server.key")}


def test_sensitive_file_named_itself_is_granted() -> None:
    ceiling = Ceiling(reads=("/srv/ca.pem",))
    assert values(propose(seen("/srv/ca.pem"), ceiling, {}), "read") == ["/srv/ca.pem"]


def test_link_is_granted_by_its_target() -> None:
    links = {"/srv/docs/in": "/srv/docs/a", "/srv/docs/out": "/home/ann/mail", "/srv/docs/keys": "/srv/docs/x.key"}
    found = propose(seen(*links), Ceiling(reads=("/srv/docs",), links=links), {})
    assert values(found, "read") == ["/srv/docs/a"]
    assert {one.what for one in found.left_out} == {"/srv/docs/out", "/srv/docs/keys"}


def test_never_granted_is_left_out() -> None:
    ceiling = Ceiling(reads=("/etc", "/root"), never=data.never_grantable().trees)
    found = propose(seen("/etc/shadow", "/etc/hosts", "/root/.ssh/id"), ceiling, {})
    assert values(found, "read") == ["/etc/hosts"]
    assert {one.what for one in found.left_out} == {"/etc/shadow", "/root/.ssh/id"}
    assert all(one.why.startswith("never granted: ") for one in found.left_out)


def test_program_is_granted_by_called_path() -> None:
    observed = seen("/usr/bin/sh", "/usr/bin/tool", kind="exec")
    for path in ("/usr/bin/dash", "/usr/bin/python3.11"):
        observed.saw(SeenAccess("load", path, "make", 2_000))
    found = propose(observed, CEILING, {"/usr/bin/sh": "/usr/bin/dash"})
    # A script's interpreter is no target of a call.
    assert values(found, "executables") == ["/usr/bin/sh", "/usr/bin/python3.11", "/usr/bin/tool"]


def test_program_of_init_is_no_grant() -> None:
    observed = Observed()
    observed.saw(SeenAccess("exec", "/usr/bin/python3", "init", 1_000))
    observed.saw(SeenAccess("load", "/usr/bin/python3.11", "init", 1_000))
    assert propose(observed, CEILING, {"/usr/bin/python3": "/usr/bin/python3.11"}).lines == ()
    # The entry is a script: what it is for is started too.
    assert values(propose(observed, CEILING, {}), "executables") == ["/usr/bin/python3.11"]


def test_interpreter_of_script_is_granted() -> None:
    observed = seen("/work/tool.sh", kind="exec")
    observed.saw(SeenAccess("exec", "/usr/bin/npm", "init", 2_000))
    scripts = {"/work/tool.sh": "/bin/sh", "/usr/bin/npm": "/usr/bin/env", "/usr/bin/never": "/usr/bin/python3"}
    found = propose(observed, CEILING, {"/bin/sh": "/usr/bin/dash"}, scripts)
    assert values(found, "executables") == ["/bin/sh", "/usr/bin/env"]


def test_program_of_scratch_needs_root() -> None:
    found = propose(seen("/tmp/built", "/usr/bin/cc", kind="exec"), CEILING, {})
    assert values(found, "executables") == ["root"]


def test_link_of_scratch_widens_no_list() -> None:
    """A program that is called by a link of /tmp is granted by its own place: the whole root is beyond a list."""
    observed = seen("/tmp/link", "/usr/bin/cc", kind="exec")
    observed.saw(SeenAccess("load", "/usr/bin/tool", "sh", 2_000))
    listed = structs.replace(CEILING, trees=frozenset({"layer:tools"}))
    found = propose(observed, listed, {})
    assert values(found, "executables") == ["/usr/bin/cc", "/usr/bin/tool"]
    assert [one.what for one in found.left_out] == ["/tmp/link"]
    # Control: where the whole root is granted, the same run needs it.
    assert values(propose(observed, CEILING, {}), "executables") == ["root"]


def test_made_up_program_is_left_out() -> None:
    """An agent can write a path that the kernel does not start between two looks."""
    observed = seen("/usr/bin/sh", "/usr/sbin/nft", kind="exec")
    ceiling = structs.replace(CEILING, trees=frozenset(), strange=frozenset({"/usr/sbin/nft"}))
    found = propose(observed, ceiling, {})
    assert values(found, "executables") == ["/usr/bin/sh"]
    assert [(one.what, one.why) for one in found.left_out] == [("/usr/sbin/nft", "the ceiling does not start it")]


def test_programs_beyond_ceiling_are_left_out() -> None:
    found = propose(seen("/usr/bin/cc", kind="exec"), Ceiling(), {})
    assert (found.lines, [one.what for one in found.left_out]) == ((), ["/usr/bin/cc"])


def test_hosts_name_their_preset() -> None:
    observed = Observed()
    observed.reached("pypi.org:443/tls", 3, 1_000)
    observed.ended("run", "", [denials.Row(denials.Denial("dns", "evil.example.com", "name_not_granted"), 2)], 1_000)
    found = propose(observed, CEILING, {})
    assert [(line.value, line.count, line.note) for line in found.hosts] == [
        ("pypi.org:443", 3, "preset pypi; not reached: files.pythonhosted.org")
    ]
    assert [one.what for one in found.left_out] == ["evil.example.com"]
    closed = propose(observed, Ceiling(), {})
    assert (closed.hosts, {one.what for one in closed.left_out}) == ((), {"pypi.org:443/tls", "evil.example.com"})


def test_write_below_volume_is_counted_once() -> None:
    observed = Observed()
    observed.saw(SeenAccess("open", "/data/x", "cc", 1_000, writes=True))
    (line,) = propose(observed, Ceiling(volumes=("/data",)), {}).volumes
    assert (line.value, line.count, line.paths) == ("/data", 1, 1)


def test_directory_that_is_only_opened_is_no_file() -> None:
    """Its grant would be one of all below it."""
    facts = {"/srv/keys": Directory(3, sensitive=True), "/srv/plain": Directory(3)}
    ceiling = Ceiling(reads=("/srv",), directories=facts)
    assert values(propose(seen("/srv/keys", "/srv/plain", "/srv/file"), ceiling, {}), "read") == [
        "/srv/file",
        "/srv/plain",
    ]


def test_path_above_one_that_is_never_granted() -> None:
    found = propose(seen("/etc"), Ceiling(reads=("/etc",), never={"/etc/shadow": "it holds passwords"}), {})
    assert found.reads == ()
    assert [one.why for one in found.left_out] == ["it holds /etc/shadow, which is never granted"]


def test_address_that_kernel_counts_is_no_destination() -> None:
    """It is that of a name; only an address that was named is granted."""
    observed = Observed()
    observed.saw(SeenAccess("connect", "10.8.0.7:5432", "psql", 1_000))
    observed.reached("10.8.0.7:5432/tcp", 1, 1_000)
    observed.reached("10.8.0.9:80/tcp", 2, 1_000)
    ceiling = Ceiling(hosts=("db.example.com:5432", "10.8.0.9:80"), reach=True)
    assert values(propose(observed, ceiling, {}), "network") == ["10.8.0.9:80", "db.example.com:5432"]


def test_forwarded_host_is_known_by_its_port() -> None:
    ceiling = Ceiling(hosts=("db.example.com:5432", "10.0.0.7:22", "10.0.0.8:22", "web.example.com:80"), reach=True)
    observed = seen("93.184.216.34:5432", "10.0.0.7:22", "127.0.0.1:80", "10.0.0.9:25", kind="connect")
    found = propose(observed, ceiling, {})
    assert [line.value for line in found.hosts] == ["10.0.0.7:22", "db.example.com:5432"]


def test_hidden_character_is_left_out() -> None:
    found = propose(seen('/srv/docs/a\n"\nroot = 1', "/srv/docs/\udcff"), CEILING, {})
    assert found.lines == ()
    assert len(found.left_out) == 2


def test_name_that_no_manifest_holds_is_left_out() -> None:
    names = ("[id].tsx", "cafe\u0301", "a\\b", "p\u0430y", "a\u2215b", " a", "\udcff")
    found = propose(seen(*(f"/srv/docs/{name}" for name in (*names, "会議", "caf\u00e9"))), CEILING, {})
    assert values(found, "read") == ["/srv/docs/caf\u00e9", "/srv/docs/会議"]
    assert sorted(one.what for one in found.left_out) == sorted(f"/srv/docs/{name}" for name in names)
    # The fix: its directory.
    whole = structs.replace(CEILING, reads=("/srv/docs/all",))
    found = propose(seen(*(f"/srv/docs/all/{n}" for n in range(9)), "/srv/docs/all/[id].tsx"), whole, {})
    assert (values(found, "read"), found.left_out) == (["/srv/docs/all"], ())
    assert [line.paths for line in found.lines] == [10]


def test_name_of_bytes_is_judged_as_sensitive() -> None:
    assert [presets.is_sensitive(f"/home/ann/\udcff{name}") for name in ("", "/.ssh/id_rsa")] == [False, True]


def test_failed_access_proposes_nothing() -> None:
    observed = seen("/srv/docs/a", errno=errno.ENOENT)
    assert propose(observed, CEILING, {}).lines == ()
    assert [path for path, _ in observed.failed(errno.ENOENT)] == ["/srv/docs/a"]


def test_written_volume_is_kept() -> None:
    assert values(propose(seen("/data/db", writes=True), CEILING, {}), "write") == ["/data"]
    assert values(propose(seen("/srv/docs/a"), CEILING, {}), "write") == []


def test_observed_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr("policy.learn.observed.LARGEST", 2)
    observed = seen("/a", "/b", "/c", "/a")
    observed.saw(SeenAccess("lost", ""))
    assert ([path for path, _ in observed.succeeded("open")], observed.missed) == (["/a", "/b"], 2)


def test_access_joins_folder() -> None:
    joined = [access("open", path, "/work/sub") for path in ("x", "../y", "/z/./w", "", "a\0b", "//q")]
    assert [one and one.path for one in joined] == ["/work/sub/x", "/work/y", "/z/w", None, None, "/q"]


def test_presets_have_reasons_and_known_names() -> None:
    learning = data.learning()
    assert all(one.reason and one.hosts for one in learning.presets.values())
    assert all(learning.sensitive.values())
    assert presets.is_sensitive("/home/ann/.ssh/known_hosts")
    assert presets.is_sensitive("/home/ann/.ssh")
    assert not presets.is_sensitive("/home/ann/project/ssh.py")
