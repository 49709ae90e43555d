"""The runtime command: any program of the root, with layers and with files of the host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from policy import errors
from sandbox.host import erofs_roots
from sandbox.layers.store import LayerStore
from tests.kernel.world import World

TEXT = '[process]\ncontract = "text"\nargs = {args}\n'


def command(world: World, entry: str, args: str = "[]", more: str = "") -> Path:
    """Sign a package whose entry is a program of the root."""
    return world.sign(world.package({"readme": ""}, runtime="command", entry=entry, more=TEXT.format(args=args) + more))


def test_program_of_host_answers_with_its_stdout(world: World) -> None:
    answer = world.run(command(world, "cat"), text="hello")
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "hello"


def test_intent_stands_in_argument(world: World) -> None:
    answer = world.run(command(world, "/usr/bin/echo", '["-n", "got {intent}"]'), text="$(id); 'x'")
    assert answer.result is not None, (answer.error, answer.stderr)
    assert answer.result.text == "got $(id); 'x'"


def test_missing_program_is_named(world: World) -> None:
    with pytest.raises(errors.ProgramError, match="`nosuch` is not in this host"):
        world.run(command(world, "nosuch"))


def shell_layer(world: World, tmp: Path) -> str:
    """Pack dash and cat of this machine with their libraries, and give the reference."""
    tree = tmp / "tree"
    for name in ("usr/bin", "usr/lib/x86_64-linux-gnu", "usr/lib64", "srv"):
        (tree / name).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (tree / link).symlink_to(f"usr/{link}")
    for program in ("dash", "cat", "env"):
        shutil.copy(f"/usr/bin/{program}", tree / "usr/bin")
    (tree / "usr/bin/sh").symlink_to("dash")
    shutil.copy("/lib/x86_64-linux-gnu/libc.so.6", tree / "usr/lib/x86_64-linux-gnu")
    shutil.copy("/lib64/ld-linux-x86-64.so.2", tree / "usr/lib64")
    (tree / "srv" / "note").write_text("of the layer")
    return str(LayerStore(world.state).pack_tree(tree, "shell").ref)


def with_root(world: World, layer: str, script: str, *, allow: str = '["root"]', more: str = "") -> Path:
    """Sign a shell with a script, in a root of one layer."""
    return command(
        world,
        "sh",
        f"['-c', '''{script}''']",
        f'[root]\nlayers = ["{layer}"]\n[permissions.executables]\nallow = {allow}\n{more}',
    )


def test_shell_of_layer_starts_programs(world: World, tmp_path: Path) -> None:
    layer = shell_layer(world, tmp_path)
    answer = world.run(with_root(world, layer, "cat /srv/note; echo; cat /etc/hosts | cat; echo $0 $PWD"))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    first, *rest = answer.result.text.splitlines()
    assert first == "of the layer"
    assert rest[-1] == "/usr/bin/sh /workspace"


def test_program_without_tree_is_refused(world: World, tmp_path: Path) -> None:
    layer = shell_layer(world, tmp_path)
    script = "cat /srv/note || echo refused; echo still"
    refused = world.run(with_root(world, layer, script, allow="[]"))
    assert refused.result is not None, (refused.error, refused.stderr)
    assert refused.result.text.splitlines() == ["refused", "still"]
    one = world.run(with_root(world, layer, script + "; env || echo no env", allow='["/usr/bin/cat"]'))
    assert one.result is not None, (one.error, one.stderr)
    assert one.result.text.splitlines()[-1] == "no env"
    assert one.result.text.startswith("of the layer")


def test_changed_layer_is_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a root that is a directory (tests.kernel.test_erofs_roots has the file)."""
    monkeypatch.setattr(erofs_roots, "program", lambda: None)
    layer = shell_layer(world, tmp_path)
    package = with_root(world, layer, "cat /srv/note")
    assert world.run(package).error is None
    (note,) = (world.state / "rootfs" / "images").glob("*/root/srv/note")
    with note.open("r+b") as file:
        file.write(b"X")
    with pytest.raises(errors.LayerChangedError):
        world.run(package)


def test_layer_that_is_not_there_is_named(world: World) -> None:
    missing = f"shell@sha256:{'0123456789abcdef' * 4}"
    with pytest.raises(errors.LayerError, match="is not in the store"):
        world.run(with_root(world, missing, "true"))
