"""The `greenroom` command.  Commands are imported when they run, so that `--help` costs nothing.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage or configuration, 3 somebody thrashes (`thrash`), 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from greenroom import __version__

# heading in `--help` -> command -> (module:attribute, the line in `--help`)
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Serve": {
        "serve": ("greenroom.cli.serve_cmd:serve", "Serve the models of a configuration file, or by reference."),
        "run": ("greenroom.cli.run_cmd:run_model", "Chat with a model in the terminal."),
        "demo": ("greenroom.cli.demo_cmd:demo", "Show three models sharing memory for two."),
        "check": ("greenroom.cli.check:check", "Check a configuration file and what fits where."),
        "config": ("greenroom.cli.convert:config", "Convert configuration files."),
    },
    "Watch": {
        "ps": ("greenroom.cli.ps:ps", "List models, what they hold and what happens next."),
        "top": ("greenroom.cli.top:top", "Watch devices, models and the queue."),
        "logs": ("greenroom.cli.logs:logs", "Show the log of a model's engine."),
        "events": ("greenroom.cli.events:events", "Show what happened, and what happens (-f)."),
        "why": ("greenroom.cli.why:why", "Tell how a model came to its present state."),
    },
    "Steer": {
        "load": ("greenroom.cli.load:load", "Bring a model up and wait until it is ready."),
        "unload": ("greenroom.cli.load:unload", "Stop a model and give its memory back."),
        "sleep": ("greenroom.cli.load:sleep", "Put a model to sleep: quick to wake, little GPU memory held."),
        "wake": ("greenroom.cli.load:wake", "Wake a sleeping model."),
        "pin": ("greenroom.cli.load:pin", "Never evict a model."),
        "unpin": ("greenroom.cli.load:unpin", "Let a pinned model be evicted again."),
    },
    "Models": {
        "pull": ("greenroom.cli.pull_cmd:pull", "Bring a model here."),
        "push": ("greenroom.cli.push_cmd:push", "Bring a model to a registry."),
        "list": ("greenroom.cli.list_cmd:list_", "List the models on this host."),
        "inspect": ("greenroom.cli.list_cmd:inspect", "Show what is known of a model."),
        "verify": ("greenroom.cli.tidy_cmd:verify", "Compare models with their digests."),
        "rm": ("greenroom.cli.tidy_cmd:rm", "Remove models from this host."),
        "gc": ("greenroom.cli.tidy_cmd:gc", "Remove what no model needs any more."),
    },
    "Advice": {
        "thrash": ("greenroom.cli.thrash:thrash", "Tell who keeps taking whose place, and what would end it."),
        "ttl": ("greenroom.cli.ttl:ttl", "Show how long idle models should stay."),
        "replay": ("greenroom.cli.replay:replay", "Replay what was recorded, exactly or under other settings."),
    },
    "Deploy": {
        "generate": ("greenroom.cli.generate_cmd:generate", "Write files that run the same models elsewhere."),
        "graduate": ("greenroom.cli.graduate_cmd:graduate", "Tell whether this box is outgrown, and what a cluster would take."),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
NAME_CHARS_MAX = 80  # of a wrong one that are shown
NEAR_MIN = 0.7  # of 1: `bogus` is no misspelt `logs`


class LazyGroup(click.Group):
    """A group that imports a command only to run it, and ends every expected failure without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(unknown_command(args[0]))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))  # one column for all groups
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in group.items()])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run and exit; the exit code tells how it ended."""
        extra["standalone_mode"] = False
        extra.setdefault("prog_name", "greenroom")
        try:
            code = super().main(*args, **extra)
        except click.ClickException as fault:
            fault.show()
            sys.exit(fault.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)
        except OSError as fault:  # its command expected none: a full disk behind standard output, a name that is too long
            said = f"{fault.strerror or fault}" + (f": {printable(fault.filename)}" if fault.filename is not None else "")
            click.echo(f"Error: {said}", err=True)
            end_output()
            sys.exit(EXIT_FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def printable(name: Any) -> str:
    """A file's name, in which nothing controls the terminal."""
    return ascii(str(name)) if not str(name).isprintable() else str(name)


def end_output() -> None:
    """What could not be printed is not tried again on the way out."""
    import os

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # it is no file


def unknown_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=NEAR_MIN)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "`greenroom --help` lists them."
    return f"there is no command {name if len(name) < NAME_CHARS_MAX else name[:NAME_CHARS_MAX] + '…'!r}. {hint}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="greenroom", message="%(prog)s %(version)s")
def main() -> None:
    """Serve many models on few GPUs, behind one OpenAI-compatible address."""
