"""An agent that tries to get out: the probes of ../probes.toml with package = "python"."""

import sys

sys.dont_write_bytecode = True  # a refused start leaves nothing in the package, bytecode included

import gate  # noqa: E402

gate.require_gvisor()

# Only now, and only here: nothing hostile is even loaded anywhere else.
import execution  # noqa: E402, F401
import files  # noqa: E402, F401
import harness  # noqa: E402
import identity  # noqa: E402, F401
import kernel  # noqa: E402, F401
import mounts  # noqa: E402, F401
import network  # noqa: E402, F401
import processes  # noqa: E402, F401

harness.main()
