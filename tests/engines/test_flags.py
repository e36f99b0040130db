"""Reading a command line: values, switches, sizes, and what stands in front of the engine."""

from __future__ import annotations

import shlex

import pytest

from greenroom.engines.flags import Flags, size_bytes, unwrap


def test_the_last_value_of_a_flag_wins_in_any_spelling() -> None:
    """Short, long, with a space or an equals sign: one flag."""
    flags = Flags(("-c", "1", "--ctx-size=2", "-c", "3"))

    assert flags.value("-c", "--ctx-size") == "3"


def test_a_command_line_beats_the_environment_and_the_environment_beats_nothing() -> None:
    """LLAMA_ARG_* are defaults only."""
    env = {"LLAMA_ARG_CTX_SIZE": "512"}

    assert Flags(("-c", "64"), env).integer("-c", env="LLAMA_ARG_CTX_SIZE") == 64
    assert Flags((), env).integer("-c", env="LLAMA_ARG_CTX_SIZE") == 512
    assert Flags((), {}).integer("-c", env="LLAMA_ARG_CTX_SIZE") is None


def test_a_negative_number_is_a_value_and_a_trailing_flag_has_none() -> None:
    """`-np -1` means auto; a flag at the very end is a mistake that the engine reports itself."""
    assert Flags(("-np", "-1")).integer("-np") == -1
    assert Flags(("-np",)).integer("-np") is None


def test_underscores_are_dashes_where_the_engine_says_so() -> None:
    """argparse based engines take both."""
    argv = ("--max_num_seqs", "7")

    assert Flags(argv, underscores=True).integer("--max-num-seqs") == 7
    assert Flags(argv).integer("--max-num-seqs") is None


def test_a_switch_is_read_from_the_arguments_or_the_environment() -> None:
    """`0`, `off` and the empty string say no."""
    assert Flags(("--embedding",)).has("--embedding")
    assert Flags((), {"E": "1"}).has("--embedding", env="E")
    assert not Flags((), {"E": "0"}).has("--embedding", env="E")
    assert not Flags((), {"E": ""}).has("--embedding", env="E")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("4gb", 4_000_000_000),
        ("x", None),
        ("", None),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int | None) -> None:
    """A small letter is a power of 1000, a capital one of 1024."""
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("command", "inner"),
    [
        ("llama-server -m x", "llama-server -m x"),
        ("env A=1 B=2 llama-server -m x", "llama-server -m x"),
        ("env -u HOME -i A=1 llama-server", "llama-server"),
        ("/usr/bin/nice -n 5 taskset -c 0-3 numactl --membind=0 llama-server -m x", "llama-server -m x"),
        ("timeout -k 5 3600 vllm serve m", "vllm serve m"),
        ("nohup stdbuf -oL setsid llama-server", "llama-server"),
        ("python3.12 -u -m vllm.entrypoints.openai.api_server --model m", "vllm.entrypoints.openai.api_server --model m"),
        ("/opt/v/bin/python /opt/v/bin/vllm serve m", "/opt/v/bin/vllm serve m"),
        ("uv run --with vllm vllm serve m", "vllm serve m"),
        ("sh -c 'cd /srv && A=1 exec llama-server -m \"x y\"; echo over'", "llama-server -m 'x y'"),
        ("bash -lc 'llama-server -m x --port ${PORT} 2>&1 | tee log'", "llama-server -m x --port ${PORT} 2"),
        ("docker run --rm --gpus all -p 1:2 ghcr.io/ggml-org/llama.cpp:server -m x", "ghcr.io/ggml-org/llama.cpp:server -m x"),
        ("env", "env"),
        ("sh script.sh", "sh script.sh"),
        ("sh -c", "sh -c"),
        ('sh -c "it\'s broken"', 'sh -c "it\'s broken"'),
    ],
)
def test_wrappers_are_taken_off(command: str, inner: str) -> None:
    """What is left is the engine and its arguments; what cannot be read is left alone."""
    assert list(unwrap(shlex.split(command)).argv) == shlex.split(inner)


def test_assignments_on_the_way_are_the_engines_environment() -> None:
    """`env A=1` and `sh -c 'B=2 ...'` both count."""
    unwrapped = unwrap(["env", "A=1", "sh", "-c", "B=2 llama-server"])

    assert dict(unwrapped.env) == {"A": "1", "B": "2"}
    assert unwrapped.shell


def test_a_script_may_hand_on_what_stands_behind_it() -> None:
    """The word after the script is its $0, those behind are its own."""
    script = 'exec vllm serve "$@" --port 1'
    assert (
        unwrap(["sh", "-c", script, "sh", "org/m", "--x", "a b"]).argv
        == ("exec", "vllm", "serve", "org/m", "--x", "a b", "--port", "1")[1:]
    )
    assert unwrap(["sh", "-c", "exec vllm serve", "sh", "org/m"]).argv == ("vllm", "serve")
