"""`greenroom run REFERENCE`: a chat in the terminal with a model, fetched first if need be."""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import signal
import sys
import time
import unicodedata
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli import text
from greenroom.cli.child import HOST, CannotRun, serving
from greenroom.cli.folder import own_folder
from greenroom.cli.pull_cmd import Shown, faults, options_of, parsed, registry_options, run, store_options
from greenroom.host.ports import PortError, free_port

if TYPE_CHECKING:
    from rich.console import Console

ANSWER_S_MAX = 600.0  # between two pieces of an answer; the first waits for the model to load
ERROR_BYTES_SHOWN = 600
PROMPT_BYTES_MAX = 8 << 20
BIDI = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
FENCE = '"""'
HELP = f"""\
/bye             end (so does Ctrl-D)
/clear           forget what was said
/system TEXT     set what the model is told about itself, and forget what was said
{FENCE}              begin and end a text of several lines
Ctrl-C           stop an answer"""


@click.command("run")
@click.argument("reference")
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", metavar="TEXT", help="What the model is told about itself.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="The longest answer.")
@click.option("--temperature", type=click.FloatRange(0.0, 10.0), metavar="T", help="0 = always the likeliest word.")
@click.option("--llama-server", "llama_server", metavar="PATH", envvar="GREENROOM_LLAMA_SERVER", help="The llama-server to use.")
@click.option("--timings", is_flag=True, help="Tell how fast each answer came.")
@click.option("--offline", is_flag=True, help="Ask nobody; the model has to be here (GREENROOM_OFFLINE=1).")
@store_options
@registry_options
def run_model(
    reference: str,
    prompt: tuple[str, ...],
    system: str,
    max_tokens: int | None,
    temperature: float | None,
    llama_server: str | None,
    timings: bool,
    store: Path | None,
    quiet: bool,
    **words: Any,
) -> None:
    """Chat with the model REFERENCE, which is fetched first when it is not here.

    With a PROMPT, or text on standard input, it answers once and ends.
    """
    from rich.console import Console

    from greenroom.serve.instant import NoEngine, check_engines

    question = readable(" ".join(prompt)) or ("" if sys.stdin.isatty() else piped())
    if not question and not sys.stdin.isatty():
        raise click.UsageError("there is nothing to ask: give a prompt, text on standard input, or a terminal")
    try:
        check_engines(llama_server)
    except NoEngine as fault:
        raise click.ClickException(text.safe(str(fault))) from None
    with faults():
        stored = fetch([reference], store, quiet, words)[0]
    check_talks(stored)
    for number in (signal.SIGTERM, signal.SIGHUP):  # hung up: the terminal was closed
        signal.signal(number, _end)
    console = Console(highlight=False, soft_wrap=True, stderr=False)
    more: dict[str, Any] = {name: value for name, value in (("max_tokens", max_tokens), ("temperature", temperature)) if value is not None}
    try:
        with own_folder("greenroom-run-") as work:
            config = work.path / "greenroom.yaml"
            port = free_port(None, ())
            name = write(config, [stored], llama_server, free_port(None, (port,)))[0]
            with serving(config, work, port, environment(store)):
                chat = Chat(port, name, readable(system), more, timings)
                if question:
                    code = chat.once(console, question)
                else:
                    code = chat.loop(console)
    except (CannotRun, NoEngine, PortError) as fault:
        raise click.ClickException(text.safe(str(fault))) from None
    sys.exit(code)


def piped() -> str:
    """The text on standard input."""
    raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    if len(raw) > PROMPT_BYTES_MAX:
        raise click.ClickException(f"the text on standard input is longer than {text.size(PROMPT_BYTES_MAX >> 20)}; ask about a part of it")
    return raw.decode(errors="replace").strip()


def readable(said: str) -> str:
    """Text from a terminal or a command line with a mark for each byte that was no UTF-8: JSON cannot hold those."""
    return said.encode(errors="surrogateescape").decode(errors="replace")


def check_talks(stored: Any) -> None:
    """Refuse a model that only turns texts into numbers."""
    from greenroom.engines.gguf import GgufError
    from greenroom.serve.instant import CHAT, EMBEDDING, purpose

    try:
        kind = purpose(stored)
    except GgufError as fault:
        raise click.ClickException(text.safe(f"{stored.reference}: {fault}")) from None
    if kind == CHAT:
        return
    name, route = text.safe(str(stored.reference)), "/v1/embeddings" if kind == EMBEDDING else "/v1/rerank"
    what = "turns texts into vectors" if kind == EMBEDDING else "ranks documents"
    raise click.ClickException(f"{name} {what} and cannot chat; `greenroom serve {shlex.quote(name)}` serves it at {route}")


def _end(number: int, frame: object) -> None:
    """Unlike Ctrl-C, which only stops an answer."""
    sys.exit(128 + number)


def fetch(references: list[str], store: Path | None, quiet: bool, words: dict[str, Any]) -> list[Any]:
    """Each model, here.  What is here already is taken as it is: only `pull` asks for news.  Raises StoreError."""
    from greenroom.store.facts import Damaged, NotFound
    from greenroom.store.library import Library
    from greenroom.store.pull import Puller

    library, found = Library(store), []
    options = options_of(words)
    for one in references:
        reference = parsed(one)
        try:
            found.append(library.ready(reference))
            continue
        except (NotFound, Damaged):
            pass
        shown = Shown(quiet)
        with shown:
            found.append(run(Puller(library, options, shown.remark).pull(reference, shown.tell)))
    return found


def environment(store: Path | None) -> dict[str, str]:
    from greenroom.store.library import ENVIRONMENT

    return {ENVIRONMENT: str(store.absolute())} if store is not None else {}


def write(
    path: Path,
    stored: list[Any],
    llama_server: str | None,
    start_port: int | None = None,
    pull: Mapping[str, Any] | None = None,
) -> list[str]:
    """The configuration for these models; returns their names.  `pull`: how they are fetched again.  Raises NoEngine."""
    from greenroom.config.yaml_out import dump
    from greenroom.host.gpus import here
    from greenroom.serve.instant import configuration

    made = configuration(stored, here(), llama_server=llama_server)
    if start_port is not None:
        made["startPort"] = start_port
    if pull:
        made["pull"] = dict(pull)
    comments = ["Made by greenroom from references; keep it under another name, change it, and serve it with `greenroom serve -c`."]
    try:
        path.write_text(dump(made, comments=comments), encoding="utf-8")
    except OSError as exc:  # of a full disk the system does not say which
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    return list(made["models"])


def printable(piece: str) -> str:
    """What a model wrote, without what could move the cursor or turn the direction of text; lines and joined letters stay."""
    return "".join(char for char in piece if char in "\n\t" or not (unicodedata.category(char) == "Cc" or char in BIDI))


class Trouble(Exception):
    """No answer; one sentence."""


@dataclass(slots=True)
class Chat:
    """What was said, and how to say more."""

    port: int
    model: str
    system: str
    more: dict[str, Any]
    timings: bool
    said: list[dict[str, str]] = field(default_factory=list)

    def once(self, console: Console, question: str) -> int:
        """Exit code."""
        try:
            self.answer(console, question)
        except Trouble as fault:
            click.echo(text.safe(str(fault)), err=True)
            return 1
        except KeyboardInterrupt:
            click.echo(err=True)
            return 130
        return 0

    def loop(self, console: Console) -> int:
        edit_lines()
        console.print(f"[dim]{text.safe(self.model)}; /help tells what else you can type[/dim]", markup=True)
        while True:
            try:
                line = read()
            except EOFError:
                console.print()
                return 0
            except KeyboardInterrupt:
                console.print()
                continue
            word, _, rest = line.strip().partition(" ")
            if word in ("/bye", "/exit", "/quit"):
                return 0
            if word == "/clear":
                self.said.clear()
            elif word == "/system":
                self.system, self.said = readable(rest.strip()), []
            elif word in ("/help", "/?"):
                click.echo(HELP)
            elif word.startswith("/") and "\n" not in line and len(word) > 1 and word[1:].isalpha():
                click.echo(f"there is no {word}; /help tells what there is")
            elif line.strip():
                try:
                    self.answer(console, readable(line))
                except Trouble as fault:
                    click.echo(text.safe(str(fault)), err=True)
                except KeyboardInterrupt:
                    click.echo(" [stopped]")

    def answer(self, console: Console, question: str) -> None:
        """Print the answer as it comes.  One that was stopped counts as said so far."""
        told = [*([{"role": "system", "content": self.system}] if self.system else []), *self.said, {"role": "user", "content": question}]
        body = {"model": self.model, "stream": True, "messages": told, "stream_options": {"include_usage": True}, **self.more}
        began, first_s, pieces, usage = time.monotonic(), 0.0, [], {}
        try:
            # Closed at once, whatever ends it: the server does not wait for an answer that nobody reads.
            with waiting(console) as waits, contextlib.closing(self._stream(body)) as stream:
                for kind, piece in stream:
                    if not first_s:
                        first_s = time.monotonic() - began
                        waits.stop()
                    if kind == "usage":
                        usage = piece
                        continue
                    shown = printable(piece)
                    console.print(shown, end="", markup=False, style="dim" if kind == "reasoning" else None)
                    pieces += [piece] if kind == "content" else []
        finally:
            if pieces:
                self.said += [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(pieces)}]
        console.print()
        if self.timings:
            tokens, left_s = usage.get("completion_tokens"), time.monotonic() - began - first_s
            speed = f", {tokens / left_s:.1f} tokens/s" if tokens and left_s > 0 else ""
            click.echo(f"first word after {text.duration(first_s)}, {tokens or '?'} tokens{speed}", err=True)

    def _stream(self, body: dict[str, Any]) -> Generator[tuple[str, Any], None, None]:
        """(content | reasoning | usage, piece)"""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S_MAX)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Trouble(_reason(response.read(ERROR_BYTES_SHOWN * 10)))
            for raw in response:
                if not raw.startswith(b"data:"):
                    continue
                data = raw[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise Trouble(str(event["error"].get("message") or event["error"]))
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if delta.get("reasoning_content"):
                        yield "reasoning", delta["reasoning_content"]
                    if delta.get("content"):
                        yield "content", delta["content"]
                if event.get("usage"):
                    yield "usage", event["usage"]
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise Trouble(f"the answer broke off: {fault}") from None
        finally:
            connection.close()


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:ERROR_BYTES_SHOWN].decode(errors="replace") or "no answer"


def edit_lines() -> None:
    """`input` with keys that move and past lines that come back; and no line is cut at the 4096 bytes of a terminal's own."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)


def read() -> str:
    """One line, or several between fences.  EOFError at the end."""
    line = input(">>> ")
    if not line.lstrip().startswith(FENCE):
        return line
    lines = [line.lstrip().removeprefix(FENCE)]
    while FENCE not in lines[-1]:
        lines.append(input("... "))
    lines[-1] = lines[-1].partition(FENCE)[0]
    return "\n".join(lines).strip("\n")


class waiting:
    """A spinner until `stop`; nothing where output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("", spinner="dots") if console.is_terminal else None

    def __enter__(self) -> waiting:
        if self._status is not None:
            self._status.start()
        return self

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()

    def __exit__(self, *fault: object) -> None:
        self.stop()
