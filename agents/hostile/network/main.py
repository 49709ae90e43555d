"""An agent that tries to get out by the network: the probes of ../network.toml."""

import sys

sys.dont_write_bytecode = True  # a refused start leaves nothing in the package, bytecode included

import gate  # noqa: E402

gate.require_gvisor()

# Only now, and only here: nothing hostile is even loaded anywhere else.
import addresses  # noqa: E402, F401
import doors  # noqa: E402, F401
import floods  # noqa: E402, F401
import frames  # noqa: E402, F401
import harness  # noqa: E402
import hellos  # noqa: E402, F401
import names  # noqa: E402, F401
import packets  # noqa: E402, F401

harness.main()
