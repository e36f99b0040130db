"""Wiring of the running server: startup, main loop, shutdown."""

from __future__ import annotations


def run(config_path: str, listen: str | None, state_dir: str | None, no_auth: bool, strict: bool) -> int:
    """Serve until a signal ends it; returns the exit code.  Raises ConfigError for a configuration that cannot be used."""
    from .server import serve_forever

    return serve_forever(config_path, listen, state_dir, no_auth=no_auth, strict=strict)
