"""The ``covenant`` command: a lazy tree, so that ``--help`` loads click and nothing else."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import sys
import traceback
from typing import TYPE_CHECKING

import click

from covenant.cli import common, stdout
from policy import errors

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name -> (module, attribute, one line of help). A group's module is imported when it is called, not before.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "keys": ("covenant.cli.operator.keys", "keys", "Make and list operator keys."),
    "trust": ("covenant.cli.operator.trust", "trust", "The trust root: who may sign what."),
    "manifest": ("covenant.cli.operator.manifest", "manifest", "Check, sign, verify and show a package's manifest."),
    "state": ("covenant.cli.operator.state", "state", "Repair the state after a clock that was wrong."),
    "policy": ("covenant.cli.policy.commands", "policy", "See what a manifest compiles to, and why."),
    "run": ("covenant.cli.run.run", "run", "Run a signed package with an intent."),
    "exec": ("covenant.cli.run.command", "exec_", "Run any command in a sandbox, with what a profile grants."),
    "learn": ("covenant.cli.policy.learn", "learn", "Observe a command, and write the manifest that it needs."),
    "attach": ("covenant.cli.run.attach", "attach", "Connect this terminal to a detached session."),
    "stdio": ("covenant.cli.run.run", "stdio", "Connect an editor or an MCP client to a signed package."),
    "dev": ("covenant.cli.run.run", "dev", "Edit loop: sign with a local key, run, say so."),
    "ps": ("covenant.cli.run.manage", "ps", "List the runs that live now."),
    "suspend": ("covenant.cli.run.manage", "suspend", "Stop a run where it is; its clocks run on."),
    "resume": ("covenant.cli.run.manage", "resume", "Let a suspended run go on."),
    "kill": ("covenant.cli.run.manage", "kill", "End a run now."),
    "logs": ("covenant.cli.run.manage", "logs", "Show what a run's agent wrote to stderr."),
    "wait": ("covenant.cli.run.manage", "wait", "Wait for a run's end, and end as it did."),
    "top": ("covenant.cli.run.top", "top", "Show what the live runs use, as a tree."),
    "metrics": ("covenant.cli.run.top", "metrics", "Print every number once, as Prometheus reads it."),
    "attest": ("covenant.cli.run.attest", "attest", "Read the kernel back: is a running agent held to its manifest."),
    "denials": (
        "covenant.cli.policy.denials",
        "denials",
        "Explain what was refused to an agent, with the line to add.",
    ),
    "vault": ("covenant.cli.operator.vault", "vault", "Keep the secrets that agents are granted by name."),
    "models": ("covenant.cli.operator.models", "models", "See the providers of models, and what agents asked."),
    "layer": ("covenant.cli.operator.layer", "layer", "Build and keep the trees that agents' roots are made of."),
    "approvals": ("covenant.cli.run.approvals", "approvals", "See what agents wait for, and grant or deny it."),
    "workspace": (
        "covenant.cli.operator.workspace",
        "workspace",
        "Look at and apply what agents changed in directories.",
    ),
    "volume": ("covenant.cli.operator.volume", "volume", "Make and keep the file systems that agents write to."),
    "bench": ("covenant.cli.run.bench", "bench", "Measure what a run costs here, beside the raw tools."),
    "doctor": ("covenant.cli.run.doctor", "doctor", "Say what this host can enforce, and the fix for the rest."),
    "setup": ("covenant.cli.setup.commands", "setup", "Lay units, users and manual pages of a wheel's installation."),
    "daemon": ("covenant.cli.daemon.basics", "daemon", "Serve this home, as covenantd does."),
    "tui": ("covenant.cli.daemon.tui", "tui", "Watch and steer agents in the terminal."),
    "console": ("covenant.cli.daemon.console", "console", "Print a link that logs a browser in to the web console."),
    "ping": ("covenant.cli.daemon.basics", "ping", "Ask the daemon whether it is there."),
    "bootstrap": ("covenant.cli.daemon.basics", "bootstrap", "Grant the operator what the packages require."),
    "intent": ("covenant.cli.daemon.intents", "intent", "Have an agent do something, and print its answer."),
    "intents": ("covenant.cli.daemon.intents", "intents", "Go on with an intent that waited, and see its result."),
    "agents": ("covenant.cli.daemon.agents", "agents", "See the packages that the daemon knows."),
    "memory": ("covenant.cli.daemon.memory", "memory", "Read, search and write memory, and keep it in order."),
    "ignore": ("covenant.cli.daemon.agents", "ignore", "Ask what .covenantignore keeps the daemon from."),
    "capabilities": ("covenant.cli.daemon.capabilities", "capabilities", "List, grant and revoke capabilities."),
    "peers": ("covenant.cli.daemon.peers", "peers", "See and change who may connect."),
    "mcp": ("covenant.cli.daemon.mcp", "mcp", "The daemon as an MCP server over stdin and stdout."),
    "tools": ("covenant.cli.daemon.tools", "tools", "The daemon's tools, and those of a package."),
    "a2a": ("covenant.cli.daemon.a2a", "a2a", "Tasks between agents: send, receive, repair."),
    "receipts": ("covenant.cli.daemon.settlement", "receipts", "See what was used, and by whom."),
    "settlement": ("covenant.cli.daemon.settlement", "settlement", "Mend what settlement lacks."),
    "chain": ("covenant.cli.daemon.settlement", "chain", "Settle receipts in batches."),
    "budget": ("covenant.cli.daemon.settlement", "budget", "See what agents' budgets were charged."),
    "verify": ("covenant.cli.daemon.basics", "verify", "Hold the daemon's stores against each other."),
    "audit": ("covenant.cli.audit.commands", "audit", "Read, verify, cut and prove the audit log."),
    "export": ("covenant.cli.audit.export", "export", "Send the rows of the audit logs to other systems."),
    "version": ("covenant.cli.daemon.basics", "version", "Show the version, and the daemon's protocol."),
    "completion": ("covenant.cli.daemon.basics", "completion", "Print what completes these words in your shell."),
    "help": ("covenant.cli.help", "help_code", "Explain an error code."),
}


# How `--help` shows them: by who needs them. tests/unit/covenant/test_cli_main.py holds it against the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "Author: write a package": ("manifest", "learn", "dev", "policy", "denials", "tools", "layer"),
    "Run: start agents and see to them": (
        *("run", "exec", "stdio", "attach", "ps", "top", "logs", "wait", "suspend", "resume", "kill", "attest"),
        *("approvals", "workspace", "volume", "tui", "console", "bench"),
    ),
    "Operator: keys, secrets, the machine": (
        *("keys", "trust", "state", "vault", "models", "doctor", "setup", "metrics", "audit", "export"),
    ),
    "Daemon: intents, memory, peers": (
        *("daemon", "ping", "bootstrap", "intent", "intents", "agents", "memory", "ignore", "capabilities", "peers"),
        *("mcp", "a2a", "receipts", "settlement", "chain", "budget", "verify"),
    ),
    "Help": ("help", "version", "completion"),
}


class LazyGroup(click.Group):
    """A group whose sub-commands are imported on first use; their help lines are in the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(entry[0]), entry[1])
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with suggestions from the table, which click does not know."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = ", ".join(f"'{name}'" for name in get_close_matches(word, COMMANDS))
            ctx.fail(f"No such command {word!r}." + (f" Did you mean {near}?" if near else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the table, without importing any module."""
        from click.shell_completion import CompletionItem

        words = [CompletionItem(n, help=line) for n, (_, _, line) in COMMANDS.items() if n.startswith(incomplete)]
        return words + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, COMMANDS[name][2]) for name in names])


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        import importlib.metadata

        common.say(f"covenant {importlib.metadata.version('covenant-supervisor')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def cli() -> None:
    """Run AI agents so that what one may do stands in a signed file, and the kernel holds it to that file."""


def entry() -> None:
    """Run the console script. Only here a refusal becomes one line (or one JSON document) and an exit status."""
    as_json = "--json" in sys.argv[1:]
    try:
        one_command()
        status = cli.main(standalone_mode=False)
    except errors.StdoutError as e:
        common.fail(e, as_json=False)
    except errors.CovenantError as e:
        common.fail(errors.exhausted(e) or e, as_json=as_json)
    except click.UsageError as e:
        if as_json:
            common.fail(errors.UsageError(e.format_message(), hint=_fix(e)), as_json=True)
        _show(e)
        sys.exit(common.EXIT_USAGE)
    except click.ClickException as e:
        common.fail(errors.UsageError(e.format_message()), as_json=as_json)
    except (click.Abort, KeyboardInterrupt) as e:
        # click raises Abort by itself for the answer no, and in place of a signal or an end of stdin.
        declined = isinstance(e, click.Abort) and e.__context__ is None
        words = "the answer was not yes: nothing was changed" if declined else "interrupted"
        common.fail(errors.StoppedError(words), as_json=as_json)
    except BrokenPipeError:
        sys.exit(common.EXIT_FAILED)
    except Exception as e:
        if (found := errors.exhausted(e)) is not None:
            common.fail(found, as_json=as_json)
        # The traceback goes to stderr for developers; the document on stdout has none.
        common.say(common.visible("".join(traceback.format_exception(e)), newlines=True), err=True)
        common.fail(errors.InternalError(f"{type(e).__name__}: {' '.join(str(e).split())}"), as_json=as_json)
    sys.exit(status if isinstance(status, int) else common.EXIT_DONE)


def _show(error: click.UsageError) -> None:
    """Print click's message on wrong usage; it quotes arguments, which may be untrusted file names."""
    shown = io.StringIO()
    error.show(file=shown)
    common.say(common.visible(shown.getvalue().rstrip("\n"), newlines=True), err=True)
    if fix := _fix(error):
        common.say(f"  fix: {fix}", err=True)


def _fix(error: click.UsageError) -> str:
    """Return the fix of an unknown option or of a word too many, empty for other errors."""
    if error.ctx is not None and error.message.startswith("Got unexpected extra argument"):
        return _fix_of_words(error.ctx)
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    takes_text = any(
        isinstance(one, click.Argument) and not isinstance(one.type, click.Choice) for one in error.ctx.command.params
    )
    is_words = any(ch.isspace() for ch in error.option_name)
    if error.possibilities and not (takes_text and is_words):
        return f"write {error.possibilities[0]}"
    if takes_text:
        return "write -- before a word that begins with a dash and is no option"
    return f"{error.ctx.command_path} --help lists the options"


def _fix_of_words(context: click.Context) -> str:
    """Return the fix of words beyond the arguments of a command."""
    if any(one.name == "text" for one in context.command.params if isinstance(one, click.Argument)):
        return "put the text into quotes"
    if context.command_path in ("covenant vault put", "covenant vault rotate"):
        return f"a secret comes from stdin: {context.command_path} AGENT NAME < FILE"
    return f"{context.command_path} --help shows its arguments"


def one_command() -> None:
    """Set up this process for a single command.

    Garbage collection during imports and at exit would waste time: the objects of one command are freed by reference
    counts, or with the process.

    Raises:
        errors.StdoutError: stdout is closed.
    """
    gc.disable()
    atexit.register(gc.freeze)
    # No installed pydantic plugin may take part in parsing a manifest.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    stdout.install()
