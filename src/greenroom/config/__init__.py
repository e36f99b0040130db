"""Configuration: the file people write, as plain values the rest works with."""
