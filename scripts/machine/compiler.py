"""Compile one C source to one program: the same compiler gives the same bytes, since no time, path or build id goes in.

What is newer than its source is left alone, so that a second set-up changes no file.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

CLONE = pathlib.Path(__file__).resolve().parents[2]
COMPILER = "gcc"
FLAGS = (
    "-std=c11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    f"-ffile-prefix-map={CLONE}=.",
    "-Wl,--build-id=none",
    "-s",
)
STATIC = ("-static",)
DYNAMIC = ("-fPIE", "-pie")


def build(target: pathlib.Path, source: pathlib.Path, *flags: str) -> None:
    """Compile `target` unless it is newer than its source and this module.

    Raises:
        FileNotFoundError: there is no compiler.
        subprocess.CalledProcessError: it refuses the source.
    """
    newest = max(path.stat().st_mtime_ns for path in (source, pathlib.Path(__file__)))
    if target.is_file() and target.stat().st_mtime_ns > newest:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Build beside the target, then rename: a process that runs meanwhile sees the old file or the new one, never half.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as directory:
        made = pathlib.Path(directory) / target.name
        subprocess.run([COMPILER, *FLAGS, *flags, "-o", str(made), str(source)], check=True)
        made.chmod(0o755)
        made.rename(target)
    print(f"built {target.relative_to(CLONE) if target.is_relative_to(CLONE) else target}")


def attempt(name: str, work: Callable[[], None]) -> int:
    """The exit status of a script that compiles: 0, or 1 when the compiler is missing or refuses."""
    try:
        work()
    except FileNotFoundError as error:
        print(f"{name}: {error}; install the compiler with: apt install gcc libc6-dev", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{name}: {COMPILER} ended with status {error.returncode}", file=sys.stderr)
        return 1
    return 0
