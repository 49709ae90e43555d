"""Sign the checksums of a release by a key that the operator gives, as ssh-keygen(1) verifies."""

from __future__ import annotations

import pathlib
import shutil

from scripts.machine import console
from scripts.machine.console import SetupError

# A signature of one purpose is none of another (ssh-keygen -n).
NAMESPACE = "covenant-release"
_KINDS = ("(ED25519)", "(ED25519-SK)")


def check(key: pathlib.Path) -> None:
    """Look at the key before anything is made.

    Raises:
        SetupError: there is no ssh-keygen, no key, or one of another kind than Ed25519.
    """
    if shutil.which("ssh-keygen") is None:
        raise SetupError("there is no ssh-keygen", "apt-get install openssh-client")
    if not key.is_file():
        raise SetupError(f"there is no key at `{key}`", f"ssh-keygen -t ed25519 -f {key}")
    said = console.run(["ssh-keygen", "-l", "-f", str(key)])
    if not said.rstrip().endswith(_KINDS):
        raise SetupError(f"`{key}` is no Ed25519 key: {said.strip()}", "ssh-keygen -t ed25519 -f KEY")


def sign(path: pathlib.Path, key: pathlib.Path) -> pathlib.Path:
    """Write the signature beside `path`, and return it. A public key is enough where an agent has the private one.

    Raises:
        SetupError: ssh-keygen refused, as it does where it cannot ask for a passphrase.
    """
    target = path.with_name(f"{path.name}.sig")
    target.unlink(missing_ok=True)
    console.change(f"sign {path.name} by `{key}`")
    console.run(["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)])
    return target
