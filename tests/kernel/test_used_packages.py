"""The packages with native code that programs use most: 50 wheels of PyPI import, and addons of npm answer a call.

They are installed by pip and npm without any script of theirs being run, and are loaded in a sandbox alone.
"""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import installed_packages
from tests.kernel.world import World

WHEELS = Path(__file__).with_name("wheels.txt")
# A compiled module of each, by the name of its package.
MODULES = {
    "aiohttp": "aiohttp._http_parser",
    "asyncpg": "asyncpg.protocol.protocol",
    "bcrypt": "bcrypt._bcrypt",
    "brotli": "_brotli",
    "cffi": "_cffi_backend",
    "charset-normalizer": "charset_normalizer.md",
    "contourpy": "contourpy._contourpy",
    "cryptography": "cryptography.hazmat.bindings._rust",
    "fonttools": "fontTools.varLib.iup",
    "frozenlist": "frozenlist._frozenlist",
    "greenlet": "greenlet._greenlet",
    "grpcio": "grpc._cython.cygrpc",
    "httptools": "httptools.parser.parser",
    "jiter": "jiter.jiter",
    "kiwisolver": "kiwisolver._cext",
    "lxml": "lxml.etree",
    "lz4": "lz4.frame._frame",
    "markupsafe": "markupsafe._speedups",
    "matplotlib": "matplotlib.ft2font",
    "msgpack": "msgpack._cmsgpack",
    "multidict": "multidict._multidict",
    "numpy": "numpy._core._multiarray_umath",
    "orjson": "orjson.orjson",
    "pandas": "pandas._libs.lib",
    "pillow": "PIL._imaging",
    "propcache": "propcache._helpers_c",
    "protobuf": "google._upb._message",
    "psutil": "psutil._psutil_linux",
    "psycopg2-binary": "psycopg2._psycopg",
    "pyarrow": "pyarrow.lib",
    "pydantic-core": "pydantic_core._pydantic_core",
    "pynacl": "nacl._sodium",
    "pyyaml": "yaml._yaml",
    "pyzmq": "zmq.backend.cython._zmq",
    "rapidfuzz": "rapidfuzz.fuzz_cpp",
    "regex": "regex._regex",
    "rpds-py": "rpds.rpds",
    "ruamel.yaml.clib": "_ruamel_yaml",
    "safetensors": "safetensors._safetensors_rust",
    "scikit-learn": "sklearn.tree._tree",
    "scipy": "scipy.linalg._fblas",
    "shapely": "shapely.lib",
    "simplejson": "simplejson._speedups",
    "sqlalchemy": "sqlalchemy.sql._cache_key_cy",
    "tiktoken": "tiktoken._tiktoken",
    "tokenizers": "tokenizers.tokenizers",
    "ujson": "ujson",
    "uvloop": "uvloop.loop",
    "watchfiles": "watchfiles._rust_notify",
    "websockets": "websockets.speedups",
    "wrapt": "wrapt._wrappers",
    "xxhash": "xxhash._xxhash",
    "yarl": "yarl._quoting_c",
    "zstandard": "zstandard.backend_c",
}
IMPORTS = """
import importlib, sys
sys.path.insert(0, PLACE)
answer = {}
for name in MODULES:
    print(name, file=sys.stderr, flush=True)  # the last line names a module that ends the process
    try:
        importlib.import_module(name)
    except BaseException as e:
        answer[name] = repr(e)
import numpy, pandas, scipy.linalg
a = numpy.arange(9.0).reshape(3, 3) + numpy.eye(3) * 10
answer["solved"] = bool(numpy.allclose(a @ scipy.linalg.solve(a, numpy.ones(3)), 1))
answer["summed"] = int(pandas.Series([1, 2, 3]).sum())
"""
ADDONS = ("@node-rs/crc32@1.10.8", "bufferutil@4.1.0", "utf-8-validate@6.0.6")
CALLS = """
const { crc32 } = require("@node-rs/crc32");
const { mask } = require("bufferutil");
const valid = require("utf-8-validate");
const masked = Buffer.alloc(4);
mask(Buffer.from("abcd"), Buffer.from([1, 2, 3, 4]), masked, 0, 4);
const answer = [crc32("covenant"), [...masked], valid(Buffer.from("h\\u00e9")), valid(Buffer.from([0xff]))];
const loaded = Object.keys(require.cache).filter((name) => name.endsWith(".node")).length;
process.stdin.once("data", () => console.log(JSON.stringify({ text: JSON.stringify([...answer, loaded]) })));
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def granted() -> Iterator[Path]:
    """A directory that a manifest may grant."""
    with installed_packages.directory() as made:
        yield made


def test_used_wheels_import(world: World, granted: Path) -> None:
    """All in one process of one sandbox: a crash of one ends the run."""
    assert len(MODULES) >= 50
    assert set(MODULES) <= {line.partition("==")[0] for line in WHEELS.read_text().splitlines()}
    installed_packages.install_wheels(WHEELS, granted / "wheels")
    code = f"PLACE, MODULES = {str(granted / 'wheels')!r}, {list(MODULES.values())!r}" + IMPORTS
    more = f'[permissions.filesystem]\nread = ["{granted}"]\n'
    found = world.ask(code, more=more, memory_mb=2048, cpu_ms=300_000, disk_mb=64, resources="cpu_millis = 2000")
    assert found == {"solved": True, "summed": 6}


def test_used_addons_answer(world: World, tmp_path: Path) -> None:
    """Addons whose .node file comes in the package itself, as files of an agent's package."""
    npm = ["npm", "install", "--no-bin-links", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    subprocess.run([*npm, "--prefix", str(tmp_path), *ADDONS], check=True, timeout=300, cwd=tmp_path)
    top = tmp_path / "node_modules"
    files: dict[str, str | bytes] = {
        f"node_modules/{path.relative_to(top)}": path.read_bytes() for path in top.rglob("*") if path.is_file()
    }
    package = world.package({"main.js": CALLS, **files}, runtime="node", entry="main.js", memory_mb=512)
    answer = world.run(world.sign(package))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    crc, masked, good, bad, loaded = json.loads(answer.result.text)
    assert (masked, good, bad, loaded) == ([96, 96, 96, 96], True, False, 3)
    assert crc == zlib.crc32(b"covenant")
