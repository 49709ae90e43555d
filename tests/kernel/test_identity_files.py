"""Programs that ask who they are get an answer, and a granted file takes the place of ours."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.world import World


def test_python_knows_who_it_is(world: World) -> None:
    code = (
        "import getpass, grp, os, pwd\n"
        "me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())\n"
        "answer = [me.pw_uid == os.getuid(), me.pw_name, me.pw_dir, group.gr_name, getpass.getuser()]"
    )
    assert world.ask(code) == [True, "agent", "/tmp", "agent", "agent"]
    assert world.ask("import pwd\ntry: pwd.getpwuid(77)\nexcept KeyError: answer = 'control: unknown'").startswith(
        "control"
    )


def test_node_knows_who_it_is(world: World) -> None:
    main = (
        "process.stdin.once('data', () => { const me = require('os').userInfo(); "
        "console.log(JSON.stringify({text: [me.username, me.homedir, me.uid === process.getuid()].join()})) });"
    )
    answer = world.run(world.sign(world.package({"main.js": main}, runtime="node", entry="main.js", memory_mb=512)))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert answer.result.text == "agent,/tmp,true"


def test_granted_passwd_takes_place_of_ours(world: World) -> None:
    more = '[permissions.filesystem]\nread = ["/etc/passwd"]\n'
    assert world.ask("answer = open('/etc/passwd').read()", more=more) == Path("/etc/passwd").read_text()
