"""`greenroom generate quadlet | compose | systemd | containerfile`: for one host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.generate_options import emit, inputs, intent_of, output, shape

if TYPE_CHECKING:
    from greenroom.deploy.intent import Files


BARE_HAS_NO = (("--gpu", "gpus"), ("--mig", "mig"), ("--image", "image"), ("--engine-image", "engine_images"))


@click.command()
@inputs
@shape
@click.option("--rootful", is_flag=True, help="For /etc/containers/systemd; else for one user, without root.")
@output
def quadlet(rootful: bool, **given: Any) -> None:
    """Units for podman under systemd: containers, volumes, images, health, devices, limits."""
    from greenroom.deploy import quadlet as writer

    intent = intent_of(given)
    emit(_fit(lambda: writer.files(intent, rootful=rootful)), given)


@click.command()
@inputs
@shape
@output
def compose(**given: Any) -> None:
    """A compose.yaml with health, devices and limits."""
    from greenroom.deploy import compose as writer

    intent = intent_of(given)
    emit(_fit(lambda: writer.files(intent)), given)


@click.command()
@inputs
@shape
@click.option("--user", is_flag=True, help="For a user's own systemd; else for the system's.")
@click.option("--run-as", default="", metavar="ACCOUNT", help="Account of a system unit [default: one made while it runs].")
@click.option("--program", default="", metavar="PATH", help="greenroom's program [default: this one].")
@output
def systemd(user: bool, run_as: str, program: str, **given: Any) -> None:
    """A unit for a host without containers: greenroom, and its engines as its processes."""
    from greenroom.deploy import systemd as writer

    if user and run_as:
        raise click.UsageError("--run-as is for a system unit; a user's unit runs as that user")
    if idle := [flag for flag, name in BARE_HAS_NO if given[name]]:
        raise click.UsageError(f"{idle[0]} means nothing on a host without containers: engines see its devices, and run from its programs")
    intent = intent_of(given, bare=True)
    emit(_fit(lambda: writer.files(intent, user=user, program=program or own_program(), run_as=run_as)), given)


@click.command()
@inputs
@shape
@output
def containerfile(**given: Any) -> None:
    """How an image is built that holds greenroom and the engines of the configuration."""
    from greenroom.deploy.containerfile import FILE

    emit(_fit(lambda: {FILE: intent_of({**given, "image": "", "mode": "greenroom"}).builds}), given)


def own_program() -> str:
    """The program that is running, as it was called; its usual place when it was not called by a path."""
    called = sys.argv[0]
    from greenroom.deploy.systemd import PROGRAM

    return os.path.abspath(called) if os.path.basename(called) == "greenroom" and "/" in called else PROGRAM


def _fit(write: Callable[[], Files]) -> Files:
    from greenroom.deploy.unfit import Unfit

    try:
        return write()
    except Unfit as exc:
        raise click.ClickException(str(exc)) from exc
