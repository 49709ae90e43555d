"""Files of the wheel beside its sources: units and settings that `covenant setup` lays, and one compiled program.

The program is `covenant-start`, built from sandbox/kernel/proc/launcher.c on the machine that builds the wheel.

Without a compiler the wheel is one of pure Python and says so; what it installs then forks where it would have started
that program (sandbox/kernel/proc/launcher.py).
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAM = "sandbox/kernel/proc/covenant-start"
# What `covenant setup` lays on the machine, from packaging/ of the clone.
DATA = "covenant/cli/setup/data"
LAID = ("systemd", "scripts", "system/sysusers.conf", "system/tmpfiles.conf", "system/config.toml")


class StarterHook(BuildHookInterface[Any]):
    """Compiles before the wheel is packed, names the platform in its tag, and adds the files of ``LAID``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable install takes what is in the clone, where set-up builds it."""
        if version == "editable":
            return
        root = pathlib.Path(self.root)
        for name in LAID:
            build_data["force_include"][str(root / "packaging" / name)] = f"{DATA}/{name}"
        if shutil.which("gcc") is None:
            self.app.display_warning(f"no gcc: the wheel is built without {PROGRAM}, and starts a run some ms later")
            return
        subprocess.run([sys.executable, str(root / "scripts/build_starter")], check=True, stdout=subprocess.DEVNULL)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{PROGRAM}")
