"""`greenroom generate FORMAT`: files that run it elsewhere.  One module a format, imported when it is asked for.

`FORMAT:DIR` is `FORMAT -o DIR`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

import click

# format -> (module:attribute, the line in `--help`)
FORMATS: Mapping[str, tuple[str, str]] = {
    "quadlet": ("greenroom.cli.generate_host:quadlet", "Units for podman under systemd."),
    "compose": ("greenroom.cli.generate_host:compose", "A compose.yaml for docker or podman."),
    "systemd": ("greenroom.cli.generate_host:systemd", "A unit for a host without containers."),
    "containerfile": ("greenroom.cli.generate_host:containerfile", "How greenroom's own image is built."),
    "kube": ("greenroom.cli.generate_kube:kube", "Kubernetes objects: a kustomize tree, a Helm chart or one file."),
    "mig": ("greenroom.cli.generate_partition:mig", "Slices of NVIDIA GPUs for these models, with walls between them."),
    "mps": ("greenroom.cli.generate_partition:mps", "Equal shares of NVIDIA GPUs, by MPS."),
    "time-slicing": ("greenroom.cli.generate_partition:time_slicing", "Turns on NVIDIA GPUs; memory is not divided."),
    "llm-d": ("greenroom.cli.generate_llmd:llm_d", "Pools of replicas behind one gateway, on Kubernetes or without."),
}

NEAR_MIN = 0.7  # of 1


class FormatGroup(click.Group):
    """A group that imports a format only to write it, and takes `FORMAT:DIR`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(FORMATS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in FORMATS:
            return None
        module, _, attribute = FORMATS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, colon, folder = args[0].partition(":") if args else ("", "", "")
        if colon and name in FORMATS:
            if not folder:
                ctx.fail(f"{args[0]!r} names no folder; write {name}:DIR, or {name} alone to print the files")
            args = [name, "--output", folder, *args[1:]]
        elif args and name not in FORMATS and not name.startswith("-"):
            near = difflib.get_close_matches(name, FORMATS, n=1, cutoff=NEAR_MIN)
            hint = f"Did you mean {near[0]!r}?" if near else f"Write one of {', '.join(FORMATS)}."
            ctx.fail(f"there is no format {name!r}. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Formats"):
            formatter.write_dl([(name, line) for name, (_, line) in FORMATS.items()])


@click.group(cls=FormatGroup, context_settings={"help_option_names": ["-h", "--help"]})
def generate() -> None:
    """Write the files that run the same models elsewhere.

    Nothing is started and nothing is asked: the files are printed, or written to a folder (FORMAT:DIR, or -o DIR).
    """
