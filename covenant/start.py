"""The console script ``covenantd``: import the daemon without garbage collection, and run it.

The collector looks through all objects some hundred times while the daemon is imported, and frees nothing. That took
100 of 1,000 ms. ``daemon.serve`` collects once, and turns the collector on when it serves.
"""

from __future__ import annotations

import gc
import sys


def entry() -> None:
    """Run the console script."""
    gc.disable()
    from covenant import daemon

    sys.exit(daemon.main(sys.argv[1:]))
