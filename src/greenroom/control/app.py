"""The control plane: JSON over HTTP for operators, tools and the page.  No handler waits for a model unless it was asked to.

Errors are JSON in OpenAI's shape on every route.  Keys, origins and host names are checked by the data
plane, which is the only way in: this application listens on a private Unix socket.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from greenroom.control import pages, render, sse
from greenroom.control.changes import Changes
from greenroom.control.facade import Facade, Result
from greenroom.core.facts import Operation, State
from greenroom.core.views import ModelView
from greenroom.ledger.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

FACADE: web.AppKey[Facade] = web.AppKey("facade")
READERS: web.AppKey[sse.Readers] = web.AppKey("readers", sse.Readers)
CHANGES: web.AppKey[Changes] = web.AppKey("changes", Changes)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WAIT_S_MAX = 600.0
LOG_LINES_DEFAULT = 200
LOG_LINES_MAX = 10_000
EVENTS_DEFAULT = 200
EVENTS_MAX = 5_000
MINUTES_DEFAULT = 15.0
MINUTES_MAX = 24 * 60.0
REQUESTS_DEFAULT = 100
REQUESTS_MAX = 1_000
OUTCOMES = ("ok", "client_gone", "engine_broke", "cut", "refused", "waiting", "running", "open", "failed")
REQUEST_DIGITS_MAX = 15
KEY_NAME_HEADER = "X-Greenroom-Key-Name"  # told by the data plane, which takes them from nobody else
SCOPES_HEADER = "X-Greenroom-Scopes"
MODELS_PATH = "/api/models/"
OPERATIONS = tuple(operation.value for operation in Operation)
LOOKS = ("logs", "why")  # at a model; they are asked with GET
BODY_BYTES_MAX = 64 << 10  # no route of ours reads a body
SOCKET_PATH_BYTES_MAX = 107  # sun_path
SHUTDOWN_S_MAX = 2.0
UNLOAD_ALL_WAIT_S = 30.0

# What a call waits for when it does not say: bringing a model up can take minutes and middle boxes cut silent calls,
# so that is answered at once; leaving is short, and its caller wants the real outcome.
WAIT_S_DEFAULT = {
    Operation.LOAD: 0.0,
    Operation.WAKE: 0.0,
    Operation.UNLOAD: 30.0,
    Operation.SLEEP: 30.0,
    Operation.PIN: 5.0,
    Operation.UNPIN: 5.0,
}


class Refused(Exception):
    """Ends a handler with an error answer."""

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after_s = status, message, code, param, retry_after_s


def make_app(facade: Facade, limits: sse.StreamLimits | None = None) -> web.Application:
    """The application over `facade`; serve it with `start_control`, or on any site in a test."""
    app = web.Application(middlewares=[errors_as_json], client_max_size=BODY_BYTES_MAX)
    app[FACADE] = facade
    readers = app[READERS] = sse.Readers(limits or sse.StreamLimits())
    app[CHANGES] = Changes(facade, readers.limits.changes_s)
    app.on_shutdown.append(end_streams)
    # No HEAD: it would open a stream, or change a state, for nobody to see.
    app.router.add_get("/api/status", get_status, allow_head=False)
    app.router.add_get("/api/version", get_version, allow_head=False)
    app.router.add_get("/metrics", get_metrics, allow_head=False)
    app.router.add_get("/api/events", get_events, allow_head=False)
    app.router.add_get("/api/logs", get_own_logs, allow_head=False)
    app.router.add_get("/api/me", get_me, allow_head=False)
    app.router.add_get("/api/timeline", get_timeline, allow_head=False)
    app.router.add_get("/api/requests", get_requests, allow_head=False)
    app.router.add_delete("/api/requests/{id}", cancel_request)
    app.router.add_get("/api/advice", get_advice, allow_head=False)
    pages.add_pages(app.router, pages.read_pages())
    add_aliases(app.router)
    # The name may hold slashes; `s` because a decoded name may even hold a line end.  Longer routes first.
    for operation in Operation:
        app.router.add_post(f"/api/models/{{id:(?s:.+)}}/{operation.value}", operate)
    app.router.add_get("/api/models/{id:(?s:.+)}/logs", get_model_logs, allow_head=False)
    app.router.add_get("/api/models/{id:(?s:.+)}/why", get_why, allow_head=False)
    app.router.add_get("/api/models/{id:(?s:.+)}", get_model, allow_head=False)
    return app


def add_aliases(router: web.UrlDispatcher) -> None:
    """llama-swap's routes, so that its tools and scripts keep working."""
    router.add_get("/running", get_running, allow_head=False)
    # A GET that changes state: kept because scripts call it; the data plane refuses it from other origins.
    router.add_get("/unload", unload_all, allow_head=False)
    router.add_post("/unload", unload_all)
    router.add_post("/api/models/unload", unload_all)
    router.add_post("/api/models/unload/{id:(?s:.+)}", unload_one)
    router.add_get("/logs", get_own_logs, allow_head=False)
    router.add_get("/logs/stream", stream_all_logs, allow_head=False)
    router.add_get("/logs/stream/proxy", stream_own_logs, allow_head=False)
    router.add_get("/logs/stream/upstream", stream_engine_logs, allow_head=False)
    router.add_get("/logs/stream/{id:(?s:.+)}", stream_model_logs, allow_head=False)


async def start_control(app: web.Application, socket_path: str | os.PathLike[str]) -> web.AppRunner:
    """Serve `app` on a Unix socket only this user can reach; `await runner.cleanup()` ends it and removes the socket.

    Raises OSError with one sentence when the path cannot be used.
    """
    path = Path(socket_path)
    prepare_folder(path.parent)
    listener = bind_private(path)

    async def remove_socket(_: web.Application) -> None:
        remove(path)

    app.on_cleanup.append(remove_socket)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S_MAX)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner


def prepare_folder(folder: Path) -> None:
    """Make sure of a folder that only this user may enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}; the control socket needs a folder of our own. Give another --state-dir"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is open to other users; the control socket needs mode 0700. Run: chmod 700 {folder}")


def bind_private(path: Path) -> socket.socket:
    """A listening socket with mode 0600 from its first moment; a stale one of an earlier run is replaced."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise OSError(f"{path} is too long for a Unix socket ({SOCKET_PATH_BYTES_MAX} bytes at most). Give a shorter --state-dir")
    if path.exists() and is_answered(path):
        raise OSError(f"another greenroom already answers at {path}. Stop it, or give this one its own --state-dir")
    remove(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(mask)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


# --------------------------------------------------------------------------------------------------------------- errors


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return error_response(refused.status, refused.message, refused.code, refused.param, refused.retry_after_s)
    except web.HTTPException as http:
        return http_error(request, http)
    except Exception:  # an edge: whatever breaks inside, the client gets JSON and the log gets the story
        log.exception("%s %r failed", request.method, request.path)
        return error_response(500, "greenroom failed to answer this; its log has the details. Please report it", "internal_error")


def http_error(request: web.Request, http: web.HTTPException) -> web.StreamResponse:
    if http.status < 400:
        raise http
    if isinstance(http, web.HTTPMethodNotAllowed):
        if said := no_operation(request):
            return error_response(404, said, "operation_not_found")
        allowed = ", ".join(sorted(http.allowed_methods))
        response = error_response(405, f"{request.method} is not possible here; use {allowed}", "method_not_allowed")
        response.headers["Allow"] = allowed
        return response
    if http.status == 404:
        return error_response(404, no_route(request), "not_found")
    return error_response(http.status, http.reason)


def no_operation(request: web.Request) -> str:
    """What is wrong with a POST that names a model of ours, and then nothing that can be done to it; "" = that is not it."""
    facade, text = request.app[FACADE], request.path.removeprefix(MODELS_PATH)
    name, _, word = text.rpartition("/")
    is_such = request.method == "POST" and text != request.path and word not in LOOKS
    if not is_such or facade.resolve(text) is not None or facade.resolve(name) is None:
        return ""
    return f"{word!r} is no operation of a model: these are {', '.join(OPERATIONS)}"


def no_route(request: web.Request) -> str:
    return f"there is no route {request.method} {request.path!r}"


def error_response(
    status: int, message: str, code: str = "", param: str | None = None, retry_after_s: float | None = None
) -> web.StreamResponse:
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return web.json_response(render.error(status, message, code, param), status=status, headers=headers)


# ---------------------------------------------------------------------------------------------------------- the request


def wanted_model(request: web.Request) -> str:
    """The id of the model that the path names; 404 otherwise, with the peers that serve it or with near names."""
    name = request.match_info["id"]
    facade = request.app[FACADE]
    if (id := facade.resolve(name)) is not None:
        return id
    if there := at_peers(facade.peers_status(), name):
        raise Refused(404, f"{name!r} is served by {there}, and not here: ask there", "model_at_peer", "model")
    near = [repr(one) for one in facade.near(name)]
    hint = f"did you mean {' or '.join(near)}?" if near else "`greenroom ps` lists the models"
    raise Refused(404, f"there is no model {name!r}: {hint}", "model_not_found", "model")


def at_peers(peers: Sequence[dict[str, Any]], name: str) -> str:
    """`the peer big (http://10.0.0.5:8080, up)`; "" where no peer has it, by its name or as `big/NAME`."""
    found = [peer for peer in peers if name in peer["models"] or name.removeprefix(f"{peer['id']}/") in peer["models"]]
    told = [f"{peer['id']} ({peer['proxy']}, {'up' if peer['healthy'] else 'down'})" for peer in found]
    return f"the peer{'s' if len(told) > 1 else ''} {' and '.join(told)}" if told else ""


def flag(request: web.Request, name: str) -> bool:
    """`?name`, `?name=1`, `?name=true`; absent or `0`, `false` is no."""
    value = request.query.get(name, "0").lower()
    if value in ("", "1", "true", "yes"):
        return True
    if value in ("0", "false", "no"):
        return False
    raise Refused(400, f"{name}={value!r} is neither yes nor no; write {name}=1 or leave it out", "bad_parameter", name)


def number(request: web.Request, name: str, default: float, most: float) -> float:
    """A number from 0 up; more than `most` counts as `most`."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise Refused(400, f"{name}={text!r} is not a number from 0 to {most:g}", "bad_parameter", name)
    return min(value, most)


def sleep_level(request: web.Request) -> int | None:
    match request.query.get("level"):
        case None:
            return None
        case "1" | "2" as level:
            return int(level)
        case other:
            raise Refused(
                400,
                f"level={other!r} is not a sleep level; it is 1 (weights in host memory) or 2 (weights dropped)",
                "bad_parameter",
                "level",
            )


# ----------------------------------------------------------------------------------------------------------------- state


async def get_status(request: web.Request) -> web.StreamResponse:
    return state_response(render.status(request.app[FACADE]))


async def get_metrics(request: web.Request) -> web.StreamResponse:
    text = await request.app[FACADE].metrics(engines=flag(request, "engines"))
    return web.Response(body=text.encode("utf-8", "replace"), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})


async def get_version(request: web.Request) -> web.StreamResponse:
    return state_response({"version": request.app[FACADE].version, "name": "greenroom"})


async def get_model(request: web.Request) -> web.StreamResponse:
    facade, name = request.app[FACADE], request.match_info["id"]
    model, _, word = name.rpartition("/")
    if word in OPERATIONS and facade.resolve(name) is None and facade.resolve(model) is not None:
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    id = wanted_model(request)
    history = await facade.history(id)
    entry = render.one_model(facade.view(), id, facade)
    if entry is None:
        raise Refused(404, f"the model {id!r} has just been removed from the configuration", "model_not_found", "model")
    return state_response({**entry, "start_count": entry["starts"], **history})


async def get_why(request: web.Request) -> web.StreamResponse:
    id = wanted_model(request)
    facade = request.app[FACADE]
    return state_response(render.why(id, view_of(facade, id), facade))


async def get_me(request: web.Request) -> web.StreamResponse:
    headers = request.headers
    return state_response(render.me(unquote(headers.get(KEY_NAME_HEADER, "")), headers.get(SCOPES_HEADER)))


async def get_timeline(request: web.Request) -> web.StreamResponse:
    return state_response(await request.app[FACADE].timeline(max(1.0, number(request, "minutes", MINUTES_DEFAULT, MINUTES_MAX))))


async def get_advice(request: web.Request) -> web.StreamResponse:
    return state_response(request.app[FACADE].advice())


async def get_requests(request: web.Request) -> web.StreamResponse:
    """Those that wait or run, then those that ended, newest first; `cursor` of the answer asks for older ones."""
    query, facade = request.query, request.app[FACADE]
    model, outcome, cursor = query.get("model"), query.get("outcome"), query.get("cursor", "")
    if outcome is not None and outcome not in OUTCOMES:
        raise Refused(400, f"outcome={outcome!r} is none of {', '.join(OUTCOMES)}", "bad_parameter", "outcome")
    try:
        found = await facade.requests(
            since=number(request, "since", 0.0, 1e18) if "since" in query else None,
            model=None if model is None else facade.resolve(model) or model,  # one that was removed is still in the ledger
            outcome=outcome,
            waited_over_s=number(request, "waited_over", 0.0, 1e9) if "waited_over" in query else None,
            cursor=cursor,
            limit=max(1, int(number(request, "limit", REQUESTS_DEFAULT, REQUESTS_MAX))),
        )
    except ValueError:
        raise Refused(400, f"cursor={cursor!r} was given by no answer", "bad_parameter", "cursor") from None
    return state_response(found)


async def cancel_request(request: web.Request) -> web.StreamResponse:
    """200: it was waiting or running, and its client has been told."""
    id = request.match_info["id"]
    if not (id.isascii() and id.isdigit() and len(id) <= REQUEST_DIGITS_MAX):
        raise Refused(400, f"{id!r} is not the number of a request", "bad_parameter", "id")
    result = request.app[FACADE].cancel(int(id))
    if result.status >= 400:
        raise Refused(result.status, result.message, result.code, "id", result.retry_after_s)
    return state_response({"id": int(id), "cancelled": True, "message": result.message})


async def get_running(request: web.Request) -> web.StreamResponse:
    return state_response(render.running(request.app[FACADE]))


def state_response(value: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(value, headers={"Cache-Control": "no-store"})


def view_of(facade: Facade, id: str) -> ModelView | None:
    return next((one for one in facade.view().models if one.id == id), None)


def state_of(facade: Facade, id: str) -> str:
    view = view_of(facade, id)
    return view.state.value if view is not None else State.STOPPED.value


# ------------------------------------------------------------------------------------------------------------ operations


async def operate(request: web.Request) -> web.StreamResponse:
    """POST /api/models/{id}/{operation}: 200 done, 202 under way (see `status_url`), or why not."""
    operation = Operation(request.path.rpartition("/")[2])
    id = wanted_model(request)
    wait_s = number(request, "wait", WAIT_S_DEFAULT[operation], WAIT_S_MAX)
    result = await request.app[FACADE].operate(id, operation, force=flag(request, "force"), level=sleep_level(request), wait_s=wait_s)
    return operated_response(request.app[FACADE], id, operation, result)


async def unload_one(request: web.Request) -> web.StreamResponse:
    id = wanted_model(request)
    result = await unload(request.app[FACADE], id, flag(request, "force"))
    return operated_response(request.app[FACADE], id, Operation.UNLOAD, result)


async def unload_all(request: web.Request) -> web.StreamResponse:
    """Every model that holds anything; all at once, so that one that is slow to go keeps nobody."""
    facade = request.app[FACADE]
    force = flag(request, "force")
    ids = [one.id for one in facade.view().models if one.state not in (State.STOPPED, State.FAILED)]
    results = await asyncio.gather(*(unload(facade, id, force) for id in ids))
    models = [{"model": id, "status": result.status, "message": result.message} for id, result in zip(ids, results, strict=True)]
    refused = [f"{id}: {result.message}" for id, result in zip(ids, results, strict=True) if result.status >= 400]
    if refused:
        raise Refused(409, f"{len(refused)} of {len(ids)} models stay: {'; '.join(refused)}", "not_unloaded")
    return web.json_response({"msg": "ok", "models": models})


async def unload(facade: Facade, id: str, force: bool) -> Result:
    return await facade.operate(id, Operation.UNLOAD, force=force, level=None, wait_s=UNLOAD_ALL_WAIT_S)


def operated_response(facade: Facade, id: str, operation: Operation, result: Result) -> web.StreamResponse:
    if result.status >= 400:
        raise Refused(result.status, result.message, result.code, "model", result.retry_after_s)
    headers = {"Location": render.model_path(id)} if result.status == 202 else {}
    return web.json_response(render.operated(id, operation, result, state_of(facade, id)), status=result.status, headers=headers)


# --------------------------------------------------------------------------------------------------------------- streams


async def end_streams(app: web.Application) -> None:
    app[READERS].close_all()


def free_readers(request: web.Request) -> sse.Readers:
    readers = request.app[READERS]
    if readers.is_full:
        raise Refused(503, f"{len(readers)} streams are open already, which is the most; close one", "too_many_streams", None, 5)
    return readers


async def get_events(request: web.Request) -> web.StreamResponse:
    """Server-sent events from now on (and what a `Last-Event-ID` missed), after a snapshot of the state and with its changes.

    `?state=0` leaves the state out; `?follow=0` gives the recent events as JSON.
    """
    facade = request.app[FACADE]
    limit = int(number(request, "limit", EVENTS_DEFAULT, EVENTS_MAX))
    if "follow" in request.query and not flag(request, "follow"):
        return state_response({"events": list(facade.recent(limit)) if limit else []})
    readers = free_readers(request)
    news = News(facade, request.headers.get("Last-Event-ID", ""), limit if "limit" in request.query else 0)
    opening = f"retry: {readers.limits.retry_ms}\n: events of greenroom\n\n".encode()
    changes = request.app[CHANGES] if "state" not in request.query or flag(request, "state") else None
    sources: list[AsyncIterator[dict[str, Any] | bytes]] = [facade.events()]
    if changes is not None:
        sources.append(changes.follow())
    return await readers.stream(
        request,
        sources,
        news.encode,
        headers=sse.SSE_HEADERS,
        opening=lambda: opening + news.missed() + (changes.snapshot() if changes is not None else b""),
        dropped_note=sse.events_dropped,
        heartbeat=sse.HEARTBEAT,
        renewed=changes.snapshot if changes is not None else bytes,
    )


class News:
    """Sends what a reader missed and then what is new, each event once."""

    def __init__(self, facade: Facade, last_id: str, limit: int) -> None:
        self._facade = facade
        self._limit = limit
        self._last = int(last_id) if last_id.isascii() and last_id.isdigit() and len(last_id) < 19 else None
        self._early: set[int] = set()  # came between the subscription and the look at the past
        self._sent: set[int] = set()
        self._opened = False

    def missed(self) -> bytes:
        self._opened = True
        if self._last is None and not self._limit:
            return b""
        past = [one for one in self._facade.recent(self._limit or EVENTS_DEFAULT) if one.get("id") not in self._early]
        if self._last is not None:
            past = [one for one in past if one.get("id", 0) > self._last]
        self._sent = {one["id"] for one in past if "id" in one}
        return b"".join(map(sse.event, past))

    def encode(self, event: dict[str, Any] | bytes) -> bytes:
        if isinstance(event, bytes):  # of the state, written once for all readers
            return event
        id = event.get("id")
        if id in self._sent:
            return b""
        if not self._opened and isinstance(id, int):
            self._early.add(id)
        return sse.event(event)


async def get_own_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, [""], follow=flag(request, "follow"))


async def get_model_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, [wanted_model(request)], follow=flag(request, "follow"))


async def stream_own_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, [""], follow=True)


async def stream_model_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, [wanted_model(request)], follow=True)


async def stream_engine_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, [one.id for one in request.app[FACADE].view().models], follow=True)


async def stream_all_logs(request: web.Request) -> web.StreamResponse:
    return await logs_response(request, ["", *(one.id for one in request.app[FACADE].view().models)], follow=True)


async def logs_response(request: web.Request, models: list[str], *, follow: bool) -> web.StreamResponse:
    """Text, one line each; followed as chunked text, or as server-sent events for a client that accepts those."""
    facade = request.app[FACADE]
    lines = 0 if "no-history" in request.query else int(number(request, "lines", LOG_LINES_DEFAULT, LOG_LINES_MAX))
    lines = min(lines, max(1, LOG_LINES_MAX // max(1, len(models))))  # of all together

    def tail() -> list[str]:
        return [line for one in models for line in facade.log_tail(one, lines)] if lines else []

    if not follow:
        return web.Response(body=b"".join(map(sse.log_text, tail())), headers=sse.TEXT_HEADERS)
    readers = free_readers(request)
    as_events = "text/event-stream" in request.headers.get("Accept", "")
    encode = sse.log_event if as_events else sse.log_text
    return await readers.stream(
        request,
        [facade.log_follow(one) for one in models],
        encode,
        headers=sse.SSE_HEADERS if as_events else sse.TEXT_HEADERS,
        opening=lambda: (f"retry: {readers.limits.retry_ms}\n\n".encode() if as_events else b"") + b"".join(map(encode, tail())),
        dropped_note=sse.log_events_dropped if as_events else sse.log_text_dropped,
        heartbeat=sse.HEARTBEAT if as_events else b"",
    )
