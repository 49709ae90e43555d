"""The virtual machine itself: qemu without a network, its output as it comes, its status, and its end in any case."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

from scripts.machine import console
from scripts.machine.console import SetupError
from scripts.machine.where import Machine
from scripts.virtual import image

QEMU = "/usr/bin/qemu-system-x86_64"
MEMORY_MB = 3072
# The last step of provision.sh in a boot; the second one takes Covenant away again.
SUITES = ("check", "check-package")
# From power on to power off.
DEADLINE_SECONDS = 1500
# Until the guest's first word: a kernel that does not boot says nothing on the port.
BOOT_SECONDS = 420
POWER_OFF_SECONDS = 60
_SERIAL_LINES = 60


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a boot ended: the status that the guest gave (None: none), and what ended it otherwise."""

    status: int | None
    problem: str
    seconds: float


def command(
    machine: Machine, place: pathlib.Path, payload: pathlib.Path, work: pathlib.Path, suite: str = SUITES[0]
) -> list[str]:
    """The whole command line of qemu. Nothing is written to the image: what the guest writes ends with it."""
    words = (machine.clone / "vagrant/cmdline").read_text().split()
    kernel = ["root=/dev/vda", "ro", "console=ttyS0", "panic=-1", *words, f"covenant.suite={suite}"]
    disks = []
    for name, path in (("root", place / image.ROOT), ("payload", payload), ("scratch", work / "scratch.raw")):
        disks += ["-drive", f"file={path},format=raw,if=none,id={name},snapshot=on"]
        disks += ["-device", f"virtio-blk-pci,drive={name},serial={name}"]
    ports = ["-device", "virtio-serial-pci"]
    for name in ("results", "status"):
        ports += ["-chardev", f"file,id={name},path={work / name}"]
        ports += ["-device", f"virtserialport,chardev={name},name=covenant.{name}"]
    return [
        *(QEMU, "-no-user-config", "-nodefaults", "-display", "none", "-nic", "none", "-no-reboot"),
        # Software emulation: a kvm that is not real hangs for ever, and a host that has none must pass too.
        *("-machine", "pc", "-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max", "-smp", "2"),
        *("-m", str(MEMORY_MB), "-device", "virtio-rng-pci"),
        *("-kernel", str(place / image.KERNEL), "-initrd", str(place / image.INITRD), "-append", " ".join(kernel)),
        *disks,
        *ports,
        *("-serial", f"file:{work / 'serial.log'}"),
    ]


def run(
    machine: Machine, place: pathlib.Path, payload: pathlib.Path, work: pathlib.Path, suite: str = SUITES[0]
) -> Outcome:
    """Boot, print what the guest says as it says it, and wait for its status.

    Raises:
        SetupError: qemu could not be started.
    """
    for name in ("results", "status", "serial.log"):
        (work / name).write_bytes(b"")
    with open(work / "scratch.raw", "wb") as scratch:
        scratch.truncate(512 << 20)
    began = time.monotonic()
    console.note(f"boot without network, serial console in {work / 'serial.log'}")
    with _qemu(command(machine, place, payload, work, suite), work) as process, open(work / "results", "rb") as results:
        problem = _follow(process, results, work, began)
    status = _status(work / "status")
    if status is None and not problem:
        problem = f"the machine ended without a status (qemu: {process.returncode})"
    return Outcome(status, problem, time.monotonic() - began)


@contextlib.contextmanager
def _qemu(arguments: list[str], work: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as said:
        try:
            # Writes of the guest go to files without a name in TMPDIR.
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(work)}
            )
        except OSError as e:
            raise SetupError(f"`{QEMU}` did not start: {e}") from e
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            said.seek(0)
            if text := said.read().decode(errors="replace").strip():
                console.note(f"qemu: {text[-2000:]}")


def _follow(process: subprocess.Popen[bytes], results: BinaryIO, work: pathlib.Path, began: float) -> str:
    """Print until the machine is off; what ended it instead, or an empty string."""
    spoken, off_at = False, None
    while True:
        ended = process.poll() is not None
        piece = results.read()
        if piece:
            spoken = True
            sys.stdout.write(piece.decode(errors="replace").replace("\r\n", "\n"))
            sys.stdout.flush()
            continue
        if ended:
            return ""
        now = time.monotonic()
        if off_at is None and _status(work / "status") is not None:
            off_at = now
        if off_at is not None and now - off_at > POWER_OFF_SECONDS:
            return f"still on {POWER_OFF_SECONDS} s after its status"
        if not spoken and now - began > BOOT_SECONDS:
            return f"no word within {BOOT_SECONDS} s"
        if now - began > DEADLINE_SECONDS:
            return f"not done within {DEADLINE_SECONDS} s"
        time.sleep(0.2)


def _status(path: pathlib.Path) -> int | None:
    words = path.read_text(errors="replace").split()
    return int(words[1]) if len(words) == 2 and words[0] == "status" and words[1].isdigit() else None


def serial_tail(work: pathlib.Path) -> str:
    """Return the end of the serial console, for the developer who looks for the cause of a failure."""
    lines = (work / "serial.log").read_text(errors="replace").splitlines()[-_SERIAL_LINES:]
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
