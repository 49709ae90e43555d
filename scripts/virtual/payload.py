"""The payload of a boot, beside the image: this clone as it is now, and Covenant's package built from it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

from scripts.machine import console
from scripts.machine.console import SetupError
from scripts.machine.where import Machine

SIZE = "512M"


def files(clone: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of the clone that git tracks, and the new ones that it does not ignore, as relative paths.

    Raises:
        SetupError: git failed.
    """
    # Under sudo the clone may belong to another user; the command line may say that it is safe.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=clone, capture_output=True)
    if done.returncode != 0:
        raise SetupError(f"git in {clone}: {done.stderr.decode(errors='replace').strip()}", "use a clone made by git")
    names = sorted({name for name in done.stdout.decode().split("\0") if name})
    return [pathlib.Path(name) for name in names if (clone / name).is_file() and not (clone / name).is_symlink()]


def make(machine: Machine, work: pathlib.Path) -> pathlib.Path:
    """Make an ext4 file with the clone, and in `built/` the packages.

    Raises:
        SetupError: a package cannot be built.
    """
    stage = work / "payload"
    shutil.rmtree(stage, ignore_errors=True)
    for name in files(machine.clone):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(machine.clone / name, stage / name)
    console.change("build Covenant's package, and a disk with it and the clone")
    steps = str(machine.clone / "vagrant/provision.sh")
    console.run([steps, "package"], env={"BUILT": str(stage / "built")})
    disk = work / "payload.ext4"
    disk.unlink(missing_ok=True)
    owner = ["-E", "root_owner=0:0"]
    console.run(["mke2fs", "-q", "-t", "ext4", "-L", "payload", *owner, "-d", str(stage), str(disk), SIZE])
    shutil.rmtree(stage)
    return disk
