"""Check the configuration: every key, every refusal, and programs that only root can have installed."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pydantic
import pytest

from policy import errors
from sandbox import config
from sandbox.proxy_settings import ProxySettings
from tests.kernel.tls_servers import Certificates


def _parse(text: str) -> config.Config:
    return config.parse(text.encode(), file="config.toml", state=Path("/var/lib/covenant"))


def test_without_file_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "absent.toml")
    found = config.load(tmp_path)
    assert found.host == os.uname().nodename
    assert found.state == tmp_path
    assert (found.start_deadline_seconds, found.allow_unsigned_trusted_local) == (60, False)
    assert all(p.is_absolute() for p in (found.runsc, found.nft, found.python3, found.node))


def test_every_key_can_be_written() -> None:
    found = _parse(
        'host = "box-1.example"\nrunsc = "/opt/runsc"\nnft = "/x/nft"\npython3 = "/x/p"\nnode = "/x/n"\n'
        "uid_first = 100000\nuid_count = 10\nstart_deadline_seconds = 300\ngrace_seconds = 1\n"
        'allow_unsigned_trusted_local = true\ntrusted_local_user = "nobody"\npath_owners = [1000]\n'
        'uplink = "eth0"\nresolvers = ["9.9.9.9", "2620:fe::fe"]\nattest_seconds = 5\non_drift = "alarm"\n'
        "self_test = false\ntell_calls = false\ntell_files = true\n"
        'callers = [1000]\ncaller_requests = 2\nrequest_seconds = 3\non_supervisor_exit = "continue"\n'
        'on_newer_serial = "finish"\n'
        "kept_workspaces = 3\nkept_workspaces_mb = 64\n"
        'socket = "/run/x.sock"\nagents = ["/srv/agents"]\novercommit = 1.5\n'
        'metrics = "127.0.0.1:9100"\njournal = false\nrunsc_network = "host"\n'
        "connection_idle_seconds = 3600\nask_operators = true\n"
        "publish_ports = [18081]\n"
        '[vault]\nbackend = "openbao"\nkey = "/x/key"\naddress = "https://bao.example:8200"\ntoken = "/x/token"\n'
        'ca = "/x/ca.pem"\nmount = "kv"\nprefix = "agents"\ntimeout_seconds = 9\n'
        '[tls]\nca = ["/x/company.pem"]\n'
        '[proxy]\nurl = "http://proxy.example:3128"\nsecret = "proxy"\ndirect = ["models.example"]\nby_name = true\n'
        'resolves = ["*.corp.example"]\n'
        '[export]\notlp = "https://collector.example:4318"\nheaders = "/x/headers"\nca = "/x/collector.pem"\n'
        'ocsf = "/x/ocsf.jsonl"\nproofs = "/x/proofs.jsonl"\n'
        'agents = "https://collector.example:4318"\nagents_headers = "/x/agents"\nagents_ca = "/x/agents.pem"\n'
    )
    written = {"host", "runsc", "nft", "python3", "node", "uid_first", "uid_count", "start_deadline_seconds"}
    written |= {"grace_seconds", "allow_unsigned_trusted_local", "trusted_local_user", "path_owners"}
    written |= {"uplink", "resolvers", "attest_seconds", "on_drift", "self_test", "tell_calls", "tell_files"}
    written |= {"callers", "caller_requests", "request_seconds", "on_supervisor_exit", "on_newer_serial", "socket"}
    written |= {"kept_workspaces", "kept_workspaces_mb"}
    written |= {
        "agents",
        "overcommit",
        "metrics",
        "journal",
        "checkpoint_seconds",
        "vault",
        "runsc_network",
        "connection_idle_seconds",
    }
    written |= {"publish_ports", "host_ports", "tls", "proxy", "ask_operators", "export"}
    assert found.tls.ca == (Path("/x/company.pem"),)
    assert found.export.model_fields_set == set(type(found.export).model_fields)
    assert found.proxy.model_fields_set == set(type(found.proxy).model_fields)
    assert found.vault.model_fields_set == set(type(found.vault).model_fields)
    assert written | {"state"} == set(config.Config.model_fields)
    assert (found.host, found.runsc, found.path_owners) == ("box-1.example", Path("/opt/runsc"), (1000,))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("unknown = 1", "`unknown`"),
        ('state = "/tmp"', "`state`"),
        ('runsc = "runsc"', "`runsc`"),
        ('runsc = "/usr/../tmp/runsc"', "`runsc`"),
        ("runsc = 3", "`runsc`"),
        ('host = "two words"', "`host`"),
        ('host = ""', "`host`"),
        ('uid_first = "100000"', "`uid_first`"),
        ("uid_first = 1000", "`uid_first`"),
        ("uid_count = 0", "`uid_count`"),
        ("start_deadline_seconds = true", "`start_deadline_seconds`"),
        ("allow_unsigned_trusted_local = 1", "`allow_unsigned_trusted_local`"),
        ('trusted_local_user = "a b"', "`trusted_local_user`"),
        ('path_owners = ["root"]', "`path_owners"),
        ("callers = [0]", "`callers"),
        ("callers = [2000000]", "`callers`"),
        ('socket = "x.sock"', "`socket`"),
        ('[tls]\nca = ["x.pem"]', "`tls.ca`"),
        ('[tls]\nca = "/x.pem"', "`tls.ca`"),
        ("[tls]\ncrl = []", "`tls.crl`"),
        ('uplink = "lo"', "`uplink`"),
        ('uplink = "cv-12345678"', "`uplink`"),
        ('uplink = "eth0;drop"', "`uplink`"),
        ('uplink = "a-name-that-is-long"', "`uplink`"),
        ("host = 1\nhost = 2", "not valid TOML"),
        ("host = \xff", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(errors.ConfigError) as refusal:
        config.parse(text.encode("latin-1"), file="config.toml", state=Path("/s"))
    assert named in refusal.value.message
    assert refusal.value.where == "config.toml"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ('[export]\notpl = "http://127.0.0.1:1"', "did you mean `otlp`? known here: agents,"),
        ('[proxy]\nulr = "http://a:1"', "did you mean `url`?"),
        ('vault = "x"', "write [vault]"),
    ],
)
def test_fix_of_a_mistake_in_a_table_is_of_that_table(wrong: str, hint: str) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        config.parse(wrong.encode(), file="config.toml", state=Path("/s"))
    assert refused.value.hint.startswith(hint)


def test_authorities_are_read_in_order(tmp_path: Path) -> None:
    certificates = [Certificates(tmp_path, name).path.read_bytes() for name in ("one.example", "two.example")]
    for name, raw in zip(("one", "two"), certificates, strict=True):
        (tmp_path / name).write_bytes(raw + b"\n")
    found = config.parse(f'[tls]\nca = ["{tmp_path}/two", "{tmp_path}/one"]\n'.encode(), file="", state=tmp_path)
    assert found.tls.authorities() == certificates[1] + certificates[0]
    for damage in ("no certificate", None):
        (tmp_path / "one").unlink() if damage is None else (tmp_path / "one").write_text(damage)
        with pytest.raises(errors.ConfigError, match=rf"tls\.ca: `{tmp_path}/one`") as refused:
            found.tls.authorities()
        assert refused.value.hint == "name a file of certificates in PEM"
    # The fix.
    (tmp_path / "one").write_bytes(certificates[0])
    assert found.tls.authorities()


@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_authorities_are_a_bounded_file(tmp_path: Path, kind: str) -> None:
    """A provider's file may be another user's: a run neither waits for it nor reads it without an end."""
    path = tmp_path / "ca.pem"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
    done = multiprocessing.get_context("fork").Process(target=_refused, args=(path,))
    done.start()
    try:
        done.join(30)
        assert done.exitcode == 0
    finally:
        done.kill()
        done.join()
    path.unlink()
    Certificates(tmp_path, "one.example").path.rename(path)
    config.check_authorities("tls.ca", path, owned=False)


def _refused(path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"ca\.pem` is no plain file") as refused:
        config.check_authorities("tls.ca", path, owned=False)
    assert refused.value.hint == "name a file of certificates in PEM"


def test_state_s_file_comes_before_system_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system.toml"
    system.write_text('host = "system"\n')
    system.chmod(0o644)
    monkeypatch.setattr(config, "SYSTEM_FILE", system)
    assert config.load(tmp_path).host == "system"
    (tmp_path / "config.toml").write_text('host = "state"\n')
    (tmp_path / "config.toml").chmod(0o600)
    assert config.load(tmp_path).host == "state"


def _put(file: Path, kind: str) -> None:
    if kind == "symlink":
        file.symlink_to("/dev/null")
    elif kind == "directory":
        file.mkdir()
    else:
        os.mkfifo(file, 0o644)


@pytest.mark.parametrize("damage", ["writable", "symlink", "directory", "fifo", "large"])
def test_file_that_others_can_reach_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    file.chmod(0o644)
    config.load(tmp_path)
    if damage == "writable":
        file.chmod(0o664)
    elif damage == "large":
        file.write_text("#" * (config.MAX_BYTES + 1))
    else:
        file.unlink()
        _put(file, damage)
    with pytest.raises(errors.ConfigError):
        config.load(tmp_path)


def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """The file's owner can write to it, because they can change its mode."""
    file = tmp_path / "config.toml"
    file.write_text('host = "found"\n')
    file.chmod(0o644)
    os.chown(file, 12345, 0)
    with pytest.raises(errors.ConfigError, match="can be written by others"):
        config.load(tmp_path)
    # The control: owned by root, with a group that may not write.
    os.chown(file, 0, 12345)
    assert config.load(tmp_path).host == "found"


def test_program_of_root_is_trusted_through_its_links() -> None:
    assert config.trusted_binary(Path("/bin/sh")).name in ("dash", "bash", "sh")


@pytest.mark.parametrize("damage", ["missing", "not executable", "writable", "writable directory", "directory"])
def test_program_in_other_hands_is_refused(tmp_path: Path, damage: str) -> None:
    tool = tmp_path / "tool"
    if damage == "directory":
        tool.mkdir()
    elif damage != "missing":
        tool.write_bytes(b"\x7fELF")
        tool.chmod({"not executable": 0o644, "writable": 0o777}.get(damage, 0o755))
    if damage == "writable directory":
        tmp_path.chmod(0o777)
    with pytest.raises(errors.HostError):
        config.trusted_binary(tool)


def test_program_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tool"
    tool.write_bytes(b"\x7fELF")
    tool.chmod(0o755)
    real = os.lstat

    def foreign(path: str | Path) -> os.stat_result:
        info = real(path)
        return os.stat_result((*info[:4], 4242, *info[5:10])) if Path(path) == tool else info

    monkeypatch.setattr(os, "lstat", foreign)
    with pytest.raises(errors.HostError, match="belongs to uid 4242"):
        config.check_owner(tool)


def test_link_on_way_in_other_hands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """first -> theirs/second -> /bin/sh: root owns both ends, but the owner of the middle link chooses the target."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "second").symlink_to("/bin/sh")
    (tmp_path / "first").symlink_to("theirs/second")
    config.trusted_binary(tmp_path / "first")
    (tmp_path / "theirs").chmod(0o777)
    with pytest.raises(errors.HostError, match="can be written by others"):
        config.trusted_binary(tmp_path / "first")


def test_links_in_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(errors.HostError, match="too many symlinks"):
        config.trusted_binary(tmp_path / "a")


def test_missing_authority_is_refused(tmp_path: Path) -> None:
    there = Certificates(tmp_path, "one.example").path
    assert config.TlsSettings(ca=(there,)).bundles() == (str(config.SYSTEM_CA), str(there))
    with pytest.raises(errors.ConfigError, match="cannot be looked at"):
        config.TlsSettings(ca=(tmp_path / "absent.pem",)).bundles()
    there.chmod(0o666)
    with pytest.raises(errors.ConfigError, match="others"):
        config.TlsSettings(ca=(there,)).bundles()


@pytest.mark.parametrize(
    "url", ["ftp://proxy.example:3128", "http://proxy.example", "http://u:p@proxy:1", "http://a:0", "http://a:1/b"]
)
def test_odd_proxy_is_refused(url: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="http://HOST:PORT"):
        ProxySettings(url=url)
    for scheme in ("http", "https"):
        good = ProxySettings(url=f"{scheme}://proxy.example:3128")
        assert (good.place, good.tls) == (("proxy.example", 3128), scheme == "https")


@pytest.mark.parametrize("name", ["Corp.example", "*corp.example", "10.0.0.1", "a b", ""])
def test_odd_name_of_the_proxy_is_refused(name: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"proxy\.resolves.*must be names"):
        _parse(f'[proxy]\nresolves = ["{name}"]\n')
    assert ProxySettings(resolves=("git.corp.example", "*.corp.example", "*")).resolves


@pytest.mark.parametrize("pattern", ["git.corp.example", "*.corp.example", "*"])
def test_name_goes_direct_or_by_the_proxy(pattern: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"`git\.corp\.example` is in `direct`"):
        _parse(f'[proxy]\ndirect = ["git.corp.example"]\nresolves = ["{pattern}"]\n')
    assert ProxySettings(direct=("git.example",), resolves=("*.corp.example",)).direct


@pytest.mark.parametrize(
    "otlp", ["http://collector.example:4318", "https://u:p@collector.example", "ftp://127.0.0.1", "https://a/b c", "x"]
)
def test_odd_collector_is_refused(otlp: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"export\.otlp"):
        _parse(f'[export]\notlp = "{otlp}"\n')
    for fine in ("http://127.0.0.1:4318", "http://[::1]:4318/otlp", "https://collector.example"):
        assert _parse(f'[export]\notlp = "{fine}"\n').export.otlp == fine


@pytest.mark.parametrize(
    ("text", "message", "near"),
    [
        ('[vualt]\nkey = "/k"\n', "`vualt` is no key of the configuration", "did you mean `vault`? known here: "),
        ('[vault]\nkye = "/k"\n', "`vault.kye` is no key of the configuration", "did you mean `key`? known here: "),
        ("nonsense_word = 1\n", "`nonsense_word` is no key of the configuration", "known here: agents, "),
    ],
)
def test_unknown_key_names_nearest_one(text: str, message: str, near: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        _parse(text)
    assert (caught.value.message, caught.value.where) == (message, "config.toml")
    assert caught.value.hint.startswith(near)


def test_file_of_state_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, own = tmp_path / "system.toml", tmp_path / "config.toml"
    monkeypatch.setattr(config, "SYSTEM_FILE", system)
    assert config.file_of(tmp_path) == own
    system.write_text("")
    assert config.file_of(tmp_path) == system
    own.write_text("")
    assert config.file_of(tmp_path) == own


def test_every_fault_of_file_is_named() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        _parse('hst = 1\nuplink = "lo"\nstart_deadline_seconds = "x"\n[vault]\nkye = "x"\n')
    found = errors.each(caught.value)
    assert found[0] is caught.value
    said = " ".join(one.message for one in found)
    assert len(found) == 4
    assert all(name in said for name in ("`hst`", "`uplink`", "`start_deadline_seconds`", "`vault.kye`"))
    listed = caught.value.to_json()["errors"]
    assert [one["message"] for one in listed] == [one.message for one in found]
    # One fault alone has no list.
    with pytest.raises(errors.ConfigError) as caught:
        _parse("hst = 1\n")
    assert "errors" not in caught.value.to_json()


def test_hint_names_file_by_its_path() -> None:
    one = errors.HostError("no", hint="write a = 1 in config.toml, not in /x/config.toml or my-config.toml")
    other = errors.HostError("no", hint="look at config.toml")
    errors.place_file(errors.together([one, other]), "/etc/covenant/config.toml")
    assert one.hint == "write a = 1 in /etc/covenant/config.toml, not in /x/config.toml or my-config.toml"
    assert other.hint == "look at /etc/covenant/config.toml"
    # Another process may read another file.
    told = errors.restored({"code": "host_unfit", "message": "no", "hint": "look at config.toml"})
    assert errors.place_file(told, "/etc/covenant/config.toml").hint == "look at config.toml"
