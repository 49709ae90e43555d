"""The console script ``covenant-supervisor``: import the service without garbage collection, and run it.

The collector looks through all objects some hundred times while a thousand modules are imported, and frees nothing.
It took 100 of 560 ms. ``main.serve`` collects once, and freezes what is there.
"""

from __future__ import annotations

import gc
import sys


def entry() -> None:
    """Run the console script."""
    gc.disable()
    from sandbox.serve import main

    sys.exit(main.main(sys.argv[1:]))
