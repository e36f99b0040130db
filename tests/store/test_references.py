"""Names of models: what people write, what it means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.store.facts import Reference, StoreError
from greenroom.store.references import file_name, is_digest, model_id, model_ids, parse, parse_here, written

DIGEST = "sha256:" + "ab" * 32


class TestParse:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("oci://registry.example.org/team/smollm2:135m", Reference("oci", "registry.example.org", "team/smollm2", "135m")),
            ("oci://127.0.0.1:5000/p/m", Reference("oci", "127.0.0.1:5000", "p/m", "latest")),
            (f"oci://[::1]:5000/m@{DIGEST}", Reference("oci", "[::1]:5000", "m", "", DIGEST)),
            (f"oci://registry/m:v1@{DIGEST}", Reference("oci", "registry", "m", "v1", DIGEST)),
            ("oci://[2001:DB8:0::1]/m:v1", Reference("oci", "[2001:db8::1]", "m", "v1")),
            ("docker://ai/smollm2:135M-Q4_K_M", Reference("oci", "docker.io", "ai/smollm2", "135M-Q4_K_M")),
            ("docker://smollm2", Reference("oci", "docker.io", "library/smollm2", "latest")),
            ("docker://localhost/x:y", Reference("oci", "localhost", "x", "y")),
            ("index.docker.io/ai/smollm2", Reference("oci", "docker.io", "ai/smollm2", "latest")),
            ("GHCR.io/org/model:v1", Reference("oci", "ghcr.io", "org/model", "v1")),
            ("host:5000/model", Reference("oci", "host:5000", "model", "latest")),
            ("hf://org/Repo-GGUF:Q4_K_M", Reference("hf", "", "org/Repo-GGUF", "Q4_K_M")),
            ("hf://org/repo:sub/x.gguf@v1.0", Reference("hf", "", "org/repo", "sub/x.gguf", "v1.0")),
            ("hf://org/repo/sub/x.gguf", Reference("hf", "", "org/repo", "sub/x.gguf")),
            ("huggingface://org/repo", Reference("hf", "", "org/repo")),
            ("hf.co/org/repo:Q8_0", Reference("hf", "", "org/repo", "Q8_0")),
            ("https://huggingface.co/org/repo/resolve/main/x.gguf", Reference("hf", "", "org/repo", "x.gguf")),
            ("https://huggingface.co/org/repo/blob/abc123/d/x.gguf", Reference("hf", "", "org/repo", "d/x.gguf", "abc123")),
            ("https://huggingface.co/org/repo", Reference("hf", "", "org/repo")),
            ("ollama://smollm2:135m", Reference("ollama", "", "library/smollm2", "135m")),
            ("ollama://library/smollm2", Reference("ollama", "", "library/smollm2", "latest")),
            ("ollama://me/mine:x", Reference("ollama", "", "me/mine", "x")),
            ("ollama.com/library/llama3", Reference("ollama", "", "library/llama3", "latest")),
            ("https://h.example:443/a/x.gguf", Reference("https", "h.example", "/a/x.gguf")),
            ("http://h.example:8080/x.gguf?token=1", Reference("http", "h.example:8080", "/x.gguf?token=1")),
            ("file:///srv/a%20b/x.gguf", Reference("file", "", "/srv/a b/x.gguf")),
            ("/srv/a b/./x.gguf", Reference("file", "", "/srv/a b/x.gguf")),
        ],
    )
    def test_what_people_write(self, text: str, expected: Reference):
        """Each form means one thing, and its canonical text means the same."""
        assert expected == parse(text)
        assert expected == parse(str(expected))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "empty"),
            ("   ", "empty"),
            ("smollm2", "ollama://smollm2"),
            ("org/repo", "hf://org/repo"),
            ("hff://org/repo", "did you mean hf://org/repo"),
            ("OCI:/registry/x", "did you mean oci://registry/x"),
            ("hf:org/repo", "did you mean hf://org/repo"),
            ("oci://onlyname", "docker://onlyname"),
            ("oci://h/Team/Model:v1", "did you mean team/model"),
            ("oci://h/a:b:c", "tag"),
            ("oci://h/a@sha256:abc", "digest"),
            (f"oci://h/a@{DIGEST.upper()}", "digest"),
            ("oci://h/../etc", "repository"),
            ("oci://h//x", "repository"),
            ("oci://h:0/x", "port"),
            ("oci://h:65536/x", "port"),
            ("oci://::1/x", "brackets"),
            ("oci://[::1/x", "IPv6"),
            ("oci://[fe80::1%eth0]/x", "IPv6"),
            ("oci://127.1/x", "four decimal numbers"),
            ("oci://0x7f.0.0.1/x", "four decimal numbers"),
            ("oci://2130706433/x", "four decimal numbers"),
            ("oci://0177.0.0.1/x", "four decimal numbers"),
            ("oci://héros.example/x", "xn--"),
            ("oci://h/" + "a" * 300, "300 characters"),
            ("oci://h/a b", "blanks"),
            ("oci://h/a\0b", "control"),
            ("oci://h/a\u202eb", "control"),
            ("x" * 3000, "3,000 characters"),
            ("hf://org/repo:../../x", "leads out"),
            ("hf://org/repo@../x", "revision"),
            ("hf://org", "hf://ORG/REPO"),
            ("hf://../repo", "hf://ORG/REPO"),
            ("ollama://a/b/c", "ollama://NAME:TAG"),
            ("ollama://..", "ollama://NAME:TAG"),
            ("https://h.example/", "names no file"),
            ("https://h.example/../x.gguf", "'..'"),
            ("https://h.example/%2e%2e/x.gguf", "'..'"),
            ("https://h.example/a%2fb.gguf", "hidden separator"),
            ("https://h.example/a%00.gguf", "hidden separator"),
            ("file://host/x.gguf", "three slashes"),
            ("/srv/../etc/passwd", "'..'"),
            ("./x.gguf", "relative path"),
            ("x.gguf", "no file here"),
            ("models/x.gguf", "no whole path"),
            ("ftp://h/x", "unknown scheme"),
        ],
    )
    def test_what_is_no_reference_gets_a_sentence_that_helps(self, text: str, words: str):
        with pytest.raises(StoreError, match=r".") as caught:
            parse(text)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            "https://user:hunter2@h.example/x.gguf",
            "https://hunter2@h.example/x.gguf",
            "oci://user:hunter2@h/x",
            "user:hunter2@h.example/x",
            "hff://user:hunter2@h/x",
            "hf://user:hunter2@org/repo",
            "ollama://user:hunter2@h.example/x/y",
            "oci:/user:hunter2@h/x",
        ],
    )
    def test_a_password_is_refused_and_not_repeated(self, text: str):
        """What is refused because it holds a password must not land in a log with it."""
        with pytest.raises(StoreError) as caught:
            parse(text)
        assert "hunter2" not in str(caught.value)

    @given(st.text(max_size=60) | st.from_regex(r"(oci|hf|ollama|https|file|docker)://[ -~]{0,40}", fullmatch=True))
    def test_any_text_is_a_reference_or_a_store_error(self, text: str):
        """Nothing else is raised, and what is accepted reads back as the same reference."""
        try:
            reference = parse(text)
        except StoreError:
            return
        assert reference == parse(written(reference))
        assert "\0" not in written(reference)
        assert "/../" not in f"/{reference.path}/"
        assert model_id(reference).strip("abcdefghijklmnopqrstuvwxyz0123456789._-") == ""

    @given(
        st.from_regex(r"[a-z0-9]{1,8}(\.[a-z]{1,5}){1,2}(:[1-9][0-9]{0,3})?", fullmatch=True),
        st.from_regex(r"[a-z0-9]{1,8}(/[a-z0-9]{1,8}(-[a-z0-9]{1,4})?){1,3}", fullmatch=True),
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True),
        st.booleans(),
    )
    def test_references_to_registries_round_trip(self, host: str, path: str, tag: str, pinned: bool):
        text = f"oci://{host}/{path}:{tag}" + (f"@{DIGEST}" if pinned else "")
        assert parse(text) == Reference("oci", host, path, tag, DIGEST if pinned else "")
        assert str(parse(text)) == text


class TestParseHere:
    def test_what_exists_is_a_file(self, tmp_path: Path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        assert Reference("file", "", str(tmp_path / "model.gguf")) == parse_here("model.gguf", tmp_path)
        assert Reference("file", "", str(tmp_path / "model.gguf")) == parse_here("./model.gguf", tmp_path)

    def test_what_looks_like_a_path_is_one_even_when_it_does_not_exist(self, tmp_path: Path):
        assert Reference("file", "", str(tmp_path.parent / "x.gguf")) == parse_here("../x.gguf", tmp_path)

    @pytest.mark.parametrize("text", ["nowhere/x.gguf", "models/chat", "models/deep/chat"])
    def test_a_mistyped_path_is_told_as_one(self, tmp_path: Path, text: str):
        """It ends as a file does, or its first folder is there."""
        (tmp_path / "models").mkdir()
        with pytest.raises(StoreError, match=f"there is no file '{text}' here"):
            parse_here(text, tmp_path)

    @pytest.mark.parametrize(("text", "words"), [("org/repo", "hf://org/repo"), ("a" * 300 + "/x", "does not say where it is kept")])
    def test_what_is_no_path_is_not_told_as_one(self, tmp_path: Path, text: str, words: str):
        with pytest.raises(StoreError, match=words):
            parse_here(text, tmp_path)
        assert parse("hf.co/org/repo") == parse_here("hf.co/org/repo", tmp_path)

    def test_everything_else_is_parsed_as_ever(self, tmp_path: Path):
        assert parse("hf://a/b") == parse_here("hf://a/b", tmp_path)
        with pytest.raises(StoreError):
            parse_here("smollm2", tmp_path)


class TestModelId:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("oci://r/ai/smollm2:135M-Q4_K_M", "smollm2-135m"),
            ("oci://r/ai/smollm2:latest", "smollm2"),
            ("oci://r/ai/smollm2-135m:v1.2", "smollm2-135m"),
            (f"oci://r/ai/smollm2@{DIGEST}", "smollm2"),
            ("hf://bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M", "smollm2-135m-instruct"),
            ("hf://org/Qwen3-8B", "qwen3-8b"),
            ("hf://org/repo:Qwen3-8B-Q4_K_M-00001-of-00002.gguf", "qwen3-8b"),
            ("ollama://smollm2:135m", "smollm2-135m"),
            ("ollama://smollm2", "smollm2"),
            ("https://h.example/d/SmolLM2-135M-Instruct.Q4_1.gguf?x=1", "smollm2-135m-instruct"),
            ("/srv/models/SmolLM2 135M.gguf", "smollm2-135m"),
            ("/srv/models/日本.gguf", "model"),
        ],
    )
    def test_a_short_name_to_serve_it_by(self, text: str, expected: str):
        assert expected == model_id(parse(text))

    def test_two_of_one_name_are_told_apart(self):
        """By quantisation first, then by a number; never two alike."""
        references = [
            parse("hf://o/m-GGUF:Q4_K_M"),
            parse("hf://o/m-GGUF:Q8_0"),
            parse("oci://a/m:v1"),
            parse("oci://b/m:v1"),
            parse("hf://o/n"),
        ]
        assert list(model_ids(references).values()) == ["m-q4_k_m", "m-q8_0", "m-v1", "m-v1-2", "n"]

    def test_names_that_tags_do_not_tell_apart_say_where_they_are(self):
        """In whatever order they are given."""
        chat, rerank = parse("oci://h/chat/tiny:1"), parse("oci://h/rr/tiny:1")
        assert model_ids([chat, rerank]) == model_ids([rerank, chat]) == {chat: "chat-tiny", rerank: "rr-tiny"}


class TestFileName:
    def test_the_last_part_decoded(self):
        assert file_name(parse("https://h.example/x/a%20b.gguf?y=z")) == "a b.gguf"
        assert file_name(parse("/srv/x.gguf")) == "x.gguf"


def test_digests():
    assert is_digest(DIGEST)
    assert not is_digest(DIGEST + "\n")
    assert not is_digest("sha512:" + "a" * 128)
