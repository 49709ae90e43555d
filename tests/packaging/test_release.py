"""The files of a release: what is in each, that a second build gives the same bytes, and who signed them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import tarfile
import tempfile
import threading
from typing import Any

import pytest

from scripts.machine.console import SetupError
from scripts.release import changelog, container, recipe, signature
from tests import release_kit


def _make(clone: pathlib.Path, out: pathlib.Path, *words: str, **more: Any) -> None:
    # A user's umask and language are not part of a package.
    place = {"LC_ALL": "C", "TZ": "Asia/Tokyo", "TMPDIR": str(out.parent)}
    options: dict[str, Any] = {"env": {**os.environ, **place}, "umask": 0o077, **more}
    command = [str(clone / "scripts/package"), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def _copy(clone: pathlib.Path, copy: pathlib.Path) -> None:
    """Copy the tracked files in the other order, and make one commit of them, each time at the same second."""
    for file in reversed(recipe.read(clone).files):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clone / file, copy / file, follow_symlinks=False)
    who = {f"GIT_{role}_{field}": "tester" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    dates = {f"GIT_{role}_DATE": "1795900000 +0000" for role in ("AUTHOR", "COMMITTER")}
    for words in (["init", "-q"], ["add", "--all", "--force"], ["commit", "-q", "-m", "made"]):
        command = ["git", "-c", "core.hooksPath=/dev/null", *words]
        subprocess.run(command, cwd=copy, env={**os.environ, **who, **dates}, check=True, capture_output=True)


def _rename_first_version(clone: pathlib.Path, heading: str) -> None:
    path = clone / changelog.NAME
    path.write_text(re.sub(r"^## .*$", heading, path.read_text(), count=1, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The operator's key for releases."""
    path = tmp_path_factory.mktemp("key") / "release"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "release", "-f", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def named(clone: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The clone as it is tagged: its changes have their version."""
    copy = tmp_path_factory.mktemp("named") / "clone"
    _copy(clone, copy)
    _rename_first_version(copy, f"## {recipe.read(clone).version}")
    return copy


@pytest.fixture(scope="module")
def made(named: pathlib.Path, key: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Everything that `scripts/package` makes, signed."""
    out = tmp_path_factory.mktemp("release") / "dist"
    _make(named, out, "--sign", str(key))
    return out


def _deb(made: pathlib.Path, *command: str) -> str:
    [package] = made.glob("*.deb")
    program = ["/usr/bin/dpkg-deb", *command, str(package)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout


def _entries(made: pathlib.Path) -> dict[str, tuple[str, str]]:
    """The path of each entry, with its mode and owner."""
    lines = [line.split(maxsplit=5) for line in _deb(made, "--contents").splitlines()]
    return {words[5].split(" -> ")[0].removeprefix("."): (words[0], words[1]) for words in lines}


def test_build_of_another_user_gives_same_bytes(named: pathlib.Path, made: pathlib.Path) -> None:
    """Each file of a release, checksums too, from a copy at another place whose files were made in another order."""
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        copy, out = place / "copy", place / "dist"
        _copy(named, copy)
        for path in (place, *place.rglob("*")):
            os.chown(path, 4242, 4242, follow_symlinks=False)
        more = {"HOME": name, "LC_ALL": "C.UTF-8", "TZ": "America/Lima", "TMPDIR": name}
        _make(copy, out, env={**os.environ, **more}, user=4242, group=4242, extra_groups=[], umask=0o027)
        second = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    first = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made.iterdir()}
    del first["SHA256SUMS.sig"]
    assert len(first) == 7
    assert second == first


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
    assert set(sums) == {path.name for path in made.iterdir()} - {"SHA256SUMS", "SHA256SUMS.sig"}
    assert {pathlib.Path(name).suffix for name in sums} == {".deb", ".rpm", ".whl", ".gz", ".tar", ".json"}
    for name, digest in sums.items():
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    [parts] = made.glob("*.cdx.json")
    components = json.loads(parts.read_text())["components"]
    named = {one["name"].lower() for one in components}
    assert {"libc6", "libssl3", "tzdata"} <= {one["name"] for one in components if one["purl"].startswith("pkg:deb/")}
    locked = {line.split("==")[0] for line in (clone / "locks/server.txt").read_text().splitlines() if "==" in line}
    absent = {name for name in locked if name.replace("_", "-") not in {one.replace("_", "-") for one in named}}
    # What the lock has for other systems is not installed on this one.
    assert absent <= {"colorama", "pywin32", "win-inet-pton", "tzdata", "uvloop"}, absent


def test_lintian_finds_nothing(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = {**release_kit.programs(tmp_path / "programs", "lintian")}
    tree = tmp_path / "programs/tree/usr/share"
    if (tree / "lintian").exists():
        environment["LINTIAN_BASE"] = str(tree / "lintian")

    def lint(package: pathlib.Path) -> subprocess.CompletedProcess[str]:
        options = ["--allow-root", "--no-cfg", "--profile", "debian", "--fail-on", "error,warning"]
        # Its check of manual pages starts a man(1) for each: two thirds of its time.
        command = ["lintian", *options, "-X", "documentation/manual", str(package)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    [package] = made.glob("*.deb")
    done = lint(package)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    # The control: a package without a copyright file.
    bare = tmp_path / "bare"
    (bare / "DEBIAN").mkdir(parents=True)
    (bare / "DEBIAN/control").write_text(
        "Package: bare\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: a\n"
    )
    command = ["/usr/bin/dpkg-deb", "--root-owner-group", "--build", str(bare), str(tmp_path / "bare_1_all.deb")]
    subprocess.run(command, check=True, capture_output=True)
    assert "no-copyright-file" in lint(tmp_path / "bare_1_all.deb").stdout


# --- the signature


def _verify(folder: pathlib.Path, key: pathlib.Path, *, namespace: str = signature.NAMESPACE) -> bool:
    """Answer as the two commands of docs/install.md do."""
    allowed = folder.parent / "allowed_signers"
    allowed.write_text(f"covenant {key.with_suffix('.pub').read_text()}")
    words = ["-f", str(allowed), "-I", "covenant", "-n", namespace, "-s", str(folder / "SHA256SUMS.sig")]
    with (folder / "SHA256SUMS").open("rb") as file:
        signed = subprocess.run(["ssh-keygen", "-Y", "verify", *words], stdin=file, capture_output=True)
    command = ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"]
    summed = subprocess.run(command, cwd=folder, capture_output=True)
    return signed.returncode == summed.returncode == 0


def test_changed_byte_or_other_key_is_refused(made: pathlib.Path, key: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    assert _verify(copy, key)
    assert not _verify(copy, key, namespace="file")
    for name in ("SHA256SUMS", "SHA256SUMS.sig", next(made.glob("*.whl")).name):
        content = bytearray((made / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        assert not _verify(copy, key), name
        (copy / name).write_bytes((made / name).read_bytes())
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    assert _verify(copy, key)
    assert not _verify(copy, other)


def test_unfit_key_is_refused_before_a_build(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(key)], check=True)
    for path, says in ((key, "no Ed25519 key"), (tmp_path / "absent", "there is no key")):
        command = [str(clone / "scripts/package"), "--out", str(tmp_path / "dist"), "--sign", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
        assert "fix: ssh-keygen -t ed25519" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_unnamed_version_is_refused_before_a_build(
    named: pathlib.Path, key: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The fix that is printed is applied, and is enough."""
    copy, version = tmp_path / "clone", recipe.read(named).version
    _copy(named, copy)
    _rename_first_version(copy, changelog.PENDING)
    command = [str(copy / "scripts/package"), "--out", str(tmp_path / "dist"), "--sign", str(key)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "dist").exists()
    assert f"still calls the changes of {version} `## Unreleased`" in done.stderr
    subprocess.run(done.stderr.split("fix: ")[1].split(", then")[0], shell=True, cwd=copy, check=True)
    changelog.check(copy, version)
    with pytest.raises(SetupError, match=r"the first version of CHANGELOG\.md is"):
        changelog.check(copy, "9.9.9")


# --- the .rpm


def test_rpm_is_installed_verified_and_erased(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """In a root of its own, without Fedora: its scripts are parsed, and run in the virtual machine by the .deb."""
    environment = release_kit.programs(tmp_path / "programs", "rpm")
    root = tmp_path / "root"
    root.mkdir()

    # Not `rpm --initdb` and `rpm -K`: these start /usr/bin/rpmdb and rpmkeys by their whole paths.
    def rpm(*words: str, expect: int = 0, program: str = "rpm") -> str:
        command = [program, "--root", str(root), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == expect, (words, done.stdout, done.stderr)
        return done.stdout

    [package] = made.glob("*.rpm")
    rpm("--initdb", program="rpmdb")
    assert "digests OK" in rpm("-K", str(package), program="rpmkeys")
    rpm("-i", "--nodeps", "--noscripts", str(package))
    listed = set(rpm("-ql", "covenant").split())
    assert {
        "/opt/covenant/bin/covenantd",
        "/etc/covenant/config.toml",
        "/usr/share/man/man1/covenant-run.1.gz",
    } <= listed
    assert rpm("-V", "--nodeps", "covenant") == ""
    (root / "opt/covenant/bin/covenantd").write_text("changed")
    assert "/opt/covenant/bin/covenantd" in rpm("-V", "--nodeps", "covenant", expect=1)
    scripts = rpm("-q", "--qf", "%{PREIN}@@%{POSTIN}@@%{PREUN}@@%{POSTUN}", "covenant").split("@@")
    assert len(scripts) == 4
    for script in scripts:
        assert script.startswith("#!/bin/sh")
        assert subprocess.run(["/bin/sh", "-n"], input=script.encode(), capture_output=True).stderr == b""
    rpm("-e", "--nodeps", "--noscripts", "covenant")
    assert [name for name in listed if os.path.lexists(root / name.lstrip("/"))] == []


def test_rpmlint_finds_nothing(made: pathlib.Path, clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = {**release_kit.programs(tmp_path / "programs", "rpmlint", "rpm")}
    modules = tmp_path / "programs/tree/usr/lib/python3/dist-packages"
    if modules.exists():
        environment["PYTHONPATH"] = str(modules)
    # Its cache and settings of a user.
    environment |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    [package] = made.glob("*.rpm")

    def lint(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["rpmlint", *options, str(package)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    done = lint("--config", str(clone / "packaging/system/rpmlint.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors, 0 warnings" in done.stdout, done.stdout
    # The control: without what is explained there.
    assert "dir-or-file-in-opt" in lint().stdout


# --- the image of the daemon


def _blob(layout: pathlib.Path, entry: dict[str, Any]) -> bytes:
    content: bytes = (layout / "blobs" / entry["digest"].replace(":", "/")).read_bytes()
    assert (len(content), "sha256:" + hashlib.sha256(content).hexdigest()) == (entry["size"], entry["digest"])
    return content


@pytest.fixture(scope="module")
def layout(made: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The archive, unpacked to its layout."""
    [archive] = made.glob("*.oci.tar")
    place = tmp_path_factory.mktemp("layout")
    with tarfile.open(archive) as tar:
        tar.extractall(place)
    return place


def test_image_runs_daemon_as_its_user(layout: pathlib.Path) -> None:
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(_blob(layout, entry))
    described = json.loads(_blob(layout, manifest["config"]))
    layers = [gzip.decompress(_blob(layout, one)) for one in manifest["layers"]]
    assert ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers] == described["rootfs"]["diff_ids"]
    config = described["config"]
    assert (config["User"], config["Entrypoint"]) == ("65532:65532", ["/usr/bin/covenantd"])
    assert (config["Volumes"], config["ExposedPorts"]) == ({"/var/lib/covenantd": {}}, {"8421/tcp": {}})
    entries = []
    for content in layers:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            entries += tar.getmembers()
    names = {entry.name: entry for entry in entries}
    # One user has a home; all else is root's and only root writes it. There is no shell and no program of root's.
    others = {entry.name for entry in entries if entry.uid or entry.gid}
    assert others == {"var/lib/covenantd"}
    assert names["var/lib/covenantd"].mode == 0o700
    open_ = {one.name for one in entries if one.mode & 0o6022 and not one.issym()}
    assert open_ == {"tmp"}
    assert not {"usr/bin/sh", "usr/bin/dpkg", "usr/bin/tar", "opt/covenant/bin/covenant-supervisor"} & set(names)


PEER = """import socket
s = socket.socket(socket.AF_UNIX); s.connect("/var/lib/covenantd/host"); print(s.recv(9).decode())"""
HEALTH = """import urllib.request
with urllib.request.urlopen("http://127.0.0.1:8421/health", timeout=30) as answer: print(answer.status)"""


def _tell_uid(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    with peer:
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        peer.send(str(uid).encode())


def test_daemon_of_image_serves(layout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """By umoci and the real runsc; and who a server of the host sees when a process of the image connects."""
    bundle = tmp_path / "bundle"
    environment = release_kit.programs(tmp_path / "programs", "umoci")
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    tag = entry["annotations"]["org.opencontainers.image.ref.name"]
    command = ["umoci", "unpack", "--image", f"{layout}:{tag}", str(bundle)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    image = release_kit.Container(bundle, tmp_path)
    with socket.socket(socket.AF_UNIX) as listener, image.running():
        listener.bind(str(image.home / "host"))
        os.chmod(image.home / "host", 0o666)
        listener.listen()
        assert image.until(HEALTH) == "200\n"
        threading.Thread(target=_tell_uid, args=(listener,), daemon=True).start()
        # runsc's own process connects for its sandbox: why docs/install.md forbids the supervisor's socket there.
        assert image.python(PEER).stdout == "0\n"
        threading.Thread(target=_tell_uid, args=(listener,), daemon=True).start()
        assert _native(bundle / "rootfs", image.home).stdout == f"{container.UID}\n"
        assert image.stop() == 0, image.log.read_text()
    assert (image.home / "memory.db").stat().st_uid == container.UID


def _native(rootfs: pathlib.Path, home: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run PEER as runc would: in namespaces of its own, by the host's kernel."""
    place = rootfs / container.HOME.lstrip("/")
    code = 'mount --bind "$1" "$2" && exec chroot --userspec="$3" "$4" /opt/covenant/bin/python -I -c "$5"'
    words = [str(home), str(place), f"{container.UID}:{container.UID}", str(rootfs), PEER]
    command = ["unshare", "--mount", "--net", "--ipc", "--", "/bin/sh", "-c", code, "sh", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
