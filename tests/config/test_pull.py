"""`pull` of greenroom.yaml: for all models, for one, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from greenroom.cli.pull_cmd import pull
from greenroom.config.errors import ConfigError
from greenroom.config.load import load_config_text
from greenroom.config.model import ModelConfig, PullConfig
from greenroom.config.schema import PullSection

ENTRY = "model: 'oci://h/m:1', cmd: 'x ${MODEL_PATH} ${PORT}'"


def text_of(top: str, own: str) -> str:
    return f"{top}\nmodels: {{a: {{{ENTRY}{', ' if own else ''}{own}}}, plain: {{cmd: 'x ${{PORT}}'}}}}"


def load(top: str = "", own: str = "") -> tuple[ModelConfig, ModelConfig]:
    config = load_config_text(text_of(top, own), "c", env={})
    assert config.warnings == ()
    first, second = config.models
    return first, second


def problem(top: str = "", own: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(top, own)
    (found,) = caught.value.problems
    return str(found)


def test_the_words_are_those_of_the_command() -> None:
    """All that `greenroom pull` takes, but for what it shows and where its store is."""
    options = {parameter.name for parameter in pull.params} - {"reference", "store", "quiet", "as_json"}
    assert set(PullSection.model_fields) == options


def test_what_is_said_for_all_models_holds_for_those_that_come_from_somewhere(tmp_path: Path) -> None:
    """Every key, read as the command reads it."""
    file = tmp_path / "some.pem"
    file.write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN PUBLIC KEY-----\n")
    top = f"pull: {{plain_http: yes, tls_ca: {file}, tls_verify: false, allow_host: [h.lan, 'i.lan:1'], platform: linux/arm64,"
    a, plain = load(f"{top} verify_key: {file}, max_size: 20GB, offline: true}}")
    assert a.pull_options == PullConfig(True, str(file), False, ("h.lan", "i.lan:1"), "linux/arm64", str(file), 20 * 10**9, True)
    assert (a.pull, plain.pull_options) == ("missing", PullConfig())


@pytest.mark.parametrize(
    ("own", "when", "options"),
    [
        ("", "missing", PullConfig(size_max_bytes=1 << 30, tls_verify=False)),
        ("pull: never", "never", PullConfig(size_max_bytes=1 << 30, tls_verify=False)),
        ("pull: {when: never}", "never", PullConfig(size_max_bytes=1 << 30, tls_verify=False)),
        ("pull: {max_size: 1MiB, tls_verify: }", "missing", PullConfig(size_max_bytes=1 << 20, tls_verify=False)),
        ("pull: {tls_verify: true, allow_host: b.lan}", "missing", PullConfig(size_max_bytes=1 << 30, allow_host=("b.lan",))),
    ],
)
def test_what_a_model_says_of_itself_wins_key_by_key(own: str, when: str, options: PullConfig) -> None:
    """A word says when, a mapping says how, too."""
    a, _ = load("pull: {max_size: 1GiB, tls_verify: false}", own)
    assert (a.pull, a.pull_options) == (when, options)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("tls_ca: /no/such.pem", 'tls_ca: "/no/such.pem" cannot be read (No such file or directory). Name a file of'),
        (
            "verify_key: /no/such.pub",
            'verify_key: "/no/such.pub" cannot be read (No such file or directory). Name a file of',
        ),
        ("tls_ca: /dev/null", 'tls_ca: "/dev/null" holds none. Name a file of certificates (PEM).'),
        ("verify_key: /dev/null", 'verify_key: "/dev/null" holds none. Name a file of one public key (PEM).'),
        ("verify_key: ''", "verify_key: is no path. Write that of a file of one public key (PEM), such as cosign.pub."),
        ("max_size: 20G", 'max_size: "20G" has no full unit. Write 20GiB (or 20GB for the decimal one).'),
        ("max_size: -5GiB", 'max_size: "-5GiB" is negative, and a size cannot be. Write 80GiB or 1500MiB.'),
        ("allow_host: 'https://h'", 'allow_host: "https://h" is not a host. Write HOST or HOST:PORT, such as blobs.lan:9000.'),
        ("platform: arm64", 'platform: "arm64" is not a platform. Write OS/ARCH, such as linux/amd64.'),
        ("plain_htp: true", 'plain_htp: "plain_htp" is not a key greenroom knows here. Did you mean "plain_http"?'),
    ],
)
@pytest.mark.parametrize("place", ["pull", "models.a.pull"])
def test_a_mistake_is_told_at_its_place(place: str, said: str, sentence: str) -> None:
    """Never passed over, at neither place."""
    told = problem(f"pull: {{{said}}}") if place == "pull" else problem(own=f"pull: {{{said}}}")
    assert f"{place}.{sentence}" in told


def test_when_is_said_of_one_model() -> None:
    """For all of them each would have to be looked for."""
    assert 'pull: is the text "never", not a mapping' in problem("pull: never")
    assert "pull.when" in problem("pull: {when: never}")
    assert 'models.a.pull: "always" is not one of the choices' in problem(own="pull: always")
    assert 'models.a.pull.when: "always" is not one of the choices' in problem(own="pull: {when: always}")


def test_a_lenient_start_does_not_fetch_without_what_was_asked_for() -> None:
    """A key that cannot be read ends the start, or the model it is for: it is never left out."""
    with pytest.raises(ConfigError):
        load_config_text(text_of("pull: {verify_key: /no/such.pub}", ""), "c", env={}, strict=False)
    a = load_config_text(text_of("", "pull: {verify_key: /no/such.pub}"), "c", env={}, strict=False).models[0]
    assert "cannot be read" in a.misconfigured


def test_the_defaults_are_those_of_the_store() -> None:
    """Said once more where the store is not known."""
    from greenroom.serve.storeroom import options_of
    from greenroom.store.pull import Options

    assert options_of(PullConfig()) == Options().from_environment()
    assert inspect.signature(Options).parameters["platform"].default == PullConfig().platform
