"""The wheel owns exactly three import packages, carries its data, and works away from the clone."""

from __future__ import annotations

import configparser
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOMS = {"covenant", "policy", "sandbox"}


@pytest.fixture(scope="module")
def wheel(clone: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built without isolation: hatchling is in the lock, and nothing is fetched."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = out.glob("*.whl")
    return found


def _members(wheel: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_owns_exactly_three_names(wheel: pathlib.Path) -> None:
    tops = {name.split("/")[0] for name in _members(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS
    assert [top for top in tops if top.endswith(".dist-info")] == ["covenant_supervisor-0.1.0.dist-info"]


def test_every_source_and_data_file_is_in_wheel(clone: pathlib.Path, wheel: pathlib.Path) -> None:
    there = {
        str(path.relative_to(clone))
        for room in ROOMS
        for path in (clone / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in _members(wheel) if name.split("/")[0] in ROOMS}
    laid = {name for name in packed if name.startswith("covenant/cli/setup/data/")}
    assert packed - laid == there
    units = {f"systemd/{path.name}" for path in (clone / "packaging/systemd").iterdir()}
    steps = {f"scripts/{path.name}" for path in (clone / "packaging/scripts").iterdir()}
    settings = {f"system/{name}" for name in ("sysusers.conf", "tmpfiles.conf", "config.toml")}
    assert {name.removeprefix("covenant/cli/setup/data/") for name in laid} == units | steps | settings
    assert {f"{room}/py.typed" for room in ROOMS} <= packed
    assert any(name.startswith("policy/data/") and name.endswith(".toml") for name in packed)


def test_starter_is_in_it_and_its_tag_names_platform(wheel: pathlib.Path) -> None:
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    with zipfile.ZipFile(wheel) as archive:
        starter = archive.getinfo("sandbox/kernel/proc/covenant-start")
        assert starter.external_attr >> 16 & 0o777 == 0o755
        assert archive.read(starter).startswith(b"\x7fELF")


def test_without_compiler_it_is_wheel_of_pure_python(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From the source distribution, which has what the wheel is built from and no program."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, "--sdist", str(clone)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [sources] = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sources, tmp_path / "sources")
    [tree] = (tmp_path / "sources").iterdir()
    assert not (tree / "sandbox/kernel/proc/covenant-start").exists()
    for path, name in ((str(tmp_path / "empty"), "any"), ("/usr/bin:/bin", "linux")):
        command = [*build, "--wheel", str(tree)]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("no gcc" in done.stdout + done.stderr) == (name == "any")
        [wheel] = tmp_path.glob(f"*-py3-none-{name}*.whl")
        assert ("sandbox/kernel/proc/covenant-start" in _members(wheel)) == (name == "linux")


def test_licence_and_command_are_in_metadata(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert dict(scripts["console_scripts"]) == {
        "covenant": "covenant.cli.main:entry",
        "covenant-supervisor": "sandbox.serve.start:entry",
        "covenantd": "covenant.start:entry",
    }
    assert "Name: covenant-supervisor\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata


def test_installed_wheel_reads_its_own_data(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From a folder of its own, not the clone: a data file that was left out would be missed here."""
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:  # a wheel of pure Python is installed by unpacking it
        archive.extractall(target)
    program = (
        "import policy.data, covenant.cli.main as m, sandbox\n"
        "print(policy.data.__file__, m.__file__, sandbox.__file__)\n"
        "assert policy.data.roles() and policy.data.deny()\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(target)) for path in done.stdout.split()), done.stdout
