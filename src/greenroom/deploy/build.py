"""From a configuration to what is to be deployed.  Pure: the same configuration and options give the same intent on any host."""

from __future__ import annotations

import re

from greenroom.config.model import Config, ModelConfig
from greenroom.deploy import docker_run
from greenroom.deploy.basis import Options
from greenroom.deploy.commands import dialect
from greenroom.deploy.engines import Engines
from greenroom.deploy.intent import TARGETS, Intent
from greenroom.deploy.own import Own
from greenroom.deploy.unfit import BuildError
from greenroom.engines import devices as pinning

__all__ = ["MODES", "BuildError", "Options", "build", "guess_target"]

MODES = ("greenroom", "engines")
MIG_PROFILE = re.compile(r"\d+g\.\d+gb(?:\+[a-z.]+)?")


def build(config: Config, *, mode: str = "greenroom", target: str = "cpu", options: Options | None = None) -> Intent:
    """The whole set.  Raises BuildError for what no format could run."""
    options = options or Options()
    if mode not in MODES:
        raise BuildError(f"there is no mode {mode!r}; write greenroom or engines")
    if target not in TARGETS:
        raise BuildError(f"there is no target {target!r}; write one of {', '.join(TARGETS)}")
    if options.mig and not MIG_PROFILE.fullmatch(options.mig):
        raise BuildError(f"{options.mig!r} is not a MIG profile; write one such as 3g.40gb")
    if options.mig and target != "nvidia":
        raise BuildError(f"{options.mig} is a slice of an NVIDIA GPU, and the target is {target}; leave out --mig, or take --target nvidia")
    if not config.models and (mode == "engines" or not config.peers):
        raise BuildError("there is no model to deploy; name a configuration with models, or references")
    return Engines(config, target, options).engines() if mode == "engines" else Own(config, target, options).greenroom()


def guess_target(config: Config, found_vendor: str = "") -> str:
    """What the configuration speaks of (images, variables, UUIDs, host RAM alone), else what this host has, else cpu."""
    words = [word.lower() for model in config.models for word in (*(model.container.args if model.container else ()), *_image_words(model))]
    variables = {name for model in config.models for name in dialect(model).env}
    if variables & set(pinning.AMD_VARIABLES) or any("rocm" in word or "/dev/kfd" in word for word in words):
        return "amd"
    if variables & {"ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"} or any("intel" in word or "xpu" in word for word in words):
        return "intel"
    named = any((device.uuid or "").startswith(("GPU-", "MIG-")) for device in config.devices)
    if named or variables & set(pinning.NVIDIA_VARIABLES) or any("cuda" in word or "nvidia" in word for word in words):
        return "nvidia"
    if all(model.devices == ("ram",) for model in config.models) or {device.id for device in config.devices} == {"ram"}:
        return "cpu"
    return found_vendor or "cpu"


def _image_words(model: ModelConfig) -> tuple[str, ...]:
    if model.container is not None:
        return (model.container.image,)
    run = docker_run.parse(model.argv)
    return () if run is None else (run.image,)
