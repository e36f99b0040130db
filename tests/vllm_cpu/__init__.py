"""Tests against a true vLLM server on a machine without a GPU; see rig.py."""
