"""Hostile probes of a workspace: each is a few lines of Python, done in a small tree of its own.

The first part makes the table. The second, ``MAIN``, runs in the sandbox: it does each probe in the workspace, and as
its control in a copy below /tmp, and says whether the tree there is another one afterwards.
"""

from __future__ import annotations

from typing import Final

# The files of each probe's tree, with their content.
TREE: Final = {
    "src/a.txt": "one\n",
    "src/run.sh": "#!/bin/sh\n",
    "README": "read\n",
    ".env": "TOKEN=secret\n",
    "AGENTS.md": "rules\n",
    ".git/HEAD": "ref: refs/heads/main\n",
    ".git/config": "[core]\n",
    ".git/hooks/pre-commit": "#!/bin/sh\n",
    ".git/refs/heads/main": "0\n",
    ".git/objects/aa/bb": "object\n",
    ".github/workflows/ci.yml": "on: push\n",
    ".vscode/tasks.json": "{}\n",
    ".claude/settings.json": "{}\n",
}
# Paths that no apply may change.
KEPT: Final = (
    *(".env", "AGENTS.md", ".git/config", ".git/hooks/pre-commit", ".github/workflows/ci.yml"),
    *(".vscode/tasks.json", ".claude/settings.json"),
)
_FILES: Final = ("src/a.txt", "README", *KEPT)
_DIRECTORIES: Final = ("src", ".git", ".git/hooks", ".github", ".github/workflows", ".claude")
_OF_FILE: Final = {
    "write": "open(t, 'w').write('evil')",
    "append": "open(t, 'a').write('evil')",
    "truncate": "os.truncate(t, 0) if os.path.getsize(t) else os.truncate(t, 1)",
    "unlink": "os.unlink(t)",
    "rename away": "os.rename(t, t + '.moved')",
    "replace by link outside": "os.unlink(t); os.symlink('../../outside/victim', t)",
    "replace by absolute link": "os.unlink(t); os.symlink(OUTSIDE + '/victim', t)",
    "replace by directory": "os.unlink(t); os.mkdir(t); open(t + '/x', 'w').write('evil')",
    "replace by pipe": "os.unlink(t); os.mkfifo(t)",
    "replace by hard link": "open('own', 'w').write('evil'); os.unlink(t); os.link('own', t)",
    "hard link and write": "os.link(t, 'second'); open('second', 'w').write('evil')",
    "rename over": "open('own', 'w').write('evil'); os.rename('own', t)",
    "mode": "os.chmod(t, 0o777)",
}
_OF_DIRECTORY: Final = {
    "remove": "shutil.rmtree(t)",
    "empty and fill": "shutil.rmtree(t); os.mkdir(t); open(t + '/planted', 'w').write('evil')",
    "replace by link outside": "shutil.rmtree(t); os.symlink('../../outside', t)",
    "replace by file": "shutil.rmtree(t); open(t, 'w').write('gitdir: ../../outside')",
    "copy and remove": "shutil.copytree(t, t + '.moved'); shutil.rmtree(t)",
    "plant": "open(t + '/planted', 'w').write('evil')",
    "plant link": "os.symlink('/etc/passwd', t + '/planted')",
    "mode": "os.chmod(t, 0o777)",
}
_THROUGH: Final = {
    "relative": "os.symlink('../../outside', 'l')",
    "absolute": "os.symlink(OUTSIDE, 'l')",
    "chain": "os.symlink('k', 'l'); os.symlink('../../outside', 'k')",
    "swapped directory": "os.rename('src', 'was') if CONTROL else shutil.copytree('src', 'was'); "
    "shutil.rmtree('src', ignore_errors=True); os.symlink('../../outside', 'src'); os.symlink('src', 'l')",
}
_INTO: Final = {
    "write": "open('l/victim', 'w').write('evil')",
    "create": "open('l/created', 'w').write('evil')",
    "unlink": "os.unlink('l/victim')",
    "rename into": "os.rename('README', 'l/created')",
    "mkdir": "os.mkdir('l/made')",
}
_NAMES: Final = {
    "case twin of a file": "readme",
    "case twin of git": ".GIT",
    "case twin of rules": "agents.md",
    "composed twin": "r\u00e9sum\u00e9",
    "control": "a\x1b[2Jb",
    "newline": "a\nb",
    "bidi": "a\u202etxt",
    "whiteout of aufs": ".wh.README",
    "opaque of aufs": ".wh..wh..opq",
    "staged by an apply": ".covenant-00000000-0",
    "not UTF-8": "a\udcffb",
    "spaces": " README",
    "long": "x" * 250,
}
_OTHERS: Final = {
    "whiteout by hand": "os.mknod('README2', 0o20000 | 0o600, os.makedev(0, 0))",
    "device": "os.mknod('null', 0o20000 | 0o666, os.makedev(1, 3))",
    "disk": "os.mknod('disk', 0o60000 | 0o600, os.makedev(7, 0))",
    "pipe": "os.mkfifo('pipe')",
    "socket": "import socket; socket.socket(socket.AF_UNIX).bind('s')",
    "setuid": "open('root', 'w').write('x'); os.chmod('root', 0o4755)",
    "setgid directory": "os.mkdir('sg'); os.chmod('sg', 0o2777)",
    "sticky": "os.mkdir('st'); os.chmod('st', 0o1777)",
    "opaque attribute": "os.setxattr('src', 'trusted.overlay.opaque', b'y')",
    "redirect attribute": "os.setxattr('src', 'trusted.overlay.redirect', b'/.git')",
    "metacopy attribute": "os.setxattr('README', 'trusted.overlay.metacopy', b'')",
    "user attribute": "os.setxattr('README', 'user.overlay.whiteout', b'y')",
    "capability attribute": "os.setxattr('README', 'security.capability', b'\\x01' * 20)",
    "owner": "os.chown('README', 0, 0)",
    "bare repository": "[os.makedirs(f'bare/{d}') for d in ('objects', 'refs')]; "
    "open('bare/HEAD', 'w').write('ref: x'); open('bare/config', 'w').write('[core] fsmonitor = touch /tmp/owned')",
    "nested repository": "os.makedirs('sub/.git/hooks'); "
    "open('sub/.git/config', 'w').write('[core] hooksPath = /tmp'); "
    "open('sub/.git/hooks/post-checkout', 'w').write('evil')",
    "git file": "os.mkdir('sub'); open('sub/.git', 'w').write('gitdir: /tmp/evil')",
    "attributes of git": "os.makedirs('.git/info'); open('.git/info/attributes', 'w').write('* filter=evil')",
    "alternates of git": "os.makedirs('.git/objects/info'); open('.git/objects/info/alternates', 'w').write('/etc')",
    "modules of git": "os.makedirs('.git/modules/m/hooks'); open('.git/modules/m/config', 'w').write('[core]')",
    "fsmonitor of git": "open('.git/config', 'a').write('[core] fsmonitor = touch /tmp/owned')",
    "hooksPath of git": "os.mkdir('h'); open('h/pre-commit', 'w').write('evil'); "
    "open('.git/config', 'a').write('[core] hooksPath = h')",
    "filter of git": "open('.gitattributes', 'w').write('* filter=evil'); "
    "open('.git/config', 'a').write('[filter \"evil\"] smudge = touch /tmp/owned')",
    "include of git": "open('own', 'w').write('[core] pager = evil'); "
    "open('.git/config', 'a').write('[include] path = ../own')",
    "settings of a checkout": "open('.git/config.worktree', 'w').write('[core] fsmonitor = touch /tmp/owned')",
    "command of a submodule": "open('.gitmodules', 'w').write('[submodule \"x\"] update = !touch /tmp/owned')",
    "lock of the index": "open('.git/index.lock', 'w').write('')",
    "lock of a reference": "open('.git/refs/heads/main.lock', 'w').write('0' * 40 + chr(10))",
    "lock of references": "os.makedirs('.git/refs/heads/x.lock'); "
    "open('.git/refs/heads/x.lock/y', 'w').write('0' * 40 + chr(10))",
    "direnv": "open('.envrc', 'w').write('touch /tmp/owned')",
    "servers": "open('.mcp.json', 'w').write('{}')",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'src', b'tmpfs', 0, 0) == 0",
    "leave by ..": "open('../../outside/victim', 'w').write('evil')",
    "leave by absolute path": "open(OUTSIDE + '/victim', 'w').write('evil')",
    "leave by proc": "open(f'/proc/self/cwd/../../outside/victim', 'w').write('evil')",
    "leave by root of proc": "open('/proc/1/root' + OUTSIDE + '/victim', 'w').write('evil')",
    "fill": "open('big', 'wb').write(b'x' * (1 << 20))",
    "swap while read": "[(os.rename('README', 'b'), os.rename('b', 'README')) for _ in range(50)]; open('README', 'a')"
    ".write('x')",
}


def probes() -> dict[str, str]:
    """Return the lines of each probe by its name."""
    found = {f"{path}: {name}": f"t = {path!r}; {code}" for path in _FILES for name, code in _OF_FILE.items()}
    found |= {
        f"{path}/: {name}": f"t = {path!r}; {code}" for path in _DIRECTORIES for name, code in _OF_DIRECTORY.items()
    }
    found |= {
        f"link {how}: {name}": f"{link}; {code}" for how, link in _THROUGH.items() for name, code in _INTO.items()
    }
    found |= {f"name: {name}": f"open({word!r}, 'w').write('evil')" for name, word in _NAMES.items()}
    return found | _OTHERS


MAIN: Final = '''
import contextlib, hashlib, json, os, shutil, stat, sys
project, outside, probes, tree = json.load(sys.stdin)

def seen(top):
    """A digest of all below a directory."""
    found = hashlib.sha256()
    for above, directories, files in os.walk(top):
        directories.sort()
        for name in sorted([*directories, *files]):
            path = os.path.join(above, name)
            info = os.lstat(path)
            found.update(repr((os.fsencode(path[len(top):]), info.st_mode, info.st_uid)).encode())
            if stat.S_ISLNK(info.st_mode):
                found.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(info.st_mode):
                with contextlib.suppress(OSError):
                    found.update(open(path, "rb").read())
            with contextlib.suppress(OSError):
                found.update(repr(sorted(os.listxattr(path, follow_symlinks=False))).encode())
    return found.hexdigest()

def done(code, place, around, control):
    before = seen(around)
    os.chdir(place)
    said = ""
    try:
        exec(code, {"os": os, "shutil": shutil, "OUTSIDE": outside if not control else around + "/outside",
                    "CONTROL": control})
    except BaseException as e:
        said = f"{type(e).__name__}: {e}"[:100]
    os.chdir("/")
    return seen(around) != before, said

answers = {}
for number, (name, code) in enumerate(probes.items()):
    around = f"/tmp/control/{number}"
    for file, content in tree.items():
        os.makedirs(os.path.dirname(f"{around}/project/p/{file}"), exist_ok=True)
        open(f"{around}/project/p/{file}", "w").write(content)
    os.mkdir(f"{around}/outside")
    open(f"{around}/outside/victim", "w").write("victim")
    there = done(code, f"{around}/project/p", around, True)
    here = done(code, f"{project}/p{number:03}", f"{project}/p{number:03}", False)
    answers[name] = [here, there]
    shutil.rmtree(around, ignore_errors=True)
print(json.dumps(answers))
'''
