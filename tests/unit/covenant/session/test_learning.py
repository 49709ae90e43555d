"""First lines of scripts that learning reads on the host, and files that it must not open."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from covenant.session import learning
from policy.learn.ceiling import Ceiling


def test_only_a_regular_file_is_opened_for_its_first_line(tmp_path: Path) -> None:
    script, fifo, link = tmp_path / "script", tmp_path / "fifo", tmp_path / "link"
    script.write_bytes(b"#! /usr/bin/python3 -I\nprint()\n")
    (tmp_path / "text").write_bytes(b"/usr/bin/python3\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(fifo)
    link.symlink_to(script)
    # A writer waits until the fifo is opened to read.
    opened = threading.Event()

    def write() -> None:
        os.close(os.open(fifo, os.O_WRONLY))
        opened.set()

    writer = threading.Thread(target=write)
    writer.start()
    names = [*map(str, tmp_path.iterdir()), "/dev/zero", str(tmp_path / "none")]
    with contextlib.ExitStack() as held:
        root = learning.Root(tmp_path / "state", (), held)
        found = root.interpreters(names, Ceiling(reads=(str(tmp_path), "/dev/zero")))
    assert found == {str(script): "/usr/bin/python3"}
    assert not opened.wait(0.2)
    # Open until the writer has come, however late it begins.
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer.join(60)
    os.close(reader)
    assert opened.is_set()
