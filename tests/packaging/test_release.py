"""The packages of a release: what is in them, and that a second build gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess

import pytest


def _make(clone: pathlib.Path, out: pathlib.Path, *formats: str) -> None:
    # A user's umask and language are not part of a package.
    environment = {**os.environ, "LC_ALL": "C", "TZ": "Asia/Tokyo", "TMPDIR": str(out.parent)}
    command = [str(clone / "scripts/package"), "--out", str(out), *formats]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, umask=0o077)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(clone: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Everything that `scripts/package` makes."""
    out = tmp_path_factory.mktemp("release") / "dist"
    _make(clone, out)
    return out


def _deb(made: pathlib.Path, *command: str) -> str:
    [package] = made.glob("*.deb")
    program = ["/usr/bin/dpkg-deb", *command, str(package)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def _entries(made: pathlib.Path) -> dict[str, tuple[str, str]]:
    """The path of each entry, with its mode and owner."""
    lines = [line.split(maxsplit=5) for line in _deb(made, "--contents").splitlines()]
    return {words[5].split(" -> ")[0].removeprefix("."): (words[0], words[1]) for words in lines}


def test_second_build_gives_same_bytes(clone: pathlib.Path, made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    _make(clone, tmp_path / "dist", "deb")
    [first], [second] = made.glob("*.deb"), (tmp_path / "dist").glob("*.deb")
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


def test_package_is_of_root_and_has_its_places(made: pathlib.Path) -> None:
    entries = _entries(made)
    assert {owner for _, owner in entries.values()} == {"root/root"}
    wanted = (
        *("/opt/covenant/bin/covenant", "/usr/bin/covenantd", "/etc/covenant/config.toml"),
        *("/usr/lib/systemd/system/covenant-supervisor.socket", "/usr/share/man/man1/covenant-run.1.gz"),
        *("/usr/share/bash-completion/completions/covenant", "/usr/share/doc/covenant/supervisor.md"),
    )
    assert set(wanted) <= set(entries)
    # No bit beside those of an ordinary file, and nothing that others than root write.
    assert not [name for name, (mode, _) in entries.items() if mode[0] in "-d" and (mode[5] == "w" or mode[8] == "w")]
    assert not [name for name, (mode, _) in entries.items() if "s" in mode[1:] or "t" in mode[1:]]
    tops = {name.split("/")[1] for name in entries if name != "/"}
    assert tops == {"etc", "opt", "usr"}


def test_commands_are_isolated_in_their_final_place(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    _deb(made, "--info")
    [package] = made.glob("*.deb")
    subprocess.run(["/usr/bin/dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    for name in ("covenant", "covenant-supervisor", "covenantd"):
        first = (tmp_path / "opt/covenant/bin" / name).read_text().split("\n", 1)[0]
        assert first == "#!/opt/covenant/bin/python -I"
    python = tmp_path / "opt/covenant/bin/python"
    assert os.readlink(python).startswith("/usr/bin/python3.")
    # It runs from where it was extracted, and takes its own code.
    code = "import covenant; print(covenant.__file__)"
    said = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said.startswith(str(tmp_path / "opt/covenant/lib"))


def test_setup_lays_what_package_carries(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The tree of `covenant setup`, file by file, beside the files of the .deb that are no documents."""
    [package] = made.glob("*.deb")
    subprocess.run(["/usr/bin/dpkg-deb", "--extract", str(package), str(tmp_path / "deb")], check=True)
    python = tmp_path / "deb/opt/covenant/bin/python"
    code = "from covenant.cli.main import entry; entry()"
    words = ["setup", "--root", str(tmp_path / "tree"), "--prefix", "/opt/covenant", "--json"]
    done = subprocess.run([str(python), "-IB", "-c", code, *words], capture_output=True, check=True, timeout=120)
    laid = set(json.loads(done.stdout)["parts"])
    carried = {name for name in _entries(made) if not name.endswith("/")}
    outside = {name for name in carried if not name.startswith(("/opt/", "/usr/share/doc/", "/usr/share/lintian/"))}
    assert laid == outside
    for name in laid:
        one, other = (tmp_path / base / name.lstrip("/") for base in ("tree", "deb"))
        if one.is_symlink():
            assert os.readlink(one) == os.readlink(other)
        else:
            assert one.read_bytes() == other.read_bytes(), name


def test_dependencies_name_python_of_build(made: pathlib.Path) -> None:
    needs = _deb(made, "--field").split("Depends: ")[1].split("\n")[0].split(", ")
    assert pathlib.Path(os.path.realpath("/usr/bin/python3")).name in needs
    assert {"nftables", "iproute2", "libseccomp2", "erofs-utils"} <= set(needs)


def test_parts_and_checksums_name_what_is_there(clone: pathlib.Path, made: pathlib.Path) -> None:
    lines = [line.split("  ") for line in (made / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert set(sums) == {path.name for path in made.iterdir()} - {"SHA256SUMS"}
    assert {pathlib.Path(name).suffix for name in sums} == {".deb", ".rpm", ".whl", ".json"}
    for name, digest in sums.items():
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    [parts] = made.glob("*.cdx.json")
    named = {one["name"].lower() for one in json.loads(parts.read_text())["components"]}
    locked = {line.split("==")[0] for line in (clone / "locks/server.txt").read_text().splitlines() if "==" in line}
    absent = {name for name in locked if name.replace("_", "-") not in {one.replace("_", "-") for one in named}}
    # What the lock has for other systems is not installed on this one.
    assert absent <= {"colorama", "pywin32", "win-inet-pton", "tzdata", "uvloop"}, absent
