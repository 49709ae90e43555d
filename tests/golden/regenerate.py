"""Every golden file anew: ``python -m tests.golden.regenerate``. Look at what git says has changed."""

from __future__ import annotations

import runpy

from tests.golden import decisions_kit

# Each module that can be run writes its own files when it is: none can be forgotten here.
WRITERS = sorted(p.stem for p in decisions_kit.HERE.parent.glob("test_*.py") if "__main__" in p.read_text())


def main() -> None:
    """Write them all."""
    for name in WRITERS:
        runpy.run_module(f"tests.golden.{name}", run_name="__main__")
    for name in decisions_kit.names():
        path = decisions_kit.HERE / f"{name}.json"
        path.write_text(decisions_kit.written(decisions_kit.read(name)["inputs"]))


if __name__ == "__main__":
    main()
