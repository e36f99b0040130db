"""B36: comments and quotes inside a multi-line command."""

import json
import sys
from pathlib import Path

import pytest

from .rig import FE, Rig

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["ARGV_FILE"], "w") as file:
    json.dump(sys.argv, file)
port = sys.argv[sys.argv.index("--port") + 1]
os.execv(sys.executable, [sys.executable, "-S", "-E", {str(FE)!r}, "--port", port, "model=a", "journal=" + os.environ["JOURNAL"]])
"""
BLOCK = r"""
      fe --port ${PORT}
      --samplers "top_k;dry;min_p"   # order matters
      # --ctx 8192
      --chat-template '{"a": "b # not a comment"}'
      --path "C:\models\x y.gguf"
      --color=#ff00aa
      --literal $(id) ; | > < & * ~ $HOME `id`
"""
AS_WRITTEN = [
    *("--samplers", "top_k;dry;min_p"),
    *("--chat-template", '{"a": "b # not a comment"}'),
    *("--path", "C:\\models\\x y.gguf"),
    "--color=#ff00aa",
    *("--literal", "$(id)", ";", "|", ">", "<", "&", "*", "~", "$HOME", "`id`"),
]
LIST = ["fe", "--port", "${PORT}", "# no comment", 'a "quoted" word', "", "$(id)", "it's", "a;b|c"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(f"|{BLOCK}", AS_WRITTEN, id="literal-block"),
        pytest.param(f">{BLOCK}", AS_WRITTEN, id="folded-block"),
        pytest.param(json.dumps(LIST), LIST[3:], id="list"),
    ],
)
async def test_the_engine_gets_exactly_the_words_that_were_meant(tmp_path: Path, command: str, expected: list[str]) -> None:
    """Comments are gone, quotes are taken off, backslashes of paths stay, and nothing is done that a shell would do."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "fe").write_text(RECORDER)
    (programs / "fe").chmod(0o755)
    rig = Rig(tmp_path, {})
    argv_file = tmp_path / "argv.json"
    environment = [f"PATH={programs}", f"ARGV_FILE={argv_file}", f"JOURNAL={rig.journal_path}"]
    rig.config_path.write_text(f"models:\n  a:\n    env: {json.dumps(environment)}\n    memory: 100MiB\n    cmd: {command}\n")
    async with rig:
        assert (await rig.chat("a")).done
        port = (await rig.model("a"))["instances"][0]["port"]
        program, *words = json.loads(argv_file.read_text())
        assert Path(program).name == "fe"
        assert words == ["--port", str(port), *expected]
