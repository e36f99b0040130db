"""The first start of an engine that fetches its weights itself: how long it may take, and the token that it may need."""

from __future__ import annotations

from greenroom.config.model import ModelConfig
from greenroom.deploy.commands import dialect
from greenroom.engines.generic import HUB_TOKENS, Generic

FIRST_START_S = 3600.0  # a probe that gives up sooner has it begin anew for ever
TOKEN = HUB_TOKENS[0]


def start_s(model: ModelConfig, engine: Generic) -> float:
    """What a start may take; the configured limit was measured with weights that were there."""
    return max(model.start_s_max, FIRST_START_S) if engine.fetches_from() else model.start_s_max


def offered(engine: Generic) -> tuple[str, ...]:
    """Variables that it is given where somebody sets them: most models ask for no token, some do."""
    return (TOKEN,) if engine.fetches_from() == "hub" and not engine.has_hub_token() else ()


def note(model: ModelConfig) -> str:
    """Where greenroom itself starts the engine: what it does with a start that takes longer; "" = nothing to say."""
    if not dialect(model).fetches_from() or model.start_s_max >= FIRST_START_S:
        return ""
    return (
        f"{model.id}: its engine fetches its weights itself, and a start that takes longer than {model.start_s_max:g} s is ended: raise "
        "`healthCheckTimeout` for the first one, or name them under `model`, and greenroom fetches them before it starts the engine."
    )
