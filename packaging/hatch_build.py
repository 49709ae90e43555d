"""The one compiled file of the wheel: `covenant-start`, built from sandbox/kernel/proc/launcher.c by whoever builds the
wheel.

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


class StarterHook(BuildHookInterface[Any]):
    """Compiles before the wheel is packed, and names the platform in its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable install takes what is in the clone, where set-up builds it."""
        if version == "editable":
            return
        root = pathlib.Path(self.root)
        if shutil.which("gcc") is None:
            self.app.display_warning(f"no gcc: the wheel is built without {PROGRAM}, and starts a run some ms later")
            return
        subprocess.run([sys.executable, str(root / "scripts/build_starter")], check=True, stdout=subprocess.DEVNULL)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{PROGRAM}")
