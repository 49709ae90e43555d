"""`covenant learn` with names that are not Latin: what a manifest can hold is granted, and the rest is named."""

from __future__ import annotations

import os
from pathlib import Path

from tests.kernel.session_kit import Home
from tests.kernel.test_learn import home, learn, place

__all__ = ["home", "place"]

GRANTED = ("会議.txt", "اجتماع.txt", "caf\u00e9.txt", "👩🏽.txt", "inner.txt")
# Names that a manifest refuses, and how each is shown.
LEFT_OUT = {
    "[id].txt": "[id].txt",
    "cafe\u0301.txt": "cafe\u0301.txt",
    "a\\b.txt": "a\\b.txt",
    "a\u202eb.txt": "a\\u202eb.txt",
    "a\x1b[2Jb.txt": "a\\x1b[2Jb.txt",
    "p\u0430y.txt": "p\u0430y.txt",
}
# The kernel cuts the name of its process within a character, after 15 bytes.
PROGRAM = "aプログラムプログラム"
SCRIPT = f"""
import os, subprocess
for name in os.listdir(os.fsencode(os.getcwd())):
    if name.endswith(b".txt") and name != b"inner.txt":
        open(name).read()
subprocess.run(["./{PROGRAM}"], check=True)
"""


def test_names_that_are_not_latin_are_learnt(home: Home, place: Path) -> None:
    for name in (*GRANTED, *LEFT_OUT, os.fsdecode(b"\xff.txt")):
        Path(place, name).write_text("read\n")
    (place / "script.py").write_text(SCRIPT)
    for number in range(4):
        (place / f"unread{number}").write_text("of too many entries to grant the whole directory")
    (place / PROGRAM).write_text("#!/bin/sh\nread line < inner.txt\n")
    (place / PROGRAM).chmod(0o755)
    done, manifest, evidence = learn(home, place, "--", "python3", "script.py")
    assert done.returncode == 0, done.stderr
    read = {os.path.basename(path) for path in manifest["permissions"]["filesystem"]["read"]}
    assert read == {*GRANTED, "script.py", PROGRAM}
    assert [one["by"] for one in evidence["lines"] if one["value"].endswith("/inner.txt")] == [[PROGRAM]]
    shown = {os.path.basename(one["what"]): one["why"] for one in evidence["left_out"]}
    assert {name: "rename it" in shown[name] for name in LEFT_OUT.values()} == dict.fromkeys(LEFT_OUT.values(), True)
    assert b"\x1b" not in done.stderr
    # A fix: the files get other names.
    for number, name in enumerate(LEFT_OUT):
        Path(place, name).rename(place / f"plain{number}.txt")
    done, manifest, evidence = learn(home, place, "--", "python3", "script.py")
    assert (done.returncode, evidence["left_out"]) == (0, [])
