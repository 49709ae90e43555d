"""The variables of a server that are secrets: a program of ours reads their files, sets them, and becomes the server.

A secret in the configuration of a sandbox would be on the host's disk. The files are in memory, and only the server's
user reads them (``permissions.credentials.files``).
"""

from __future__ import annotations

import json
from typing import Final

from policy.manifest.tools import secret_scan
from policy.manifest.tools.document import Server, split_variable

# By the runtime that starts it: the file beside the server's own, and its text.
_PYTHON: Final = """\
import json, os, sys
for name, secret in json.loads(GIVEN).items():
    try:
        with open(os.path.join(os.environ["CREDENTIALS_DIRECTORY"], secret), "rb") as stream:
            os.environb[name.encode()] = stream.read()
    except OSError as error:
        sys.exit(f"covenant: variable {name}: no secret {secret} is given: {error.strerror}")
sys.argv = sys.argv[1:]
program = os.path.abspath(sys.argv[0])
sys.path[0] = os.path.dirname(program)
with open(program, "rb") as stream:
    code = compile(stream.read(), program, "exec")
for name in [name for name in globals() if not name.startswith("__") and name != "code"]:
    del globals()[name]
__file__ = code.co_filename
exec(code)
"""
_NODE: Final = """\
const { readFileSync } = require("node:fs"), { join, resolve } = require("node:path");
for (const [name, secret] of Object.entries(JSON.parse(GIVEN))) {
  try {
    process.env[name] = readFileSync(join(process.env.CREDENTIALS_DIRECTORY, secret), "utf8");
  } catch (error) {
    console.error(`covenant: variable ${name}: no secret ${secret} is given: ${error.code}`);
    process.exit(1);
  }
}
process.argv.splice(1, 1);
process.argv[1] = resolve(process.argv[1]);
require("node:module").runMain();
"""
STARTERS: Final = {"python3": (".covenant-start.py", _PYTHON), "node": (".covenant-start.cjs", _NODE)}

HINT: Final = "start a script of its package with node or python3, or take the reference out of env"


def message(server: Server) -> str:
    """Return why a server without a starter cannot be given a secret."""
    return f"server `{server.alias}` is no script of node or python3, and no other program is given a secret in env"


def secrets_of(server: Server) -> dict[str, str]:
    """Return the variables of a server that are secrets, each with the name of its secret."""
    found = ((name, secret_scan.referenced(value)) for name, value in map(split_variable, server.env))
    return {name: secret for name, secret in found if secret is not None}


def starter(runtime: str, server: Server) -> tuple[str, bytes] | None:
    """Return name and text of the program that sets the variables of a server. None where no program can."""
    if runtime not in STARTERS:
        return None
    name, code = STARTERS[runtime]
    given = json.dumps(json.dumps(secrets_of(server), sort_keys=True))
    return name, code.replace("GIVEN", given).encode()
