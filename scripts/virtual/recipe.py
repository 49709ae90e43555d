"""The recipe for the image of the virtual machine, and the digest under which the image is kept."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from scripts.machine import sources
from scripts.machine.console import SetupError
from scripts.machine.where import Machine

# What debootstrap puts in beside its smallest set: systemd as on a machine, and what provision.sh stands on.
BASE = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "procps", "iproute2", "nftables"),
    *("python3", "python3-venv", "ca-certificates", "e2fsprogs"),
)
# Needs an initrd: ext4 and virtio are modules of this kernel.
KERNEL = ("linux-image-cloud-amd64", "initramfs-tools")
RELEASES = ("bookworm", "trixie")
# Later releases have no vagrant any more.
WITH_VAGRANT = ("bookworm",)
# Steps of provision.sh that the image already went through; the rest runs in the guest.
STEPS = ("packages", "v2-only", "no-kvm", "environment")
SIZE = "3G"
# In the clone: logs of the last boot. That it is in set-up's record says that there are images as well.
WORK = "build/vm"

# Files of the clone that go into the image; a change of one of them makes another image.
FILES = (
    "vagrant/provision.sh",
    "vagrant/packages.py",
    "vagrant/cmdline",
    "vagrant/covenant-check.service",
    "locks/runtime.txt",
    "locks/dev.txt",
    "scripts/virtual/recipe.py",
    "scripts/virtual/image.py",
    "scripts/virtual/chroot.sh",
    "scripts/virtual/validate.sh",
    "vagrant/Vagrantfile",
)


def cache() -> pathlib.Path:
    """Where images are kept: outside the clone, so that a fresh one finds them."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(home) / "covenant" / "vm"


def digest(machine: Machine) -> str:
    """Return the digest of everything that decides the image's content, except the mirror's versions of that day."""
    parts = [repr((machine.codename, os.uname().machine, STEPS)).encode()]
    folders = sorted((machine.clone / "scripts/machine").glob("*.py"))
    parts += [path.read_bytes() for path in [*(machine.clone / name for name in FILES), *folders]]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def origin(files: Mapping[str, str], codename: str) -> sources.Entry:
    """Return the machine's own entry for its release: mirror and key.

    Raises:
        SetupError: there is none.
    """
    found = [entry for entry in sources.entries(files) if entry.suite == codename]
    if not found:
        raise SetupError(f"an apt source of this machine for {codename}", "look at /etc/apt/sources.list.d")
    return found[0]


def guest_sources(files: Mapping[str, str], codename: str) -> str:
    """The image's apt sources: the machine's own entries of this release, its updates and its security."""
    wanted = (codename, f"{codename}-updates", f"{codename}-security")
    stanzas = []
    for entry in sources.entries(files):
        if entry.suite in wanted:
            lines = ["Types: deb", f"URIs: {entry.uri}", f"Suites: {entry.suite}", "Components: main"]
            stanzas.append("\n".join([*lines, *([f"Signed-By: {entry.signed_by}"] if entry.signed_by else [])]) + "\n")
    return "\n".join(dict.fromkeys(stanzas))


def keyrings(files: Mapping[str, str], codename: str) -> Sequence[str]:
    """Key files that those entries name."""
    named = [entry.signed_by for entry in sources.entries(files) if entry.suite.startswith(codename)]
    return sorted({name for name in named if re.fullmatch(r"/[\w./+-]+", name)})
