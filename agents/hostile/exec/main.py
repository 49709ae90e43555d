"""An agent that may start one program and tries to start others: probes.toml, package = "exec"."""

import sys

sys.dont_write_bytecode = True  # a refused start leaves nothing in the package, bytecode included

import gate  # noqa: E402

gate.require_gvisor()

# Only now, and only here: nothing hostile is even loaded anywhere else.
import granted  # noqa: E402, F401
import harness  # noqa: E402

harness.main()
