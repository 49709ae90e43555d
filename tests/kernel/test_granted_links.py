"""Granted paths that are links of the host: their names are there in the agent's root, and lead to nothing more.

Every denial stands beside the same probe where it is granted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.prove.live import Standing
from sandbox.host import facts as host_facts
from sandbox.rootfs import host_paths
from tests.kernel.live_runs import live
from tests.kernel.world import World, refused

LOOK = """
def look(path):
    try:
        return open(path).read()
    except OSError as e:
        return e.strerror
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def tree() -> Iterator[Path]:
    """A directory of root with two versions, a link `current` to the first, and a file beside them."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        top = Path(made)
        for version in ("v1", "v2"):
            (top / version).mkdir()
            (top / version / "page").write_text(version)
        (top / "current").symlink_to("v1")
        (top / "secret").write_text("secret")
        for place in (top, top / "v1", top / "v2"):
            place.chmod(0o755)
        yield top


def granted(*paths: Path | str) -> str:
    return "[permissions.filesystem]\nread = [{}]\n".format(", ".join(f'"{path}"' for path in paths))


def failure(world: World, *paths: Path | str) -> errors.CovenantError:
    """The refusal of a run that is granted these paths."""
    with pytest.raises(errors.CovenantError) as caught:
        world.run_code("", more=granted(*paths))
    return caught.value


def asked(world: World, code: str, *paths: Path | str, **fields: Any) -> Any:
    return world.ask(LOOK + code, more=granted(*paths), **fields)


def test_granted_link_has_its_name_and_target(world: World, tree: Path) -> None:
    code = f"""
top = {str(tree)!r}
answer = [os.readlink(top + "/current"), look(top + "/current/page"), look(top + "/v1/page"), sorted(os.listdir(top))]
"""
    assert asked(world, code, tree / "current") == ["v1", "v1", "v1", ["current", "v1"]]
    # Control: the target alone has no other name.
    assert asked(world, f"answer = look({str(tree / 'current/page')!r})", tree / "v1") == "No such file or directory"


def test_granted_path_through_a_link_is_there(world: World, tree: Path) -> None:
    """A component of the path is the link; nothing beside the granted file is there."""
    code = f"""
top = {str(tree)!r}
answer = [look(top + "/current/page"), look(top + "/v1/page"), look(top + "/secret"), os.listdir(top + "/v1")]
"""
    (tree / "v1/other").write_text("other")
    found = asked(world, code, tree / "current/page")
    assert found == ["v1", "v1", "No such file or directory", ["page"]]


def test_program_by_a_link_starts_a_shell(world: World) -> None:
    code = """
import subprocess
answer = subprocess.run("echo from the shell", shell=True, capture_output=True, text=True).stdout
"""
    more = '[permissions.executables]\nallow = ["{}"]\n'
    assert world.ask(code, more=more.format("/bin/sh")) == "from the shell\n"
    # Control: the program by its real name has no other.
    failed = world.run_code("import os\nos.execv('/usr/bin/sh', ['sh'])\n", more=more.format("/usr/bin/dash"))
    assert "FileNotFoundError" in failed.stderr


def test_loader_by_a_link_starts_nothing(world: World) -> None:
    """Debian has a link /usr/bin/ld.so: the copy in the root refuses to be started by that name too."""
    code = """
import subprocess
def start(*argv):
    return subprocess.run(argv, capture_output=True, text=True).returncode
answer = [start("/usr/bin/true"), start(LOADER, "/usr/bin/true")]
"""
    for loader in ("/usr/bin/ld.so", "/lib64/ld-linux-x86-64.so.2"):
        if not os.path.exists(loader):
            continue
        more = f'[permissions.executables]\nallow = ["/usr/bin/true", "{loader}"]\n'
        assert world.ask(f"LOADER = {loader!r}" + code, more=more) == [0, 126]


def test_run_with_links_is_attested(world: World, tree: Path) -> None:
    with live(world, more=granted(tree / "current")) as one:
        found = one.report()
        assert {layer.name: layer.standing for layer in found.layers}["mounts"] is Standing.EQUAL
        assert found.holds


def test_link_that_moves_to_the_target_is_followed_anew(world: World, tree: Path) -> None:
    """Each run follows the host's link as it is then."""
    for version in ("v1", "v2"):
        (tree / "current").unlink()
        (tree / "current").symlink_to(version)
        assert asked(world, f"answer = look({str(tree / 'current/page')!r})", tree / "current") == version


def test_link_swapped_after_the_decision_changes_nothing(
    world: World, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision and the mount a link becomes one to a secret. What was decided is mounted."""
    real = host_facts.for_manifest

    def then_swapped(*args: Any, **named: Any) -> Any:
        found = real(*args, **named)
        (tree / "current").unlink()
        (tree / "current").symlink_to("secret")
        return found

    monkeypatch.setattr(host_facts, "for_manifest", then_swapped)
    current, secret = str(tree / "current"), str(tree / "secret")
    code = f"answer = [look({current + '/page'!r}), look({current!r}), look({secret!r})]"
    assert asked(world, code, tree / "current") == ["v1", "Is a directory", "No such file or directory"]


def test_target_swapped_for_a_link_is_refused(world: World, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = host_facts.for_manifest

    def then_swapped(*args: Any, **named: Any) -> Any:
        found = real(*args, **named)
        shutil.rmtree(tree / "v1")
        (tree / "v1").symlink_to("v2")
        return found

    monkeypatch.setattr(host_facts, "for_manifest", then_swapped)
    failed = failure(world, tree / "current")
    assert "leads through symlink" in refused(errors.GrantedPathError, failed)


def test_link_that_another_user_can_make_is_refused(world: World, tree: Path) -> None:
    (tree / "theirs").mkdir()
    (tree / "theirs/link").symlink_to(tree / "v1")
    code = f"answer = look({str(tree / 'theirs/link/page')!r})"
    assert asked(world, code, tree / "theirs/link") == "v1"
    os.lchown(tree / "theirs/link", 4242, 4242)
    failed = failure(world, tree / "theirs/link")
    assert "belongs to uid 4242" in refused(errors.GrantedPathError, failed)
    # The fix that the error names.
    assert failed.hint == f"grant `{tree / 'v1'}` instead"
    assert asked(world, f"answer = look({str(tree / 'v1/page')!r})", tree / "v1") == "v1"
    os.lchown(tree / "theirs/link", 0, 0)
    os.chown(tree / "theirs", 4242, 4242)
    failed = failure(world, tree / "theirs/link")
    assert "others can change" in refused(errors.GrantedPathError, failed)


def test_link_to_a_file_of_another_user_is_refused(world: World, tree: Path) -> None:
    (tree / "link").symlink_to("v1/page")
    code = f"answer = look({str(tree / 'link')!r})"
    assert asked(world, code, tree / "link") == "v1"
    os.chown(tree / "v1/page", 4242, 4242)
    failed = failure(world, tree / "link")
    message = refused(errors.GrantedPathError, failed)
    assert f"`{tree / 'link'}` leads to `{tree / 'v1/page'}`" in message
    assert failed.hint.startswith(f"chown root {tree / 'v1/page'}")
    os.chown(tree / "v1/page", 0, 0)  # the fix
    assert asked(world, code, tree / "link") == "v1"


@pytest.mark.parametrize("target", ["/etc/shadow", "/proc/1/root", "/run", "/", "/root/.ssh/id"])
def test_link_to_what_is_never_granted_is_refused(world: World, tree: Path, target: str) -> None:
    (tree / "link").symlink_to(target)
    failed = failure(world, tree / "v1", tree / "link")
    assert isinstance(failed, errors.NeverGrantableError | errors.GrantedPathError), failed


def test_link_loop_is_refused(world: World, tree: Path) -> None:
    (tree / "a").symlink_to("b")
    (tree / "b").symlink_to("a")
    failed = failure(world, tree / "a")
    assert "more than 40 symlinks" in refused(errors.GrantedPathError, failed)


def test_link_in_a_granted_directory_leads_nowhere_else(world: World, tree: Path) -> None:
    """A link inside a granted directory is there as it is, and grants nothing that it leads to."""
    (tree / "v1/out").symlink_to("../secret")
    code = f"answer = look({str(tree / 'v1/out')!r})"
    assert asked(world, code, tree / "v1") == "No such file or directory"
    failed = failure(world, tree / "v1", tree / "v1/out")
    assert "which is not granted" in refused(errors.NotEnforceableError, failed)
    assert failed.hint == f"grant `{tree / 'secret'}` as well"
    assert asked(world, code, tree / "v1", tree / "v1/out", tree / "secret") == "secret"


def test_link_on_a_file_system_of_agents_is_refused(world: World, tree: Path) -> None:
    """An agent that may write there can make a link as root. The control is the same file system without nosuid."""
    image, place = tree / "image", tree / "data"
    place.mkdir(mode=0o755)
    subprocess.run(["truncate", "-s", "8M", str(image)], check=True, timeout=60)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)

    def mounted(options: str) -> None:
        subprocess.run(["mount", "-o", f"loop,{options}", str(image), str(place)], check=True, timeout=60)

    try:
        mounted("nodev")
        (place / "link").symlink_to(tree / "v1")
        found = host_paths.look_up(str(place / "link"), follow=True)
        assert found.place == str(tree / "v1")
        subprocess.run(["umount", str(place)], check=True, timeout=60)
        mounted("nosuid,nodev")
        with pytest.raises(errors.GrantedPathError, match="an agent may be granted its file system"):
            host_paths.look_up(str(place / "link"), follow=True)
    finally:
        subprocess.run(["umount", str(place)], check=False, timeout=60)


def test_names_of_localhost_by_a_link_of_the_host(world: World, tree: Path) -> None:
    """Names of our own files of the root stay ours where nothing is granted there."""
    assert "localhost" in asked(world, "answer = look('/etc/hosts')", tree / "current")
