"""Layers of installed packages, on a small machine that the test builds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from policy import errors
from policy.layers import LayerEntry
from sandbox.layers import host_packages, presets, sources
from sandbox.layers.dpkg import Dpkg
from sandbox.layers.store import LayerStore

STATUS = """\
Package: shell
Status: install ok installed
Architecture: amd64
Version: 1.0-1
Pre-Depends: libc (>= 2.3), awk
Depends: virtual | other (<< 3) [linux-any],
 data:any (= 1), debconf (>= 0.5) | debconf-2.0
Description: a shell
 with more lines

Package: libc
Status: install ok installed
Architecture: amd64
Version: 2.36

Package: mawk
Status: install ok installed
Architecture: amd64
Version: 1
Provides: awk (= 1), virtual

Package: data
Status: hold ok installed
Architecture: all
Version: 1

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: broken
Status: install ok installed
Architecture: all
Version: 1
Depends: absent
"""


class Machine:
    """A root directory with a dpkg database."""

    def __init__(self, root: Path) -> None:
        self.root, self.admin = root, root / "var/lib/dpkg"
        for folder in ("usr/bin", "usr/lib", "var/lib/dpkg/info", "var/lib/dpkg/alternatives", "etc/alternatives"):
            (root / folder).mkdir(parents=True)
        (root / "bin").symlink_to("usr/bin")
        (root / "lib").symlink_to("usr/lib")
        (self.admin / "status").write_text(STATUS)
        for name in ("shell:amd64", "libc:amd64", "mawk", "data", "broken"):
            self.package(name, {})

    def package(self, name: str, files: Mapping[str, bytes | str], *also: str) -> None:
        sums = []
        for path, content in files.items():
            place = Path(f"{self.root}{path}")
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                place.symlink_to(content)
            else:
                place.write_bytes(content)
                sums.append(f"{hashlib.md5(content).hexdigest()}  {path[1:]}\n")
        lines = ["/.", *(os.path.dirname(path) for path in files), *files, *also]
        (self.admin / "info" / f"{name}.list").write_text("\n".join(lines) + "\n")
        (self.admin / "info" / f"{name}.md5sums").write_text("".join(sums))

    def layer(self, store: LayerStore, *names: str) -> dict[str, LayerEntry]:
        owners = [os.geteuid()]
        packed = store.pack(
            "own",
            "test",
            lambda pack: host_packages.fill(pack, names, admin=self.admin, root=str(self.root), owners=owners),
        )
        return {entry.path: entry for entry in store.listing(packed.ref)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


def test_dependencies_are_followed(machine: Machine) -> None:
    database = Dpkg(machine.admin)
    assert [one.name for one in database.closure(["shell"])] == ["data", "libc", "mawk", "shell"]
    assert "gone" not in database.installed


@pytest.mark.parametrize(("name", "missing"), [("absent", "absent"), ("gone", "gone"), ("broken", "absent")])
def test_missing_package_is_named(machine: Machine, name: str, missing: str) -> None:
    with pytest.raises(errors.LayerError, match=f"`{missing}`") as e:
        Dpkg(machine.admin).closure([name])
    assert e.value.hint == f"apt-get install {missing}"
    with pytest.raises(errors.LayerError) as e:
        Dpkg(machine.admin).closure(["$(x)"])
    assert "$" not in e.value.hint


def test_host_without_dpkg_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.LayerToolError) as e:
        Dpkg(tmp_path)
    assert "--from" in e.value.hint


def test_files_are_taken_with_the_links_on_the_way(machine: Machine, store: LayerStore) -> None:
    machine.package(
        "shell:amd64",
        {
            "/bin/shell": b"#!",
            "/lib/libx.so.1.2": b"so",
            "/lib/libx.so.1": "libx.so.1.2",
            "/usr/share/doc/shell/copyright": b"c",
            "/usr/share/man/man1/shell.1.gz": b"m",
            "/usr/share/docs": b"no documentation",
            "/etc/shell.conf": b"conf",
            "/etc/services": b"http 80/tcp\n",
        },
    )
    (machine.root / "usr/bin/shell").chmod(0o755)
    found = machine.layer(store, "shell")
    assert {path: entry.kind for path, entry in found.items() if entry.kind != "dir"} == {
        "/bin": "link",
        "/lib": "link",
        "/usr/bin/shell": "file",
        "/usr/lib/libx.so.1": "link",
        "/usr/lib/libx.so.1.2": "file",
        "/usr/share/docs": "file",
        "/etc/services": "file",
    }
    assert [found[path].executable for path in ("/usr/bin/shell", "/usr/lib/libx.so.1.2")] == [True, False]


def test_changed_file_is_refused_until_reinstalled(machine: Machine, store: LayerStore) -> None:
    machine.package("shell:amd64", {"/bin/shell": b"#!"})
    (machine.root / "bin/shell").write_bytes(b"changed")
    with pytest.raises(errors.LayerError, match="is not the file that dpkg installed") as e:
        machine.layer(store, "shell")
    assert e.value.hint == "apt-get install --reinstall shell"
    (machine.root / "bin/shell").unlink()
    with pytest.raises(errors.LayerError, match="is missing") as e:
        machine.layer(store, "shell")
    assert e.value.hint == "apt-get install --reinstall shell"
    machine.package("shell:amd64", {}, "/usr/lib/absent/shell")
    (machine.root / "shell").write_bytes(b"another file of that name")
    with pytest.raises(errors.LayerError, match="is missing"):
        machine.layer(store, "shell")
    machine.package("shell:amd64", {"/bin/shell": b"#!"})
    assert "/usr/bin/shell" in machine.layer(store, "shell")


def test_file_in_other_hands_is_refused(machine: Machine, store: LayerStore) -> None:
    machine.package("shell:amd64", {"/bin/shell": b"#!"})
    (machine.root / "bin/shell").chmod(0o666)
    with pytest.raises(errors.HostError) as e:
        machine.layer(store, "shell")
    assert "chmod go-w" in e.value.hint


def test_private_file_is_left_out_and_said(machine: Machine, store: LayerStore) -> None:
    machine.package("shell:amd64", {"/bin/shell": b"#!", "/usr/lib/key": b"secret"})
    (machine.root / "usr/lib/key").chmod(0o600)
    packed = store.pack(
        "own",
        "test",
        lambda pack: host_packages.fill(
            pack, ["shell"], admin=machine.admin, root=str(machine.root), owners=[os.geteuid()]
        ),
    )
    assert packed.notes == ("left out: /usr/lib/key (not every user may read it)",)
    assert "/usr/lib/key" not in {entry.path for entry in store.listing(packed.ref)}


def test_alternative_leads_to_a_program_of_the_layer(machine: Machine, store: LayerStore) -> None:
    machine.package("mawk", {"/usr/bin/mawk": b"awk"})
    for name, target in (("awk", "/usr/bin/mawk"), ("editor", "/usr/bin/vi")):
        (machine.root / "etc/alternatives" / name).symlink_to(target)
        (machine.admin / "alternatives" / name).write_text(
            f"auto\n/usr/bin/{name}\n{name}.1.gz\n/usr/share/man/{name}.1.gz\n\n{target}\n5\n\n"
        )
    found = machine.layer(store, "mawk")
    links = {path: entry.target for path, entry in found.items() if entry.kind == "link"}
    assert links == {"/usr/bin/awk": "/etc/alternatives/awk", "/etc/alternatives/awk": "/usr/bin/mawk"}


def test_diverted_file_is_found(machine: Machine, store: LayerStore) -> None:
    machine.package("data", {"/usr/bin/tool": b"of data"})
    os.rename(machine.root / "usr/bin/tool", machine.root / "usr/bin/tool.distrib")
    machine.package("mawk", {"/usr/bin/tool": b"of mawk"})
    (machine.admin / "diversions").write_text("/usr/bin/tool\n/usr/bin/tool.distrib\nmawk\n")
    found = machine.layer(store, "data", "mawk")
    assert {"/usr/bin/tool", "/usr/bin/tool.distrib"} <= set(found)


def test_certificates_are_where_programs_look(machine: Machine, store: LayerStore) -> None:
    with (machine.admin / "status").open("a") as status:
        status.write("\nPackage: ca-certificates\nStatus: install ok installed\nArchitecture: all\nVersion: 1\n")
    machine.package("ca-certificates", {"/usr/share/ca-certificates/a.crt": b"A"})
    certs = machine.root / "etc/ssl/certs"
    certs.mkdir(parents=True)
    (certs / "ca-certificates.crt").write_bytes(b"A B")
    (machine.root / "own.crt").write_bytes(b"B")
    (certs / "a.pem").symlink_to("/usr/share/ca-certificates/a.crt")
    (certs / "0a1b.0").symlink_to("a.pem")
    (certs / "b.pem").symlink_to("/own.crt")
    (certs / "dead.pem").symlink_to("/absent")
    found = machine.layer(store, "ca-certificates")
    assert {path for path, entry in found.items() if entry.kind == "file"} == {
        *("/usr/share/ca-certificates/a.crt", "/etc/ssl/certs/ca-certificates.crt", "/own.crt"),
    }
    assert found["/usr/lib/ssl/cert.pem"].target == "/etc/ssl/certs/ca-certificates.crt"
    assert {"/etc/ssl/certs/0a1b.0", "/etc/ssl/certs/b.pem"} <= set(found)


def test_minimal_names_what_the_host_lacks(machine: Machine, store: LayerStore) -> None:
    def fill(text: str) -> None:
        (machine.admin / "status").write_text(text)
        store.pack("debian-minimal", "test", lambda pack: presets.debian_minimal(pack, admin=machine.admin))

    with pytest.raises(errors.LayerError) as e:
        fill(STATUS.replace("Package: mawk", "Package: other"))
    assert e.value.hint == "apt-get install mawk"
    with pytest.raises(errors.LayerError, match="is not installed") as e:
        fill(STATUS)
    assert e.value.hint.startswith("apt-get install ")


def test_unknown_source_is_refused(store: LayerStore, tmp_path: Path) -> None:
    for words in ([], ["zip", "x"], ["venv"], ["venv", "a", "b"], ["deb"], ["npm"], ["oci"], ["host-packages"]):
        with pytest.raises(errors.UsageError) as usage:
            sources.build(store, "own", words)
        assert usage.value.hint
    with pytest.raises(errors.UsageError) as usage:
        sources.build(store, "pyhton3", [])
    assert usage.value.hint.startswith("did you mean `python3`?")
    for kind in ("venv", "npm"):
        with pytest.raises(errors.LayerError, match="it has no") as e:
            sources.build(store, "own", [kind, str(tmp_path)])
        assert "--from" in e.value.hint
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    with pytest.raises(errors.LayerError) as e:
        sources.build(store, "own", ["venv", str(tmp_path)])
    assert e.value.hint == f"did you mean `{tmp_path}/venv`?"
    with pytest.raises(errors.LayerError, match="cannot be a path"):
        sources.directory(store, "own", tmp_path, "/a/../b")
    with pytest.raises(errors.LayerError, match="cannot name a Debian package"):
        sources.build(store, "own", ["deb", "--option"])
    with pytest.raises(errors.LayerError):
        sources.build(store, "own", ["oci", str(tmp_path / "absent")])
    assert store.listed() == []
