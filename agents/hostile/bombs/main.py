"""An agent that takes more than its share: probes.toml, package = "bombs"."""

import sys

sys.dont_write_bytecode = True  # a refused start leaves nothing in the package, bytecode included

import gate  # noqa: E402

gate.require_gvisor()

# Only now, and only here: nothing hostile is even loaded anywhere else.
import bombs  # noqa: E402, F401
import harness  # noqa: E402

harness.main()
