"""Layers of real trees under real runsc: the shell of debian-minimal, and what may not be started.

Each root is a directory, and then one EROFS file.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from policy.layers import LayerRef
from sandbox.host import erofs_roots
from sandbox.layers import sources
from sandbox.layers.images import HeldImage, RootImages
from sandbox.layers.store import LayerStore
from sandbox.rootfs import erofs_image
from tests.kernel import skeleton_runsc

TOOLS = """
set -e
[ "$(echo one two | awk '{print $2}')" = two ]
echo text | grep -q tex; echo a | sed s/a/b/ >/tmp/x; ls -l /tmp/x >/dev/null; find / -maxdepth 1 -name bin >/dev/null
tar -cf /tmp/x.tar /tmp/x 2>/dev/null; gzip /tmp/x.tar; diff /tmp/x /tmp/x; env true
bash -c '[[ $BASH_VERSION ]]'; locale -a | grep -q C.utf8
git init -q /tmp/w; cd /tmp/w; git config user.email a@b; git config user.name a; echo x >f; git add f; git commit -qm x
[ -s /etc/ssl/certs/ca-certificates.crt ]; [ -s /usr/lib/ssl/cert.pem ]; [ "$(TZ=Asia/Tokyo date +%Z)" = JST ]
[ -e /usr/share/terminfo/x/xterm -o -e /lib/terminfo/x/xterm ]; [ ! -e /usr/share/doc/bash ]; [ ! -e /etc/ld.so.cache ]
echo alive
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers") / "state"


@pytest.fixture(scope="module")
def minimal(state: Path) -> LayerRef:
    return sources.build(LayerStore(state), "debian-minimal", []).ref


@pytest.fixture(params=["tree", "erofs"])
def packer(request: pytest.FixtureRequest) -> Path | None:
    """mkfs.erofs for the roots that are one file."""
    return None if request.param == "tree" else erofs_roots.program()


def run(held: HeldImage, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Start a program in a root of either kind."""
    image = None if held.file is None else held.root.parent / erofs_image.NAME
    return skeleton_runsc.run(held.root, argv, image=image)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that no mount of a sandbox covers."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="covenant-layers-") as folder:
        yield Path(folder)


def test_debian_minimal_has_what_programs_expect(state: Path, minimal: LayerRef, packer: Path | None) -> None:
    images = RootImages(state)
    with images.hold([], [minimal], executable=["root"], points=skeleton_runsc.MOUNT_POINTS, packer=packer) as held:
        held.check.wait()
        done = run(held, ["/bin/sh", "-c", TOOLS])
        assert (done.returncode, done.stdout) == (0, b"alive\n"), done.stderr
        # runsc changed nothing in it.
    with images.hold([], [minimal], executable=["root"], points=skeleton_runsc.MOUNT_POINTS, packer=packer) as held:
        held.check.wait()


def test_program_without_grant_cannot_be_started(state: Path, minimal: LayerRef, packer: Path | None) -> None:
    ask = "/usr/bin/id; echo $?; /lib64/ld-linux-x86-64.so.2 /usr/bin/id; echo $?"
    images = RootImages(state)
    with images.hold([], [minimal], programs=["/bin/sh"], points=skeleton_runsc.MOUNT_POINTS, packer=packer) as held:
        held.check.wait()
        refused = run(held, ["/bin/sh", "-c", ask])
    with images.hold(
        [], [minimal], executable=["layer:debian-minimal"], points=skeleton_runsc.MOUNT_POINTS, packer=packer
    ) as held:
        control = run(held, ["/bin/sh", "-c", ask])
    assert refused.stdout == b"126\n126\n", refused.stderr
    lines = control.stdout.splitlines()
    assert [line.startswith(b"uid=65534") for line in (lines[0], lines[2])] == [True, True], control.stderr


def test_virtual_environment_runs_in_its_place(
    state: Path, minimal: LayerRef, place: Path, packer: Path | None
) -> None:
    place /= "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", place], check=True)
    packages = next((place / "lib").iterdir()) / "site-packages"
    (packages / "own.py").write_text("word = 'from the layer'\n")
    script = place / "bin" / "own"
    script.write_text(f"#!{place}/bin/python\nimport own, sys\nprint(own.word, sys.prefix)\n")
    script.chmod(0o755)
    store = LayerStore(state)
    packed = sources.build(store, "app", ["venv", str(place)])
    assert any("interpreter is /usr/bin/python3" in note for note in packed.notes)
    python = sources.build(store, "python", ["host-packages", "python3-minimal"]).ref
    with RootImages(state).hold(
        [], [minimal, python, packed.ref], executable=["root"], points=skeleton_runsc.MOUNT_POINTS, packer=packer
    ) as held:
        held.check.wait()
        done = run(held, [str(script)])
    assert done.stdout.decode() == f"from the layer {place}\n", done.stderr


def test_node_modules_run_in_their_place(state: Path, minimal: LayerRef, place: Path, packer: Path | None) -> None:
    (place / "app/node_modules/.bin").mkdir(parents=True)
    (place / "app/node_modules/own").mkdir()
    (place / "app/node_modules/own/main.sh").write_text("#!/bin/sh\necho from $0\n")
    (place / "app/node_modules/own/main.sh").chmod(0o755)
    (place / "app/node_modules/.bin/own").symlink_to("../own/main.sh")
    app = sources.build(LayerStore(state), "app", ["npm", str(place / "app")]).ref
    program = f"{place}/app/node_modules/.bin/own"
    with RootImages(state).hold(
        [], [minimal, app], executable=["root"], points=skeleton_runsc.MOUNT_POINTS, packer=packer
    ) as held:
        done = run(held, [program])
    assert done.stdout.decode() == f"from {program}\n", done.stderr


def test_link_that_leads_out_stays_inside(state: Path, minimal: LayerRef, tmp_path: Path, packer: Path | None) -> None:
    (tmp_path / "tree").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "tree/absolute").symlink_to(secret)
    (tmp_path / "tree/relative").symlink_to("../" * 40 + str(secret)[1:])
    (tmp_path / "tree/bin").symlink_to("/../../usr/bin/cat")
    ref = sources.directory(LayerStore(state), "links", tmp_path / "tree", "/opt/links")
    with RootImages(state).hold(
        [], [minimal, ref.ref], executable=["root"], points=skeleton_runsc.MOUNT_POINTS, packer=packer
    ) as held:
        held.check.wait()
        ask = "cat /opt/links/absolute || cat /opt/links/relative || /opt/links/bin /etc/os-release"
        done = run(held, ["/bin/sh", "-c", ask])
    assert b"secret" not in done.stdout
    assert b"Debian" in done.stdout, done.stderr


def test_changed_byte_of_a_large_image_refuses(state: Path, minimal: LayerRef) -> None:
    """The image of debian-minimal has more files than are walked in this process."""
    images = RootImages(state)
    with images.hold([], [minimal], executable=["root"], points=[("/x", "dir")]) as held:
        held.check.wait()
        place = held.root / "usr/share/zoneinfo/Asia/Tokyo"
    raw = place.read_bytes()
    try:
        place.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with (
            images.hold([], [minimal], executable=["root"], points=[("/x", "dir")]) as held,
            pytest.raises(errors.LayerChangedError, match="/usr/share/zoneinfo/Asia/Tokyo: has other bytes"),
        ):
            held.check.wait()
        assert LayerStore(state).verify(minimal) == ("/usr/share/zoneinfo/Asia/Tokyo: has other bytes",)
    finally:
        place.write_bytes(raw)
    with images.hold([], [minimal], executable=["root"], points=[("/x", "dir")]) as held:
        held.check.wait()
