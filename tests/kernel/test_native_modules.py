"""Native modules of a package and of a granted path load, and start nothing: gVisor refuses execve of them.

The host's mount of a path for reading has no noexec, so that gVisor can map a library from it (ADR 0067).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from policy.prove.live import Standing
from sandbox.kernel import procfs
from tests.kernel.live_runs import live
from tests.kernel.test_command_line import call, document
from tests.kernel.world import World

# Packages with compiled modules that this project or its tests have installed.
WHEELS = (
    *("aiohttp._http_parser", "ast_serialize", "charset_normalizer", "coverage.tracer", "frozenlist", "grimp"),
    *("cryptography.hazmat.bindings._rust", "google._upb._message", "jsonschema_rs", "librt", "markupsafe", "msgspec"),
    *("multidict", "mypy.nodes", "numpy", "onnxruntime", "propcache", "psutil", "pydantic_core", "re2", "regress"),
    *("rpds", "solders", "watchfiles", "yaml", "yarl", "_cffi_backend"),
)
ADD = "int add(int a, int b) { return a + b; }"
# A module as an extension of Python has it, without the headers of Python. PyModuleDef has 13 words.
EXTENSION = """
extern void *PyModule_Create2(void *, int);
extern int PyModule_AddIntConstant(void *, const char *, long);
static void *definition[13] = {(void *)1, 0, 0, 0, 0, (void *)"native", 0, (void *)-1};
void *PyInit_native(void) {
    void *module = PyModule_Create2(definition, 1013);
    if (module) PyModule_AddIntConstant(module, "answer", 42);
    return module;
}
"""
# The same as a node addon: a module that says it is one, and answers 42 (Node-API).
ADDON = """
typedef void *value;
extern int napi_create_int32(void *, int, value *);
value napi_register_module_v1(void *env, value exports) { value v; napi_create_int32(env, 42, &v); return v; }
"""


@pytest.fixture
def granted() -> Iterator[Path]:
    """A directory of root in which only root can write: what a grant asks for."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def built(folder: Path, name: str, source: str, *options: str) -> Path:
    """Compile a shared library into ``folder``."""
    target = folder / name
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), *options],
        input=source.encode(),
        check=True,
        timeout=120,
    )
    return target


def test_library_of_package_loads(world: World, tmp_path: Path) -> None:
    files = {
        "libadd.so": built(tmp_path, "libadd.so", ADD).read_bytes(),
        f"native{sysconfig.get_config_var('EXT_SUFFIX')}": built(tmp_path, "native.so", EXTENSION).read_bytes(),
    }
    code = "import ctypes, native\nanswer = [ctypes.CDLL('/workspace/libadd.so').add(2, 3), native.answer]"
    assert world.ask(code, files=files) == [5, 42]


def test_addon_of_node_loads(world: World, tmp_path: Path) -> None:
    main = "process.stdin.once('data', () => console.log(JSON.stringify({text: String(require('./native.node'))})));"
    files: dict[str, str | bytes] = {"main.js": main, "native.node": built(tmp_path, "native.node", ADDON).read_bytes()}
    answer = world.run(world.sign(world.package(files, runtime="node", entry="main.js", memory_mb=512)))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "42"


def test_library_of_granted_path_loads_and_is_not_started(world: World, granted: Path) -> None:
    """The control of execve is a granted program in the same run."""
    built(granted, "libadd.so", ADD)
    shutil.copy("/usr/bin/true", granted / "true")
    code = f"""
import ctypes, errno
def start(path):
    pid = os.fork()
    if not pid:
        try:
            os.execv(path, [path])
        except OSError as e:
            os._exit(e.errno)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
added = ctypes.CDLL({str(granted / "libadd.so")!r}).add(2, 3)
answer = [added, start("/usr/bin/true"), start({str(granted / "true")!r})]
"""
    more = f'[permissions.filesystem]\nread = ["{granted}"]\n[permissions.executables]\nallow = ["/usr/bin/true"]\n'
    assert world.ask(code, more=more) == [5, 0, 13]  # EACCES


def test_run_with_native_modules_is_attested(world: World, granted: Path) -> None:
    more = f'[permissions.filesystem]\nread = ["{granted}"]\n'
    with live(world, more=more) as one:
        flags = {mount.place: set(mount.options) for mount in procfs.mounts(one.family().gofer.name.pid)}
        assert flags["/workspace"] == flags[str(granted)] == {"ro", "nosuid", "nodev"}
        found = one.report()
        assert {layer.name: layer.standing for layer in found.layers}["mounts"] is Standing.EQUAL
        assert found.holds


LOADS = """
import ctypes
def loads(name):
    try:
        return bool(ctypes.CDLL(name))
    except OSError as e:
        return str(e)
"""


def test_soname_that_package_needs_comes_with_it(world: World, tmp_path: Path) -> None:
    source = built(tmp_path, "libuser.so", ADD, "-Wl,--no-as-needed", "-l:libseccomp.so.2")
    code = LOADS + "answer = [ctypes.CDLL('/workspace/libuser.so').add(2, 3), loads('libseccomp.so.2')]"
    assert world.ask(code, files={"libuser.so": source.read_bytes()}) == [5, True]
    # Control: without a file that needs it, it is not there.
    assert "cannot open shared object file" in world.ask(LOADS + "answer = loads('libseccomp.so.2')")


def test_libraries_that_wheels_expect_are_there(world: World) -> None:
    """The names of manylinux2014 (PEP 599) that belong to the C and C++ libraries."""
    names = ["libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libgcc_s.so.1"]
    assert world.ask(LOADS + f"answer = [loads(name) for name in {names}]") == [True] * len(names)


def test_compiled_wheels_import(world: World, granted: Path) -> None:
    """Every compiled package that this project has installed, from a granted directory, in one run."""
    site = Path(numpy.__file__).parents[1]
    subprocess.run(["cp", "-al", str(site), str(granted / "site")], check=True, timeout=120)
    code = f"""
import importlib, sys
sys.path.insert(0, {str(granted / "site")!r})
answer = {{}}
for name in {WHEELS}:
    try:
        importlib.import_module(name)
    except BaseException as e:
        answer[name] = repr(e)
import numpy
answer["sum"] = float(numpy.ones((100, 100)).sum())
"""
    more = f'[permissions.filesystem]\nread = ["{granted}"]\n'
    found = world.ask(code, more=more, memory_mb=1024, cpu_ms=120_000, disk_mb=64)
    assert found == {"sum": 10_000.0}


def test_check_names_module_that_cannot_load(world: World, tmp_path: Path) -> None:
    built(tmp_path, "libnowhere.so.7", ADD, "-Wl,-soname,libnowhere.so.7")
    user = built(tmp_path, "user.so", ADD, "-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libnowhere.so.7")
    package = world.package({"main.py": "", "lib/user.so": user.read_bytes()})
    notes = document(call(world.home, "manifest", "check", package, "--json"))["notes"]
    needs = "it needs library `libnowhere.so.7`, which neither the package nor this host has"
    assert f"`lib/user.so` cannot be loaded: {needs}" in notes
    # The fix: the library comes with the package.
    (package / "lib/libnowhere.so.7").write_bytes((tmp_path / "libnowhere.so.7").read_bytes())
    assert document(call(world.home, "manifest", "check", package, "--json"))["notes"] == []
