"""A discrete-event world for scheduling policies: loads, the clock, the rules others use, and the real scheduler."""
