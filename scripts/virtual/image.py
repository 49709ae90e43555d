"""The image of the virtual machine: a Debian by debootstrap, provisioned in a chroot, packed into an ext4 file.

(1) the wheels of the locks, fetched on the machine itself: its index need not be reachable from a chroot
(2) debootstrap, from the machine's own mirror
(3) a kernel with its initrd
(4) the steps of provision.sh that need a network or are the same each time
(5) the unit that runs the rest when the machine boots
(6) the Vagrantfile, judged by a real vagrant over the same tree, where the release has one
(7) mke2fs -d: no loop device, no mount

All of it in a mount namespace of its own, so that nothing that debootstrap or apt mounts outlives it.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import time

from scripts.machine import apt, console
from scripts.machine.console import SetupError
from scripts.machine.where import Machine
from scripts.virtual import recipe

ROOT, KERNEL, INITRD, WHEELS = "root.ext4", "vmlinuz", "initrd.img", "wheels"
_UNIT = "covenant-check.service"
# Own mounts and process ids: what a package's script leaves running ends with the step.
_APART = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")


def provide(machine: Machine) -> pathlib.Path:
    """The directory with the image for this recipe, made if it is not there.

    Raises:
        SetupError: a release without a recipe, or a step failed.
    """
    if machine.codename not in recipe.RELEASES:
        raise SetupError(
            f"a Debian of {' or '.join(recipe.RELEASES)}, whose mirror the virtual machine is made from; "
            f"this is {machine.system}",
            "run it there, or use vagrant up (docs/virtual-machine.md)",
        )
    place = recipe.cache() / recipe.digest(machine)
    if (place / "complete").exists():
        console.ok(f"image {place}")
        return place
    began = time.monotonic()
    if place.exists():
        console.change(f"remove {place}, which was not finished")
        shutil.rmtree(place)
    console.change(f"make the image of the virtual machine in {place}")
    place.mkdir(parents=True)
    _make(machine, machine.codename, place)
    (place / "complete").write_text("")
    console.ok(f"image made in {time.monotonic() - began:.0f} s")
    for other in place.parent.iterdir():
        if other != place and other.is_dir():
            console.change(f"remove {other}, an image of another recipe")
            shutil.rmtree(other)
    return place


def _make(machine: Machine, codename: str, place: pathlib.Path) -> None:
    files = apt.source_files()
    root = place / "root"
    steps = str(machine.clone / "vagrant/provision.sh")

    # (1) the wheels
    wheels = place / WHEELS
    console.change("fetch the Python packages of locks/ by their hashes")
    console.run([steps, "wheels"], env={"WHEELS": str(wheels)})

    # (2) debootstrap
    origin = recipe.origin(files, codename)
    keyring = [f"--keyring={origin.signed_by}"] if origin.signed_by.startswith("/") else []
    include = "--include=" + ",".join(recipe.BASE)
    console.change(f"debootstrap {codename} from this machine's own mirror")
    bootstrap = ["debootstrap", "--variant=minbase", include, *keyring, codename, str(root), origin.uri]
    console.run([*_APART, *bootstrap], env=_proxy())
    _configure(root, files, codename)

    # (3) the kernel
    console.change(f"in the image: {' '.join(recipe.KERNEL)}")
    _chroot(machine, root, "apt-get", "-q", "update")
    _chroot(machine, root, "apt-get", "-qy", "install", "--no-install-recommends", *recipe.KERNEL)
    for name, found in ((KERNEL, root.glob("boot/vmlinuz-*")), (INITRD, root.glob("boot/initrd.img-*"))):
        shutil.copyfile(max(found), place / name)

    # (4) provisioning
    shutil.copytree(wheels, root / "var/cache/covenant/wheels", dirs_exist_ok=True)
    console.change(f"in the image: vagrant/provision.sh {' '.join(recipe.STEPS)}")
    _chroot(machine, root, "/srv/covenant/vagrant/provision.sh", *recipe.STEPS)
    _chroot(machine, root, "apt-get", "clean")

    # (5) the unit
    shutil.copyfile(machine.clone / "vagrant" / _UNIT, root / "etc/systemd/system" / _UNIT)
    _chroot(machine, root, "systemctl", "enable", _UNIT)
    # A login prompt on the console hangs up what is written there.
    _chroot(machine, root, "systemctl", "mask", "serial-getty@ttyS0.service", "getty@tty1.service")

    # (6) the Vagrantfile
    if codename in recipe.WITH_VAGRANT:
        console.change("vagrant validate, over the image's tree")
        console.run([*_APART, str(machine.clone / "scripts/virtual/validate.sh"), str(root), str(machine.clone)])
        (place / "root.over").rmdir()

    # (7) the file system
    for path in (*root.glob("boot/*"), *root.glob("var/lib/apt/lists/*_*")):
        path.unlink() if path.is_file() else None
    console.run(["mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", str(root), str(place / ROOT), recipe.SIZE])
    shutil.rmtree(root)


def _configure(root: pathlib.Path, files: dict[str, str], codename: str) -> None:
    """Write the name, apt's settings and the mounts of the image. Its root has no password, so no login is possible."""
    (root / "etc/hostname").write_text("covenant-vm\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost covenant-vm\n::1 localhost\n")
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    (root / "etc/apt/sources.list.d/machine.sources").write_text(recipe.guest_sources(files, codename))
    for name in recipe.keyrings(files, codename):
        with contextlib.suppress(shutil.SameFileError):
            shutil.copyfile(name, root / name.lstrip("/"))
    settings = "".join(f"{line}\n" for line in _apt_settings())
    (root / "etc/apt/apt.conf.d/90machine").write_text(settings)
    # No daemon starts in a chroot.
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    (root / "etc/fstab").write_text(
        "LABEL=root / ext4 defaults,noatime 0 1\nLABEL=payload /srv/covenant ext4 defaults,noatime 0 0\n"
    )


def _apt_settings() -> list[str]:
    """How the machine itself reaches its mirrors, where that is configured for apt."""
    _, out = console.quiet(["apt-config", "dump"])
    return [line for line in out.splitlines() if line.startswith(("Acquire::http::", "Acquire::https::"))]


def _proxy() -> dict[str, str]:
    for line in _apt_settings():
        name, _, value = line.rstrip(";").partition(" ")
        if name == "Acquire::http::Proxy":
            return {"http_proxy": value.strip('"')}
    return {}


def _chroot(machine: Machine, root: pathlib.Path, *command: str) -> None:
    within = str(machine.clone / "scripts/virtual/chroot.sh")
    console.run([*_APART, within, str(root), str(machine.clone), *command])
