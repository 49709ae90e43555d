"""Read back the root, the workspace and the process of an agent: one form of each, and its neighbours are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.decompile import config
from policy.decompile import read as reading
from policy.host import Closure, ClosureFile, GrantedPath
from tests import proof_kit
from tests.proof_kit import Case, Documents
from tests.unit.policy.compile import sample

HEX = "0123456789abcdef" * 4
WORKSPACE = (
    '[workspace]\nmode = "overlay"\npath = "/work/x"\nfrom = ["/srv/b", "/srv/a"]\nmax_mb = 24\nmask = ["*.secret"]\n'
    'protect = ["deploy/**"]\napply = "never"\n'
)
COMMAND = (
    f'[permissions.executables]\nallow = ["layer:tools"]\n[process]\nargs = ["-c", "echo {{intent}}"]\ncwd = "/srv"\n'
    f'env = {{ TZ = "UTC" }}\ncontract = "text"\n[root]\nbase = "debian@sha256:{HEX}"\n'
    f'layers = ["tools@sha256:{HEX}"]\n'
)
LINK = "/usr/lib/ssl/certs"
SHELL = Closure("command", "/usr/bin/sh", (ClosureFile("/usr/bin/sh", "file", 0o755, 1, "e" * 64),), layered=True)
LINKED = GrantedPath(LINK, "dir", real="/etc/ssl/certs", links=((LINK, "../../../etc/ssl/certs"),))


@functools.cache
def compiled(name: str) -> Case:
    match name:
        case "workspace":
            return proof_kit.case(sample.manifest(more=WORKSPACE, resources="disk_mb = 64"))
        case "workspace programs":
            more = f'{WORKSPACE}exec = true\n[permissions.executables]\nallow = ["workspace"]\n'
            return proof_kit.case(sample.manifest(more=more, resources="disk_mb = 64"))
        case "command":
            manifest = sample.manifest(more=COMMAND, runtime='command"\n# "')
            return proof_kit.case(manifest, sample.host(runtimes={"command": SHELL}))
        case "links":
            text = f'[permissions.filesystem]\nread = ["{LINK}"]\n'
            return proof_kit.case(sample.manifest(more=text), proof_kit.host(granted={LINK: LINKED}))
    return proof_kit.CASES[name]()


def read(name: str, edit: Callable[[Documents], None] = lambda d: None) -> reading.Decompiled:
    return reading.read(compiled(name).falsified(edit).files)


def test_root_is_read_back() -> None:
    found = read("workspace").seen.workspace
    assert found is not None
    assert (found.place, found.max_mb, found.below, found.programs) == ("/work/x", 24, ("/srv/a", "/srv/b"), False)
    assert "*.secret" in found.mask
    assert "deploy/**" in found.protect
    assert (found.apply, read("links").seen.links) == ("never", {LINK: "../../../etc/ssl/certs"})
    assert read("workspace").grants.executables.trees == frozenset()
    assert read("workspace programs").grants.executables.trees == frozenset({"workspace"})
    image = read("command").seen.image
    assert [name for name, _ in image.layers] == ["debian", "tools"]
    assert image.trees == ("layer:tools",)


def terms(**changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["workspace"].update(changes)


def image(**changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["root"]["image"].update(changes)


def layer(index: int, **changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["root"]["image"]["layers"][index].update(changes)


def process(**changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["config.json"]["process"].update(changes)


def supervised(**changes: Any) -> Callable[[Documents], None]:
    return lambda d: d["supervision.json"]["process"].update(changes)


def env(*words: str, without: str = "") -> Callable[[Documents], None]:
    def edit(d: Documents) -> None:
        listed = [one for one in d["config.json"]["process"]["env"] if not without or not one.startswith(without)]
        d["config.json"]["process"]["env"] = sorted([*listed, *words], key=lambda one: one.partition("=")[0])

    return edit


def args(*words: str) -> Callable[[Documents], None]:
    return process(args=list(words))


def started(interpreter: str) -> Callable[[Documents], None]:
    """Start another interpreter, in both files that name it."""

    def edit(d: Documents) -> None:
        words = d["config.json"]["process"]["args"]
        closure = d["mounts.json"]["root"]["closures"][0]
        words[words.index(closure["entry"])] = closure["entry"] = interpreter

    return edit


def program(entry: str) -> Callable[[Documents], None]:
    return lambda d: d["mounts.json"]["root"]["closures"][1].update(entry=entry)


def output(rule: str) -> Callable[[Documents], None]:
    return lambda d: d.nft('\t\toifname "uplink0" meta skuid 64998 jump gate\n', f"\t\t{rule}\n")


def to_gateway(rule: str) -> Callable[[Documents], None]:
    line = '\t\tiifname "agent0" udp dport { 53 } accept\n'
    return lambda d: d.nft(line, f'{line}\t\tiifname "agent0" {rule}\n')


def without_accept(d: Documents) -> None:
    d.nft('\t\tiifname "agent0" goto refuse\n\t}\n\tchain output', "\t\taccept\n\t}\n\tchain output")


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("workspace", terms(max_mb=0), "bounds nothing"),
        ("workspace", terms(max_mb=-1), "bounds nothing"),
        ("workspace", terms(apply="always"), "always"),
        ("workspace", terms(below=[]), "below is empty"),
        ("workspace", terms(below=["/srv/b", "/srv/a"]), "below is empty, not sorted"),
        ("workspace", terms(below=["/srv/a", "/srv/a"]), "below is empty, not sorted"),
        ("workspace", terms(below=["srv"]), "not absolute"),
        ("workspace", terms(mask=[]), "mask is empty"),
        ("workspace", terms(protect=["b", "a"]), "protect is empty, not sorted"),
        ("workspace", terms(more=1), "more"),
        ("workspace", lambda d: d["mounts.json"].pop("workspace"), "1 mounts of a workspace, and 0"),
        ("least", lambda d: d["mounts.json"].update(workspace={}), "0 mounts of a workspace, and 1"),
        ("command", image(layers=[], executable=[]), "nothing in the image"),
        ("command", image(executable=["layer:other"]), "no tree of the root"),
        ("command", image(executable=["other"]), "no tree of the root"),
        ("command", image(executable=["layer:tools", "layer:tools"]), "not sorted, or repeats"),
        ("command", image(executable=["root", "layer:tools"]), "not sorted, or repeats"),
        ("command", image(programs=["/b", "/a"]), "not sorted, or repeats"),
        ("command", image(programs=["a"]), "not absolute"),
        ("command", layer(0, name="tools"), "a layer stands twice"),
        ("command", layer(0, name="Tools"), "no name of a layer"),
        ("command", layer(0, name="a" * 65), "no name of a layer"),
        ("command", layer(0, name=""), "no name of a layer"),
        ("command", layer(0, digest="0"), "no SHA-256"),
        ("command", process(cwd="srv"), "not absolute and normalised"),
        ("command", process(cwd="/srv/"), "not absolute and normalised"),
        ("command", process(cwd="/srv/../x"), "not absolute and normalised"),
        ("command", process(cwd="/s\0"), "not absolute and normalised"),
        ("command", env("A"), "malformed, repeated or unsorted"),
        ("command", env("1A=x"), "malformed, repeated or unsorted"),
        ("command", env("A-B=x"), "malformed, repeated or unsorted"),
        ("command", env("=x"), "malformed, repeated or unsorted"),
        ("command", env("A" * 129 + "=x"), "malformed, repeated or unsorted"),
        ("command", env("TZ=x"), "malformed, repeated or unsorted"),
        ("command", env("A=x\0"), "a variable holds a NUL"),
        ("command", env("LD_PRELOAD=/a"), "`LD_PRELOAD` would load code"),
        ("command", env("LD_AUDIT=/a"), "`LD_AUDIT` would load code"),
        ("command", env(without="HOME"), "`HOME` is missing"),
        ("command", env(without="LANG"), "`LANG` is missing"),
        ("command", env(without="PATH"), "`PATH` is missing"),
        ("command", env(without="COVENANT_RUN_ID"), "`COVENANT_RUN_ID` is missing"),
        ("command", supervised(contract="line"), "line"),
        ("command", supervised(contract="shout"), "shout"),
        ("command", supervised(intent="shout"), "shout"),
        ("least", args(), ""),
        ("least", args("/usr/bin/python3.11"), ""),
        ("least", args("/usr/bin/python3.11", "-c", "x"), ""),
        ("least", args("/usr/bin/python3.11", "/main.py"), ""),
        ("least", args("/usr/bin/other", "main.py"), ""),
        ("program", args("/bin/x"), "not the program of the package"),
        ("writes", lambda d: d["mounts.json"].update(rooms={"/srv/data": 0}), "does not bound"),
        ("writes", lambda d: d["mounts.json"].update(rooms={"/srv/data": True}), "does not bound"),
        ("writes", lambda d: d["mounts.json"].update(rooms={}), "does not bound"),
        ("much", started("/opt/a/python3.11"), "lies in the mount at `/opt/a`"),
        ("much", program("/opt/a/grep"), "lies in the mount at `/opt/a`"),
        ("much", program("/usr/bin/../grep"), "not absolute"),
        ("network", output('oifname "uplink0" meta skuid 0 accept'), "hook output lets"),
        ("network", output("accept"), "hook output lets"),
        ("network", without_accept, "hook input lets"),
        ("network", to_gateway("udp dport { 54 } accept"), "more of the gateway than its gates by udp"),
        ("network", to_gateway("tcp dport { 54 } accept"), "more of the gateway than its gates by tcp"),
        ("network", to_gateway("ip daddr @x4 udp dport { 53 } accept"), "hook input asks for destinations"),
        ("links", lambda d: d["mounts.json"]["root"].update(links=[]), "there is none"),
        ("links", lambda d: d["mounts.json"]["root"].update(more=[]), "more"),
        ("network", lambda d: d["network.json"].update(net_bps=0), "net_bps"),
        ("network", lambda d: d["network.json"].update(net_bps=-1), "net_bps"),
        ("network", lambda d: d["network.json"].update(net_bps=True), "net_bps"),
        ("network", lambda d: d["network.json"].update(version=0), "version"),
        ("network", lambda d: d["network.json"].update(mode="other"), "mode"),
        ("network", lambda d: d["network.json"].update(mode="off"), ""),
        ("network", lambda d: d["mounts.json"].update(version=2), "version"),
        ("network", lambda d: d["mounts.json"]["root"].update(readonly=False), "readonly"),
    ],
)
def test_neighbouring_document_is_refused(name: str, edit: Callable[[Documents], None], says: str) -> None:
    with pytest.raises(errors.ArtefactError) as caught:
        read(name, edit)
    assert says in f"{caught.value.where} {caught.value}"


@pytest.mark.parametrize("words", [("A=x",), ("A=",), ("_a1=x=y",), ("A" * 128 + "=x",), ("X=1", "Y=2")])
def test_variable_of_a_process_is_read(words: tuple[str, ...]) -> None:
    assert read("command", env(*words)).seen == read("command").seen


def test_layer_name_of_1_to_64_characters_is_read() -> None:
    for name in ("a", "9", "a" * 64, "a.b_c-d"):
        found = read("command", layer(0, name=name)).seen.image
        assert found.layers[0][0] == name


def grants(host: str) -> Callable[[Documents], None]:
    return lambda d: d["network.json"]["grants"][0].update(host=host)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.9-10.0.0.1", "10.0.0.1-::1", "::1-10.0.0.1", "10.0.0.0/24-10.1.0.0/24", "10.0.0.1-10.1.0.0/24", "x-y"],
)
def test_range_of_another_form_is_refused(host: str) -> None:
    with pytest.raises(errors.ArtefactError, match="is no address"):
        read("network", grants(host))


def test_read_documents_do_not_change() -> None:
    found = read("workspace")
    for value in (found, found.seen, found.seen.workspace, found.process, found.reached, found.runsc):
        assert value is not None
        name = next(iter(type(value).__struct_fields__))
        with pytest.raises(AttributeError):
            setattr(value, name, None)


def test_first_process_of_programs_has_its_calls() -> None:
    """An init starts the agent exactly where its filter has the calls of the init."""
    case = compiled("much")
    assert reading.read(case.artefacts.files).init
    assert reading.read(case.artefacts.files).calls.allowed.keys() >= config.INIT_CALLS
    assert not read("least").init


@pytest.mark.parametrize("contract", ["line", "text", "stdio", "terminal"])
def test_contract_is_read_back(contract: str) -> None:
    case = proof_kit.case(sample.manifest(more=f'[process]\ncontract = "{contract}"\n'))
    assert reading.read(case.artefacts.files).process.contract == contract


def mapped(key: str, field: str) -> Callable[[Documents], None]:
    return lambda d: d["config.json"]["linux"][key][0].update({field: 1})


@pytest.mark.parametrize("key", ["uidMappings", "gidMappings"])
def test_stack_of_the_host_has_every_id(key: str) -> None:
    assert read("host stack").reached.mode == "full"
    for field in ("containerID", "hostID", "size"):
        with pytest.raises(errors.ArtefactError):
            read("host stack", mapped(key, field))


def test_init_is_for_its_architecture_alone() -> None:
    """Elsewhere a filter has the calls of an init, and the agent is started without one."""
    for arch, init in (("x86_64", True), ("aarch64", False)):
        case = proof_kit.case(sample.manifest(more=proof_kit.PROGRAMS), proof_kit.host(arch=arch))
        assert reading.read(case.artefacts.files).init == init
