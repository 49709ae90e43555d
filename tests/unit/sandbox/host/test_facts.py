"""Check the host facts of this machine and of sample mount tables, and the files that a manifest makes them look up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy import errors
from policy.host import HostFacts
from policy.manifest import parse
from sandbox import config as configuration
from sandbox.config import Config
from sandbox.host import facts as host_facts
from sandbox.host import memory as host_memory
from sandbox.kernel import small_files
from sandbox.kernel.cgroup import cgroup
from sandbox.rootfs import loader_patch
from tests.unit.sandbox import tiny_elf

MANIFEST = """
[agent]
id = "a"
name = "a"
version = "1"
runtime = "rust-bin"
entry = "main"
[resources]
network = "off"
[sandbox]
required = true
backend = "linux-gvisor"
[permissions.filesystem]
read = [{read}]
[permissions.executables]
allow = [{allow}]
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    return Config(state=state, path_owners=(os.getuid(),) if os.getuid() else ())


def _look(config: Config, *, read: str = "", allow: str = "", entry: bytes | None = None) -> HostFacts:
    manifest = parse.parse(MANIFEST.format(read=read, allow=allow).encode())
    package = {"main": tiny_elf.build(kind=2) if entry is None else entry}
    return host_facts.for_manifest(host_facts.probe(config), manifest, config=config, package=package)


def test_machine_s_own_facts(config: Config) -> None:
    facts = host_facts.probe(config)
    assert facts.kernel == os.uname().release
    assert facts.audience == config.host
    assert facts.cpus >= 1
    assert facts.memory_mb >= facts.memory_available_mb > 0
    assert facts.disk_free_mb > 0
    assert facts.pids_free > 0
    assert host_facts.probe(config).runsc == facts.runsc, "the second time from the record"


def test_missing_runsc_is_none_and_not_error(config: Config, tmp_path: Path) -> None:
    assert host_facts.probe(config.model_copy(update={"runsc": tmp_path / "no-runsc"})).runsc is None


def test_another_runsc_is_noticed(config: Config, tmp_path: Path) -> None:
    tool = tmp_path / "runsc"

    def write(version: str) -> None:
        (tmp_path / "new").write_text(f"#!/bin/sh\necho runsc version {version}\n")
        (tmp_path / "new").chmod(0o755)
        os.replace(tmp_path / "new", tool)

    mine = config.model_copy(update={"runsc": tool})
    if os.getuid() != 0:
        write("1")
        with pytest.raises(errors.HostError, match="belongs to uid"):
            host_facts.runsc_facts(mine)
        return
    write("release-20240101.0")
    first = host_facts.runsc_facts(mine)
    write("release-20250101.0")
    second = host_facts.runsc_facts(mine)
    assert (first.version, second.version) == ("release-20240101.0", "release-20250101.0")
    assert first.sha256 != second.sha256


def test_program_no_runsc_is_refused(config: Config) -> None:
    with pytest.raises(errors.HostError, match="--version"):
        host_facts.runsc_facts(config.model_copy(update={"runsc": Path("/usr/bin/false")}))


def test_granted_paths_are_found(config: Config) -> None:
    facts = _look(config, read='"/usr/share/doc", "/usr/bin/env"')
    assert {p: g.kind for p, g in facts.granted.items()} == {"/usr/share/doc": "dir", "/usr/bin/env": "file"}


def test_links_are_followed_for_reading_and_starting(config: Config) -> None:
    """Debian has /bin as a link, and ld.so as one to the loader."""
    facts = _look(config, read='"/bin/env"')
    found = facts.granted["/bin/env"]
    assert (found.place, found.links) == ("/usr/bin/env", (("/bin", "usr/bin"),))
    if X86:
        program = _look(config, allow='"/bin/env"').executables["/bin/env"]
        assert program.entry == "/usr/bin/env"
        assert ("/bin", "usr/bin") in {(f.path, f.target) for f in program.files}


@pytest.mark.parametrize("path", ["/root", "/etc", "/var"])
def test_never_grantable_paths_are_refused_with_their_line(config: Config, path: str) -> None:
    with pytest.raises(errors.NeverGrantableError) as refusal:
        _look(config, read=f'"/usr/share/doc", "{path}"')
    assert refusal.value.where == "agent.toml:14"


def test_every_path_and_program_that_cannot_be_granted_is_told(config: Config) -> None:
    with pytest.raises(errors.NeverGrantableError) as refusal:
        _look(config, read='"/root", "/usr/share/doc", "/nothing-there"', allow='"/nor-there"' if X86 else "")
    found = errors.each(refusal.value)
    assert [one.where for one in found] == ["agent.toml:14", "agent.toml:14", "agent.toml:16"][: len(found)]
    assert ["`/root`" in found[0].message, "`/nothing-there`" in found[1].message] == [True, True]
    assert len(found) == (3 if X86 else 2)


def test_what_opens_vault_is_never_granted(config: Config) -> None:
    """For any place that the operator chose; a systemd credential is not a path and is below /run."""
    for lines, path in (('key = "/srv/keys/vault"', "/srv/keys/vault"), ('token = "/srv/bao"', "/srv/bao")):
        made = configuration.parse(f"[vault]\n{lines}\n".encode(), file="config.toml", state=config.state)
        assert host_facts.never_granted(made)[path] == "it is Covenant's own"
    made = configuration.parse(b'[vault]\nkey = "credential:x"\n', file="config.toml", state=config.state)
    assert host_facts.never_granted(made) == host_facts.never_granted(config)


def test_our_own_code_and_state_are_never_granted(config: Config) -> None:
    never = host_facts.never_granted(config, ["/srv/home"])
    own = Path(host_facts.__file__).resolve().parents[2]
    assert {str(own / "policy"), str(own / "sandbox"), str(own / "covenant"), str(config.state), "/srv/home"} <= set(
        never
    )
    with pytest.raises(errors.NeverGrantableError):
        _look(config, read=f'"{own}"')


def test_entry_of_package_is_read_from_its_bytes(config: Config) -> None:
    assert _look(config).runtimes["rust-bin"].files == ()
    with pytest.raises(errors.ProgramError):
        _look(config, entry=b"#!/bin/sh\n")


# On other machines every grant of an executable is refused: see the last of these three tests.
X86 = os.uname().machine == "x86_64"


def test_granted_executable_comes_with_its_closure(config: Config) -> None:
    if not X86:
        with pytest.raises(errors.NotEnforceableError):
            _look(config, allow='"/usr/bin/env"')
        return
    found = _look(config, allow='"/usr/bin/env"').executables["/usr/bin/env"]
    assert found.entry == "/usr/bin/env"
    programs = {os.path.basename(f.path) for f in found.files if f.kind == "file" and f.mode & 0o111}
    assert programs == {"env", "ld-linux-x86-64.so.2"}
    digest = next(f.sha256 for f in found.files if f.path == found.entry)
    assert _look(config, allow=f'"/usr/bin/env@sha256:{digest}"').executables


@pytest.mark.parametrize(
    ("allow", "kind", "why"),
    [
        ('"/usr/bin/no-such-tool"', errors.GrantedPathError, "No such file"),
        ('"/usr/bin"', errors.GrantedPathError, "is a directory"),
        ('"/usr/bin/ldd"', errors.ProgramError, "is a script"),
        ('"/usr/share/common-licenses/GPL-3"', errors.ProgramError, "is not an ELF file"),
        (f'"/usr/bin/env@sha256:{"01" * 32}"', errors.ProgramError, "the manifest wants"),
    ],
)
def test_executable_that_cannot_be_granted(
    config: Config, allow: str, kind: type[errors.CovenantError], why: str
) -> None:
    with pytest.raises(kind if X86 else errors.NotEnforceableError, match=why if X86 else "aarch64") as refusal:
        _look(config, allow=allow)
    assert refusal.value.where == "agent.toml:16"


def test_executables_are_refused_where_loader_cannot_be_stopped(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for loader in (tmp_path / "no-room", tmp_path / "missing"):
        (tmp_path / "no-room").write_bytes(tiny_elf.build(padding=0))
        monkeypatch.setitem(loader_patch.LOADERS, os.uname().machine, str(loader))
        with pytest.raises(errors.NotEnforceableError, match="cannot be granted on this host") as refusal:
            _look(config, allow='"/usr/bin/env"')
        assert refusal.value.where == "agent.toml:16"


# --- cgroups: mount tables as they are seen -----------------------------------------------------------

V1 = "".join(
    f"{n} 1 0:{n} / {{root}}/{c} rw - cgroup cgroup rw,{c}\n"
    for n, c in enumerate(("cpu", "memory", "pids", "freezer"))
)
V2 = "41 1 0:41 / {root}/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("table", "controllers", "version", "swap"),
    [
        (V1 + V2, "hugetlb", 1, True),
        (V1, "", 1, True),
        (V2, "cpuset cpu io memory hugetlb pids rdma misc", 2, True),
        (V2, "cpu pids", 0, False),
        ("", "", 0, False),
    ],
)
def test_where_controllers_live(tmp_path: Path, table: str, controllers: str, version: int, swap: bool) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.memsw.limit_in_bytes").write_text("0")
    (tmp_path / "unified" / "child").mkdir(parents=True)
    (tmp_path / "unified" / "child" / "memory.swap.max").write_text("max")
    (tmp_path / "unified" / "cgroup.controllers").write_text(controllers)
    facts = host_facts.cgroup_facts(cgroup.Hierarchies.read(table.format(root=tmp_path)))
    assert (facts.version, facts.swap_accounting) == (version, swap)
    assert (version == 0) == (not facts.controllers)


@pytest.mark.parametrize(
    ("version", "name", "line"),
    [(1, "memory.limit_in_bytes", "7:pids:/other\n5:memory:/a/b\n"), (2, "memory.max", "0::/a/b\n")],
)
def test_what_may_be_promised_is_what_every_cgroup_above_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str, line: str
) -> None:
    """Rule 6: a supervisor in a service or container with a limit cannot promise the machine's whole memory."""
    text = small_files.text
    monkeypatch.setattr(small_files, "text", lambda path: line if path == "/proc/self/cgroup" else text(path))
    total = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    hierarchies = cgroup.Hierarchies(version, {"memory": tmp_path})
    inner, outer = tmp_path / "a" / "b", tmp_path / "a"
    inner.mkdir(parents=True)

    def given(outer_limit: str, inner_limit: str) -> int:
        (outer / name).write_text(outer_limit)
        (inner / name).write_text(inner_limit)
        return host_facts.capacity_mb(hierarchies)

    none = "max\n" if version == 2 else f"{(1 << 63) - 4096}\n"
    assert given(none, none) == total
    assert given(none, f"{300 << 20}\n") == 300
    assert given(f"{200 << 20}\n", f"{300 << 20}\n") == 200
    assert given(f"{1 << 62}\n", none) == total
    # The cgroup of another controller or at another place is not ours.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text("1048576\n")
    assert given(none, none) == total


@pytest.mark.parametrize(
    ("version", "names", "line"),
    [
        (1, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), "5:memory:/a/b\n"),
        (2, ("memory.max", "memory.current", "inactive_file"), "0::/a/b\n"),
    ],
)
def test_what_is_available_is_what_others_in_cgroups_above_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, names: tuple[str, str, str], line: str
) -> None:
    """Rule 6: if other processes use most of a slice, it has no room, for any memory of the machine."""
    text = small_files.text
    monkeypatch.setattr(small_files, "text", lambda path: line if path == "/proc/self/cgroup" else text(path))
    hierarchies, memory = cgroup.Hierarchies(version, {"memory": tmp_path}), host_memory.Memory(4000, 2000)
    inner, outer = tmp_path / "a" / "b", tmp_path / "a"
    inner.mkdir(parents=True)

    def holds(directory: Path, limit: int, used: int, old: int) -> None:
        for name, value in zip(names[:2], (limit, used), strict=True):
            (directory / name).write_text(f"{value << 20}\n")
        (directory / "memory.stat").write_text(f"anon 0\n{names[2]} {old << 20}\n")

    holds(inner, 3000, 100, 0)
    holds(outer, 3500, 200, 0)
    assert host_facts.available_mb(memory, hierarchies) == 2000, "the machine's own word, where that is less"
    holds(outer, 1024, 900, 0)
    assert host_facts.available_mb(memory, hierarchies) == 124
    holds(outer, 1024, 900, 300)
    assert host_facts.available_mb(memory, hierarchies) == 424
    holds(outer, 1024, 1100, 0)
    assert host_facts.available_mb(memory, hierarchies) == 0
    holds(outer, 1024, 900, 0)
    (outer / "memory.stat").unlink()
    assert host_facts.available_mb(memory, hierarchies) == 0, "what cannot be read is not promised"
