"""The files that run it in production, made from the configuration that runs it now."""
