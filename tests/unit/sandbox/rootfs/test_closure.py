"""Check closures on a small machine that the test builds, so that every rule has its own case."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from policy import errors
from policy.host import Closure, ClosureFile
from sandbox.config import Config
from sandbox.rootfs import closure, closure_cache, closure_files, loader_patch
from tests.unit.sandbox import tiny_elf

LOADER = "/lib64/ld-linux-x86-64.so.2"
LIBS = "usr/lib/x86_64-linux-gnu"


class Host:
    """A merged-/usr machine below a directory: a loader, a C library, and the files that a test adds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        for link, target in {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}.items():
            (root / link).symlink_to(target)
        self.file(f"{LIBS}/ld-linux-x86-64.so.2", tiny_elf.build(padding=4096), 0o755)
        self.link("usr/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
        self.library("libc.so.6", needed=["ld-linux-x86-64.so.2"])

    def file(self, path: str, data: bytes, mode: int = 0o644) -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(mode)
        for folder in place.relative_to(self.root).parents:
            (self.root / folder).chmod(0o755)
        return place

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def library(self, name: str, folder: str = LIBS, **fields: object) -> Path:
        return self.file(f"{folder}/{name}", tiny_elf.build(**fields), 0o755)  # type: ignore[arg-type]

    def program(self, path: str, **fields: object) -> Path:
        return self.file(path, tiny_elf.build(interpreter=LOADER, **fields), 0o755)  # type: ignore[arg-type]

    def builder(self) -> closure_files.Builder:
        return closure_files.Builder(str(self.root), owners={os.getuid()})

    def closure_of(self, path: str) -> closure_files.Builder:
        builder = self.builder()
        closure.complete(builder, builder.add(path, mode=closure_files.PROGRAM_MODE))
        return builder


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_program_brings_its_loader_its_libraries_and_nothing_else(host: Host) -> None:
    host.library("libz.so.1.2", needed=["libc.so.6"])
    host.link(f"{LIBS}/libz.so.1", "libz.so.1.2")
    host.library("libother.so.1")
    host.program("usr/bin/tool", needed=["libz.so.1"])
    found = host.closure_of("/usr/bin/tool").files
    assert {p for p, f in found.items() if f.kind == "file"} == {
        "/usr/bin/tool",
        f"/{LIBS}/ld-linux-x86-64.so.2",
        f"/{LIBS}/libc.so.6",
        f"/{LIBS}/libz.so.1.2",
    }
    assert {p: f.target for p, f in found.items() if f.kind == "symlink"} == {
        "/bin": "usr/bin",
        "/lib": "usr/lib",
        "/lib64": "usr/lib64",
        "/usr/lib64/ld-linux-x86-64.so.2": "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        f"/{LIBS}/libz.so.1": "libz.so.1.2",
    }


def test_locale_of_every_run_comes_along_where_there_is_one(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libc.so.6"])
    host.file("usr/lib/locale/C.utf8/LC_CTYPE", b"table")
    host.file("usr/lib/locale/C.utf8/LC_MESSAGES/SYS_LC_MESSAGES", b"table")
    host.file("usr/lib/locale/locale-archive", b"all others")
    found = [p for p in host.closure_of("/usr/bin/tool").files if "locale" in p]
    assert {p for p in found if (host.root / p.lstrip("/")).is_file()} == {
        "/usr/lib/locale/C.utf8/LC_CTYPE",
        "/usr/lib/locale/C.utf8/LC_MESSAGES/SYS_LC_MESSAGES",
    }


def test_only_program_and_loader_are_executable(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libc.so.6"]).chmod(0o4755)
    found = host.closure_of("/usr/bin/tool").files
    modes = {p: f.mode for p, f in found.items() if f.kind == "file"}
    assert modes == {
        "/usr/bin/tool": 0o755,
        f"/{LIBS}/ld-linux-x86-64.so.2": 0o755,
        f"/{LIBS}/libc.so.6": 0o644,
    }
    assert {f.mode for f in found.values() if f.kind == "dir"} == {0o755}


def test_loader_of_closure_is_patched_one(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libc.so.6"])
    loader = host.closure_of("/usr/bin/tool").files[f"/{LIBS}/ld-linux-x86-64.so.2"]
    patched = loader_patch.patch(tiny_elf.build(padding=4096))
    assert closure_files.read_source(loader) == patched != (host.root / f"{LIBS}/ld-linux-x86-64.so.2").read_bytes()
    assert loader.size == len(patched)


def test_loader_that_cannot_be_patched_serves_as_it_is(host: Host) -> None:
    plain = tiny_elf.build(padding=0)
    host.file(f"{LIBS}/ld-linux-x86-64.so.2", plain, 0o755)
    host.program("usr/bin/tool", needed=["libc.so.6"])
    assert closure_files.read_source(host.closure_of("/usr/bin/tool").files[f"/{LIBS}/ld-linux-x86-64.so.2"]) == plain


def test_libgcc_comes_with_c_library_where_there_is_one(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libc.so.6"])
    assert f"/{LIBS}/libgcc_s.so.1" not in host.closure_of("/usr/bin/tool").files
    host.library("libgcc_s.so.1", needed=["libc.so.6"])
    assert f"/{LIBS}/libgcc_s.so.1" in host.closure_of("/usr/bin/tool").files


def test_libgcc_needed_is_not_only_wished_for(host: Host) -> None:
    host.library("libstdc++.so.6", needed=["libgcc_s.so.1"])
    host.program("usr/bin/direct", needed=["libc.so.6", "libgcc_s.so.1"])
    host.program("usr/bin/later", needed=["libc.so.6", "libstdc++.so.6"])
    for program in ("/usr/bin/direct", "/usr/bin/later"):
        with pytest.raises(errors.MissingLibraryError, match=r"libgcc_s\.so\.1"):
            host.closure_of(program)


def test_missing_library_is_named(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libgone.so.3"])
    with pytest.raises(errors.MissingLibraryError, match=r"`/usr/bin/tool` needs library `libgone\.so\.3`"):
        host.closure_of("/usr/bin/tool")


def test_library_for_another_machine_is_passed_over(host: Host) -> None:
    host.library("libx.so.1", folder="lib/x86_64-linux-gnu", machine=183)
    host.program("usr/bin/tool", needed=["libx.so.1"])
    with pytest.raises(errors.MissingLibraryError):
        host.closure_of("/usr/bin/tool")
    host.library("libx.so.1", folder="usr/lib")
    assert "/usr/lib/libx.so.1" in host.closure_of("/usr/bin/tool").files


@pytest.mark.parametrize("kind", ["rpath", "runpath"])
def test_program_of_host_finds_libraries_beside_itself(host: Host, kind: str) -> None:
    host.library("libown.so.1", folder="opt/tool/lib")
    host.program("opt/tool/bin/tool", needed=["libown.so.1"], **{kind: "$ORIGIN/../lib"})
    assert "/opt/tool/lib/libown.so.1" in host.closure_of("/opt/tool/bin/tool").files


def test_rpath_is_inherited_and_runpath_is_not(host: Host) -> None:
    host.library("liba.so", folder="opt/lib", needed=["libb.so"])
    host.library("libb.so", folder="opt/lib")
    host.program("usr/bin/old", needed=["liba.so"], rpath="/opt/lib")
    host.program("usr/bin/new", needed=["liba.so"], runpath="/opt/lib")
    assert "/opt/lib/libb.so" in host.closure_of("/usr/bin/old").files
    with pytest.raises(errors.MissingLibraryError, match=r"libb\.so"):
        host.closure_of("/usr/bin/new")


@pytest.mark.parametrize("entry", ["lib", "../lib", "$LIB/x", "$PLATFORM", ""])
def test_search_path_without_fixed_meaning_is_not_followed(entry: str) -> None:
    assert closure.expand((entry,) if entry else (), "/usr/bin/tool") == ()
    assert closure.expand(("$ORIGIN/x", "${ORIGIN}/y"), "/opt/t/bin/tool") == ("/opt/t/bin/x", "/opt/t/bin/y")


@pytest.mark.parametrize("loader", ["/etc/shadow", "/lib64/../etc/shadow", "/lib/ld-musl-x86_64.so.1"])
def test_unknown_loader_is_refused(host: Host, loader: str) -> None:
    host.file("etc/shadow", tiny_elf.build(padding=4096))
    host.file("usr/bin/tool", tiny_elf.build(interpreter=loader), 0o755)
    with pytest.raises(errors.NotElfError, match="names the loader"):
        host.closure_of("/usr/bin/tool")


def test_library_named_by_path_is_refused(host: Host) -> None:
    host.library("secret.so", folder="opt")
    host.program("usr/bin/tool", needed=["/opt/secret.so"])
    with pytest.raises(errors.NotElfError, match="named by a path"):
        host.closure_of("/usr/bin/tool")


def test_shared_object_is_no_program(host: Host) -> None:
    host.library("libx.so.1", needed=["libc.so.6"])
    with pytest.raises(errors.NotElfError, match="is a library"):
        host.closure_of(f"/{LIBS}/libx.so.1")


def test_file_in_other_hands_is_refused(host: Host) -> None:
    host.program("usr/bin/tool", needed=["libc.so.6"])
    host.closure_of("/usr/bin/tool")
    (host.root / LIBS / "libc.so.6").chmod(0o664)
    with pytest.raises(errors.HostError, match="in other hands"):
        host.closure_of("/usr/bin/tool")
    (host.root / LIBS / "libc.so.6").chmod(0o644)
    (host.root / LIBS).chmod(0o777)
    with pytest.raises(errors.HostError, match="in other hands"):
        host.closure_of("/usr/bin/tool")
    (host.root / LIBS).chmod(0o755)
    with pytest.raises(errors.HostError, match="in other hands"):
        closure_files.Builder(str(host.root), owners={os.getuid() + 1}).add("/usr/bin/tool")


def test_file_that_not_everyone_may_read_is_refused(host: Host) -> None:
    host.file("usr/bin/tool", tiny_elf.build(), 0o750)
    with pytest.raises(errors.HostError, match="cannot be read by everyone"):
        host.builder().add("/usr/bin/tool")


def test_symlinks_in_circle_end(host: Host) -> None:
    host.link("usr/bin/a", "b")
    host.link("usr/bin/b", "a")
    with pytest.raises(errors.HostError, match="too many symlinks"):
        host.builder().add("/usr/bin/a")


def test_dots_in_link_stay_within_machine(host: Host) -> None:
    host.program("usr/bin/tool")
    host.link("usr/bin/up", "../../../../../../../usr/bin/tool")
    assert host.builder().add("/usr/bin/up") == "/usr/bin/tool"


# --- interpreters ---------------------------------------------------------------------------------


def _python(host: Host) -> None:
    host.program("usr/bin/python3.12", needed=["libc.so.6"])
    host.link("usr/bin/python3", "python3.12")
    for name in ("os.py", "json/__init__.py", "test/test_os.py", "ensurepip/__init__.py", "tkinter/__init__.py"):
        host.file(f"usr/lib/python3.12/{name}", b"x = 1\n")
    host.file("usr/lib/python3.12/config-3.12/Makefile", b"")
    host.file("usr/lib/python3.12/dist-packages/evil.py", b"")
    host.library(
        "_ssl.cpython-312-x86_64-linux-gnu.so", folder="usr/lib/python3.12/lib-dynload", needed=["libssl.so.3"]
    )
    host.library("_gone.cpython-312-x86_64-linux-gnu.so", folder="usr/lib/python3.12/lib-dynload", needed=["libno.so"])
    host.library("libssl.so.3", needed=["libc.so.6"])


def test_python_brings_its_standard_library_without_what_no_agent_needs(host: Host) -> None:
    _python(host)
    found = host.closure_of("/usr/bin/python3").files
    files = {p.removeprefix("/usr/lib/python3.12/") for p, f in found.items() if f.kind == "file"}
    assert {"os.py", "json/__init__.py", "lib-dynload/_ssl.cpython-312-x86_64-linux-gnu.so"} <= files
    assert f"/{LIBS}/libssl.so.3" in files, "the libraries of extension modules come with them"
    assert found["/usr/bin/python3"].target == "python3.12"
    left_out = ("test", "ensurepip", "tkinter", "config-", "dist-packages", "_gone")
    assert not [f for f in files if any(word in f for word in left_out)]
    assert {f.mode for f in found.values() if f.path.endswith(".py")} == {0o644}


def test_byte_code_comes_along_while_python_would_take_it(host: Host) -> None:
    _python(host)
    source = host.root / "usr/lib/python3.12/os.py"
    info = source.stat()
    current = struct.pack("<IIII", 3531, 0, int(info.st_mtime) & 0xFFFFFFFF, info.st_size) + b"code"
    place = "usr/lib/python3.12/__pycache__/os.cpython-312.pyc"
    host.file(place, current)
    host.file("usr/lib/python3.12/__pycache__/os.cpython-312.opt-1.pyc", current)
    host.file("usr/lib/python3.12/__pycache__/os.cpython-311.pyc", current)
    host.file("usr/lib/python3.12/__pycache__/planted.cpython-312.pyc", current)
    names = {os.path.basename(p) for p in host.closure_of("/usr/bin/python3").files if p.endswith(".pyc")}
    assert names == {"os.cpython-312.pyc"}
    host.file(place, struct.pack("<IIII", 3531, 0, 1, info.st_size) + b"code")
    assert not [p for p in host.closure_of("/usr/bin/python3").files if p.endswith(".pyc")]


def test_new_byte_code_does_not_make_new_closure_and_new_source_file_does(host: Host) -> None:
    _python(host)
    watched = host.closure_of("/usr/bin/python3").watch
    assert "/usr/lib/python3.12" in watched
    assert "/usr/bin/python3.12" in watched
    assert f"/{LIBS}/libssl.so.3" in watched
    assert not [p for p in watched if "__pycache__" in p]


def test_python_without_standard_library_is_refused(host: Host) -> None:
    host.program("usr/bin/python3.12", needed=["libc.so.6"])
    with pytest.raises(errors.HostError, match=r"`/usr/lib/python3\.12` is not there"):
        host.closure_of("/usr/bin/python3.12")
    host.file("usr/lib/python3.12/site.py", b"")
    with pytest.raises(errors.HostError, match="no standard library"):
        host.closure_of("/usr/bin/python3.12")


def test_debian_s_node_brings_parts_that_it_names(host: Host) -> None:
    host.library("libnode.so.108", needed=["libc.so.6"], code=b"\0/usr/share/nodejs/acorn/dist/acorn.js\0")
    host.program("usr/bin/node", needed=["libnode.so.108"])
    host.file("usr/share/nodejs/acorn/dist/acorn.js", b"js")
    host.file("usr/share/nodejs/npm/index.js", b"js")
    files = host.closure_of("/usr/bin/node").files
    assert "/usr/share/nodejs/acorn/dist/acorn.js" in files
    assert "/usr/share/nodejs/npm/index.js" not in files


# --- a package's own program: its bytes are hostile -------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "state").mkdir(mode=0o700)
    return Config(state=tmp_path / "state")


def test_static_program_has_empty_closure(config: Config) -> None:
    found = closure.of_elf(tiny_elf.build(kind=2), config, entry="/workspace/main")
    assert (found.name, found.entry, found.files) == ("rust-bin", "/workspace/main", ())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"#!/bin/sh\necho hi\n", "is a script"),
        (b"MZ\x90\0" + bytes(100), "is not an ELF file"),
        (tiny_elf.build(machine=183 if os.uname().machine == "x86_64" else 62), "is built for"),
        (tiny_elf.build(interpreter="/etc/shadow"), "names the loader"),
        (tiny_elf.build(interpreter=LOADER, needed=["../../etc/shadow"]), "named by a path"),
        (tiny_elf.build(interpreter=LOADER, needed=["libno-such-library.so.9"]), "does not have"),
        (tiny_elf.build(needed=["libc.so.6"]), "is a library"),
        (tiny_elf.build(interpreter=LOADER, needed=[f"lib{i}.so" for i in range(300)]), "needs 300 libraries"),
    ],
)
def test_package_s_program_that_cannot_run_is_refused(config: Config, data: bytes, why: str) -> None:
    with pytest.raises(errors.ProgramError, match=why):
        closure.of_elf(data, config, entry="/workspace/main")


def test_package_cannot_name_directories_of_host(config: Config, tmp_path: Path) -> None:
    """Else a RUNPATH of the package could copy any library from a directory of the host."""
    (tmp_path / "secret.so").write_bytes(tiny_elf.build())
    for rpath, runpath in ((str(tmp_path), ""), ("", str(tmp_path))):
        data = tiny_elf.build(interpreter=LOADER, needed=["secret.so"], rpath=rpath, runpath=runpath)
        with pytest.raises(errors.ProgramError, match=r"secret\.so"):
            closure.of_elf(data, config)
    # Control: the same library is found when it is the package's own.
    data = tiny_elf.build(interpreter=LOADER, needed=["secret.so"])
    found = closure.of_elf(data, config, siblings={"secret.so": tiny_elf.build()})
    assert not [f for f in found.files if "secret" in f.path]


# --- remembering ------------------------------------------------------------------------------------


def test_closure_is_remembered_until_file_changes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    watched = tmp_path / "watched"
    watched.write_bytes(b"1")
    made = Closure("x", "/x", (ClosureFile("/x", "file", 0o755, 1, "00"),))
    watch = {str(watched): closure_cache.signature(os.lstat(watched))}
    closure_cache.store(state, "x", "extra", made, watch)
    for fresh_process in (False, True):
        if fresh_process:
            closure_cache.in_process.clear()
        assert closure_cache.load(state, "x", "extra") == made
        assert closure_cache.load(state, "x", "another path") is None
    watched.write_bytes(b"2!")
    assert closure_cache.load(state, "x", "extra") is None
    closure_cache.in_process.clear()
    assert closure_cache.load(state, "x", "extra") is None


@pytest.mark.parametrize("damage", ["mode", "not json", "version", "symlink", "rows"])
def test_record_not_ours_alone_does_not_count(tmp_path: Path, damage: str) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    closure_cache.store(state, "x", "", Closure("x", "/x", ()), {})
    record = state / "closures" / "x.json"
    closure_cache.in_process.clear()
    assert closure_cache.load(state, "x", "") is not None
    closure_cache.in_process.clear()
    if damage == "mode":
        record.chmod(0o644)
    elif damage == "symlink":
        record.rename(tmp_path / "elsewhere")
        record.symlink_to(tmp_path / "elsewhere")
    else:
        text = {"not json": "{", "version": '{"version": 0}', "rows": '{"version": 1, "extra": "", "files": 3}'}
        record.write_text(text[damage])
    assert closure_cache.load(state, "x", "") is None


def test_record_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    closure_cache.store(state, "x", "", Closure("x", "/x", ()), {})
    assert (state / "closures" / "x.json").stat().st_mode & 0o777 == 0o600
    assert (state / "closures").stat().st_mode & 0o777 == 0o700
    assert [p.name for p in (state / "closures").iterdir()] == ["x.json"]


# --- libraries of a package's own modules ---------------------------------------------------------------------


def _module(*needed: str) -> bytes:
    return tiny_elf.build(needed=list(needed))


def test_sonames_of_modules_are_collected_without_the_packages_own() -> None:
    package = {
        "main.py": b"import a",
        "lib/a.so": _module("libz.so.1", "libmine.so"),
        "b.so": _module("libc.so.6"),
        "libmine.so": _module(),
        "broken.so": b"\x7fELF",
    }
    assert closure.needed_by(package) == {"libz.so.1", "libc.so.6"}


def test_package_that_needs_too_many_libraries_is_refused() -> None:
    package = {f"{n}.so": _module(*(f"lib{n}-{k}.so" for k in range(200))) for n in range(3)}
    with pytest.raises(errors.ProgramError, match="more than 512 libraries"):
        closure.needed_by(package)
    # The fix: fewer, or their files in the package.
    assert len(closure.needed_by(dict(list(package.items())[:2]))) == 400


def test_module_that_cannot_load_is_named_with_reason() -> None:
    foreign = bytearray(_module())
    foreign[18:20] = struct.pack("<H", 183 if os.uname().machine == "x86_64" else 62)
    package = {
        "broken.so": b"\x7fELF",
        "foreign.so": bytes(foreign),
        "lacks.so": _module("libnowhere.so.7"),
        "loads.so": _module("libc.so.6"),
    }
    found = dict(closure.unloadable(package))
    assert found.keys() == {"broken.so", "foreign.so", "lacks.so"}
    assert "not an ELF file" in found["broken.so"]
    assert "and this host is" in found["foreign.so"]
    assert "`libnowhere.so.7`" in found["lacks.so"]


def test_hostile_sonames_are_named_and_add_nothing() -> None:
    """Names by which a library could be looked for elsewhere, or that no file can have. The control is libc's own."""
    odd = ["/etc/shadow", "../../../etc/shadow", "..", ".", "systemd", "x" * 300, "y" * 4094]
    package = {f"{n}.so": _module(name, "libc.so.6") for n, name in enumerate(odd)}
    package["far.so"] = tiny_elf.build(needed=["libfar.so"], runpath="/root:$ORIGIN/../..:relative")
    found = dict(closure.unloadable({**package, "good.so": _module("libc.so.6")}))
    assert found.keys() == package.keys()
    assert all("it needs library" in reason for reason in found.values())


def test_package_with_hostile_sonames_changes_no_closure(tmp_path: Path) -> None:
    config = Config(state=tmp_path)
    (tmp_path / "closures").mkdir(mode=0o700)
    plain = closure.of_runtime("node", config)
    asked = closure.of_runtime("node", config, libraries=["../x.so", "..", "x" * 300, "/etc/passwd"])
    assert asked.files == plain.files
    added = closure.of_runtime("node", config, libraries=["libseccomp.so.2"])
    assert {file.path for file in added.files} > {file.path for file in plain.files}


def test_library_of_runtime_comes_with_what_it_needs(tmp_path: Path) -> None:
    config = Config(state=tmp_path)
    (tmp_path / "closures").mkdir(mode=0o700)
    names = {file.path.rpartition("/")[2] for file in closure.of_runtime("python3", config).files}
    assert {"libstdc++.so.6", "libpthread.so.0"} <= names
    assert "libseccomp.so.2" not in names
    more = closure.of_runtime("python3", config, libraries=["libseccomp.so.2", "libnowhere.so.7"])
    assert "libseccomp.so.2" in {file.path.rpartition("/")[2] for file in more.files}
    assert more.digest != closure.of_runtime("python3", config).digest
