"""greenroom serves many models on few GPUs."""

__version__ = "0.1.0"
