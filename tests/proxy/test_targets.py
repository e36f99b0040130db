"""Which request goes where, told from its method and raw target."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote, urljoin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from greenroom.proxy.admission import Catalog, ModelRoute
from greenroom.proxy.targets import CACHED_TARGETS_MAX, RERANK_PATHS, Kind, route, with_model

ODD_NAMES = ("plain", "org/name:tag", "Fam3.5-27B:UD-IQ3_XXS", "modèle 7b", "a+b")


def a_catalog(*names: str, ignore: tuple[str, ...] = ()) -> Catalog:
    models = {name: ModelRoute(name) for name in names}
    return Catalog(models=models, names={name: name for name in names}, upstream_ignore_paths=ignore)


ODD = a_catalog(*ODD_NAMES)
MINE = a_catalog("m", "a", "a/b", "a/b/c", ignore=(r"\.(js|json|css|png|ico|txt)$",))

_INFERENCE_POSTS = """
/v1/chat/completions /v1/completions /v1/responses /v1/embeddings /v1/rerank /v1/reranking /v1/score /v1/audio/speech
/v1/audio/transcriptions /v1/audio/translations /v1/audio/voices /v1/images/generations /v1/images/edits /v1/images/variations
/v1/messages /v1/messages/count_tokens /v1/moderations /v1/pooling /v1/classify /v2/rerank /v2/embed /rerank /reranking /score
/pooling /classify /infill /completion /completions /chat/completions /embedding /embeddings /embed /embed_all /embed_sparse
/predict /similarity /tokenize /detokenize /apply-template /sdapi/v1/txt2img /sdapi/v1/img2img /inference
/v1/responses/resp_1/cancel /v1/audio/something-new
"""
INFERENCE_POSTS = _INFERENCE_POSTS.split()


@pytest.mark.parametrize("path", INFERENCE_POSTS)
def test_an_inference_path_is_forwarded_as_it_came(path: str) -> None:
    """Every known inference path is INFERENCE under POST, its raw bytes kept, its model to be found in the body."""
    target = path.encode() + b"?x=a%2Fb&empty=&x=2"

    found = route(b"POST", target, MINE)

    assert (found.kind, found.path, found.name, found.needs_model, found.error) == (Kind.INFERENCE, target, None, True, None)
    assert found.rerank == (path.encode() in RERANK_PATHS)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (b"/v/chat/completions", b"/chat/completions"),
        (b"/v/messages/count_tokens?x=1", b"/messages/count_tokens?x=1"),
        (b"/v/rerank", b"/rerank"),
        (b"/audioapi/v1/tasks/run", b"/v1/tasks/run"),
    ],
)
def test_prefixes_for_engines_without_v1_are_stripped(asked: bytes, sent: bytes) -> None:
    """/v/... is sent on without /v, /audioapi/... without /audioapi."""
    assert (route(b"POST", asked, MINE).kind, route(b"POST", asked, MINE).path) == (Kind.INFERENCE, sent)


@pytest.mark.parametrize(
    ("method", "target", "kind", "name"),
    [
        (b"GET", b"/v1/models", Kind.MODELS, None),
        (b"HEAD", b"/models?x", Kind.MODELS, None),
        (b"GET", b"/v1/models/a%2Fb", Kind.MODELS, "a/b"),
        (b"GET", b"/v1/models/a/b", Kind.MODELS, "a/b"),
        (b"GET", b"/models/nobody", Kind.MODELS, "nobody"),
        (b"GET", b"/health", Kind.HEALTH, None),
        (b"GET", b"/wol-health", Kind.HEALTH, None),
        (b"GET", b"/ready", Kind.READY, None),
        (b"GET", b"/metrics", Kind.CONTROL, None),
        (b"GET", b"/running", Kind.CONTROL, None),
        (b"GET", b"/logs", Kind.CONTROL, None),
        (b"GET", b"/logs/stream/m", Kind.CONTROL, None),
        (b"GET", b"/unload", Kind.CONTROL, None),
        (b"POST", b"/api/models/m/sleep", Kind.CONTROL, None),
        (b"POST", b"/api/models/org%2Fname:tag/unload", Kind.CONTROL, None),
        (b"GET", b"/api/status", Kind.CONTROL, None),
        (b"GET", b"/ui/", Kind.CONTROL, None),
        (b"GET", b"/", Kind.CONTROL, None),
        (b"GET", b"/props?model=m", Kind.INFERENCE, "m"),
        (b"GET", b"/v1/realtime?model=m", Kind.INFERENCE, "m"),
        (b"GET", b"/v1/audio/voices?model=a%2Fb", Kind.INFERENCE, "a/b"),
        (b"OPTIONS", b"/v1/chat/completions", Kind.PREFLIGHT, None),
        (b"OPTIONS", b"/v1/models", Kind.PREFLIGHT, None),
        (b"OPTIONS", b"/api/models/m/unload", Kind.PREFLIGHT, None),
        (b"OPTIONS", b"/upstream/m/x", Kind.UPSTREAM, "m"),
    ],
)
def test_each_own_path_has_its_kind(method: bytes, target: bytes, kind: Kind, name: str | None) -> None:
    """The paths of design.md section 5 and llama-swap's aliases."""
    found = route(method, target, MINE)

    assert (found.kind, found.name, found.error) == (kind, name, None)


def test_what_changes_state_or_belongs_to_the_control_plane_says_so() -> None:
    """`changes` marks state-changing control routes, llama-swap's GET /unload too; `control` also their preflights."""
    assert [route(method, target, MINE).changes for method, target in ((b"GET", b"/unload"), (b"POST", b"/api/models/m/load"))] == [
        True,
        True,
    ]
    assert not route(b"GET", b"/api/status", MINE).changes
    assert route(b"OPTIONS", b"/api/status", MINE).control
    assert not route(b"OPTIONS", b"/v1/chat/completions", MINE).control


@pytest.mark.parametrize("prefix", ["", "/gr", "/a/b"])
@pytest.mark.parametrize("target", [b"/", b"/ui", b"/upstream", b"/upstream/"])
def test_the_front_door_leads_to_the_ui(target: bytes, prefix: str) -> None:
    """The root and bare /upstream send people to the UI instead of starting something; also behind a proxy with a prefix."""
    found = route(b"GET", target, MINE)
    assert found.kind is Kind.CONTROL
    assert found.redirect is not None
    assert urljoin(f"http://h{prefix}{target.decode()}", found.redirect.decode()) == f"http://h{prefix}/ui/"


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        (b"GET", b"/v1/chat/completions", b"POST, OPTIONS"),
        (b"DELETE", b"/v1/models", b"GET, HEAD, OPTIONS"),
        (b"POST", b"/health", b"GET, HEAD, OPTIONS"),
        (b"POST", b"/v1/models/m", b"GET, HEAD, OPTIONS"),
        (b"PATCH", b"/v1/responses/x", b"GET, HEAD, POST, DELETE, OPTIONS"),
    ],
)
def test_a_known_path_with_a_wrong_method_is_405_and_says_which(method: bytes, target: bytes, allow: bytes) -> None:
    """405 names the methods that work."""
    found = route(method, target, MINE)

    assert (found.kind, found.allow) == (Kind.METHOD_NOT_ALLOWED, allow)
    assert found.error is not None
    assert found.error.status == 405


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (b"/v1/chat/completion", "did you mean /v1/chat/completions?"),
        (b"/v1//chat/completions", "did you mean /v1/chat/completions?"),
        (b"//v1/models", "did you mean /v1/models?"),
        (b"/V1/Models", "did you mean /v1/models?"),
        (b"/nothing/like/it", "under /upstream/MODEL/"),
    ],
)
def test_an_unknown_path_is_404_with_a_hint(target: bytes, hint: str) -> None:
    """404 names the path that was probably meant."""
    found = route(b"GET", target, MINE)

    assert (found.kind, found.error and found.error.status) == (Kind.NOT_FOUND, 404)
    assert found.error is not None
    assert hint in found.error.message


# -------------------------------------------------------------------------------------------------------- odd names, B12

RAW_TAILS = (
    b"/files/dir%2Fitem.json",
    b"/x%20y",
    b"/q?m=a%2Fb&m=2&empty=",
    b"/caf%C3%A9",
    b"/..%2f..%2fetc/passwd",
    b"//double",
    b"/",
    b"/a;b=c/d?e#",
)


@pytest.mark.parametrize("tail", RAW_TAILS)
@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST"])
def test_upstream_keeps_the_raw_target_of_every_odd_name(name: str, tail: bytes, method: bytes) -> None:
    """B12: after /upstream/{name} every byte is forwarded as it came, for every name, escaped in full or in part."""
    spellings = {quote(name, safe="").encode(), quote(name, safe="/:+").encode()}

    for spelled in spellings:
        found = route(method, b"/upstream/" + spelled + tail, ODD)
        assert (found.kind, found.name, found.path, found.error) == (Kind.UPSTREAM, name, tail, None)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_read_from_query_and_model_path(name: str) -> None:
    """B12: `?model=` (both ways of writing a blank) and /v1/models/{name} give back the name."""
    for spelled in (quote(name, safe=""), quote(name, safe="/:").replace("%20", "+")):
        assert route(b"POST", f"/v1/chat/completions?a=1&model={spelled}&b".encode(), ODD).name == name
    assert route(b"GET", f"/v1/models/{quote(name, safe='')}".encode(), ODD).name == name
    assert route(b"GET", f"/v1/models/{quote(name, safe='/+')}".encode(), ODD).name == name


def test_a_bare_plus_is_itself_only_where_a_model_is_called_so() -> None:
    """`?model=a+b` means `a+b` when that is a model's name, `a b` when that is."""
    assert route(b"POST", b"/v1/completions?model=a+b", a_catalog("a+b")).name == "a+b"
    assert route(b"POST", b"/v1/completions?model=a+b", a_catalog("a b", "a+b")).name == "a b"


@pytest.mark.parametrize(
    ("target", "name", "path"),
    [
        (b"/upstream/a/x", "a", b"/x"),
        (b"/upstream/a/b/x", "a/b", b"/x"),
        (b"/upstream/a%2Fb/x", "a/b", b"/x"),
        (b"/upstream/a/b/c/x/y", "a/b/c", b"/x/y"),
        (b"/upstream/a%2fb/c/x", "a/b/c", b"/x"),
        (b"/upstream/a/b%2Fc/x", "a/b/c", b"/x"),
        (b"/upstream/a/bc/x", "a", b"/bc/x"),
        (b"/upstream/a//b/c", "a", b"//b/c"),
    ],
)
def test_the_longest_model_name_wins(target: bytes, name: str, path: bytes) -> None:
    """Names may hold slashes, escaped or not; the longest run of segments that is a name is taken."""
    assert (route(b"GET", target, MINE).name, route(b"GET", target, MINE).path) == (name, path)


@pytest.mark.parametrize(
    ("target", "redirect"),
    [
        (b"/upstream/a", b"/upstream/a/"),
        (b"/upstream/a%2Fb", b"/upstream/a%2Fb/"),
        (b"/upstream/a/b?x=1", b"/upstream/a/b/?x=1"),
    ],
)
def test_a_bare_model_redirects_to_its_slash(target: bytes, redirect: bytes) -> None:
    """So that an engine's relative links work."""
    found = route(b"GET", target, MINE)
    assert found.error is None
    assert found.redirect is not None
    for prefix in ("", "/gr"):
        assert urljoin(f"http://h{prefix}{target.decode()}", found.redirect.decode()) == f"http://h{prefix}{redirect.decode()}"


def test_an_unknown_upstream_model_is_404_with_near_names() -> None:
    """A miss in the path says what it may have been."""
    found = route(b"GET", b"/upstream/plian/x", ODD)

    assert found.error is not None
    assert (found.error.status, found.error.code, "did you mean plain?" in found.error.message) == (404, "model_not_found", True)


@pytest.mark.parametrize(
    ("method", "target", "may_start"),
    [
        (b"GET", b"/upstream/m/sw.js", False),
        (b"HEAD", b"/upstream/m/deep/favicon.ico?v=1", False),
        (b"GET", b"/upstream/m/page%2Ejs", False),
        (b"GET", b"/upstream/m/", True),
        (b"POST", b"/upstream/m/upload.json", True),
        (b"GET", b"/props?model=m", True),
        (b"GET", b"/props?autoload=false&model=m", False),
    ],
)
def test_page_assets_do_not_start_a_model(method: bytes, target: bytes, may_start: bool) -> None:
    """B46: fetching an asset (by the configured patterns) of a model that is not loaded is no reason to load it."""
    assert route(method, target, MINE).may_start is may_start


# ---------------------------------------------------------------------------------------------------- control of engines


@pytest.mark.parametrize("word", ["sleep", "wake_up", "collective_rpc", "flush_cache", "models/load", "shutdown", "is_sleeping"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"])
def test_control_words_are_refused_by_every_method(word: str, method: bytes) -> None:
    """Not only POST: some engines take GET as well, and an answer tells what is there."""
    for target in (f"/{word}", f"/upstream/m/{word}", f"/upstream/m/{word}?level=2"):
        found = route(method, target.encode(), MINE)
        assert found.error is not None, target
        assert (found.error.status, found.error.code) == (403, "engine_control"), target


def test_what_only_reads_an_engine_is_let_through() -> None:
    """GET of slots, properties, adapters and the model list is harmless; writing them is not."""
    for path in (b"/slots", b"/slots/0", b"/props", b"/lora-adapters", b"/models", b"/v1/models", b"/metrics", b"/health", b"/load"):
        assert route(b"GET", b"/upstream/m" + path, MINE).error is None
    for path in (b"/v1/chat/completions", b"/asleep", b"/sleepy", b"/paused", b"/api/prompt", b"/slot", b"/sleep.html/x"):
        assert route(b"POST", b"/upstream/m" + path, MINE).error is None


def test_what_is_encoded_without_end_is_refused() -> None:
    """Nobody wraps a path nine times for a good reason."""
    found = route(b"GET", b"/upstream/m/x%" + b"25" * 20 + b"41", MINE)

    assert found.error is not None
    assert found.error.status == 403


def test_a_long_odd_path_is_refused_unread_and_a_long_plain_one_is_not() -> None:
    """What takes long to look through is no path of an engine; a long query is nothing to it."""
    odd = route(b"GET", b"/upstream/m/" + b"a%20" * 2000, MINE)

    assert odd.error is not None
    assert odd.error.status == 403
    assert route(b"GET", b"/upstream/m/" + b"a" * 8000, MINE).error is None
    assert route(b"GET", b"/upstream/m/a%20b?" + b"a%20" * 2000, MINE).error is None


def test_a_model_called_like_a_control_route_can_be_listed_and_operated() -> None:
    """Names are free: looking up a model called `sleep`, or operating it, is none of the engine's routes."""
    catalog = a_catalog("sleep", "load")

    assert route(b"GET", b"/v1/models/sleep", catalog).kind is Kind.MODELS
    assert route(b"GET", b"/models/load", catalog).kind is Kind.MODELS
    assert route(b"POST", b"/api/models/sleep/sleep", catalog).kind is Kind.CONTROL
    assert route(b"GET", b"/upstream/sleep/v1/models", catalog).error is None


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/../api/status",
        b"/v1/%2e%2e/api/status",
        b"/v1/..%2fapi/status",
        b"/v1/models/../../api/status",
        b"/v1/models/..%2f..%2fapi%2fstatus",
        b"/v1/audio/../../api/models/m/unload",
        b"/v1/images/..%5c..%5capi",
        b"/api/../v1/chat/completions",
        b"/api/%2e%2e/upstream/m/x",
        b"/api/x%252f..%252f..",
        b"/ui/..%2f..%2fetc/passwd",
        b"/ui/..;/x",
        b"/ui/\\..\\x",
        b"/ui/x%00.html",
        b"/logs/./stream",
        b"/./v1/models",
        b"/health/../ready",
    ],
)
def test_dot_segments_never_lead_to_another_route(target: bytes) -> None:
    """B12: a path that somebody may read as another one is nobody's."""
    found = route(b"GET", target, MINE)

    assert found.kind is Kind.NOT_FOUND
    assert found.error is not None
    assert found.error.status in {403, 404}


@pytest.mark.parametrize("target", [b"/upstream/m/../../api/status", b"/upstream/m/..%2f..%2fapi/status", b"/upstream/a/../m/x"])
def test_dot_segments_below_upstream_stay_with_that_model(target: bytes) -> None:
    """They are the engine's own business, byte for byte; the supervisor resolves none of them."""
    found = route(b"GET", target, MINE)

    assert (found.kind, found.error) == (Kind.UPSTREAM, None)
    assert target.endswith(found.path)
    assert found.name == ("a" if b"/a/" in target else "m")


# ------------------------------------------------------------------------------------------------------------- soundness

# fmt: off
_PIECES = st.sampled_from([
    b"/", b"//", b"..", b".", b"%2e", b"%2F", b"%25", b"%5c", b"\\", b";", b"?", b"#", b"%00", b"%u0073", b"m", b"a", b"b", b"upstream",
    b"api", b"sleep", b"Sleep", b"%73leep", b"v1", b"models", b"load", b"slots", b"0", b"chat/completions", b"%zz", b"%", b"\xff",
    b"%c0%af", b"=", b"&",
])
# fmt: on


@given(st.sampled_from([b"GET", b"POST", b"OPTIONS", b"DELETE"]), st.lists(_PIECES, max_size=12).map(b"".join))
@example(b"POST", b"/upstream/m/%")
def test_any_target_gets_one_sound_route(method: bytes, rest: bytes) -> None:
    """Nothing raises; what is forwarded is a part of what came; an engine is reached only through a known door."""
    target = b"/" + rest

    found = route(method, target, MINE)

    assert target.endswith(found.path) or found.redirect is not None
    if found.error is None and found.kind is Kind.UPSTREAM:
        assert target.startswith(b"/upstream/")
        last = found.path.partition(b"?")[0].rstrip(b"/").rpartition(b"/")[2].lower()
        assert last not in {b"sleep", b"%73leep"}
    if found.error is None and found.kind is Kind.CONTROL:
        assert b".." not in found.path.partition(b"?")[0]


def test_a_new_catalog_is_seen_at_once_and_the_memory_of_targets_is_bounded() -> None:
    """A reload changes the answer for a target seen before; 10,000 different targets are not all remembered."""
    before = a_catalog("m")
    after = replace(before, models={}, names={})
    assert route(b"GET", b"/upstream/m/x", before).error is None
    assert route(b"GET", b"/upstream/m/x", after).error is not None

    for number in range(2 * CACHED_TARGETS_MAX):
        assert route(b"GET", b"/upstream/m/%d" % number, before).path == b"/%d" % number

    from greenroom.proxy import targets

    assert len(targets._memo.routes) <= CACHED_TARGETS_MAX


def test_what_a_query_holds_steers_no_engine() -> None:
    """A raw `?` ends the path for everybody; an encoded one may not."""
    catalog = a_catalog("m")

    assert route(b"GET", b"/upstream/m/view?next=/sleep", catalog).error is None
    assert route(b"POST", b"/upstream/m/save?file=/a/models", catalog).error is None
    assert route(b"POST", b"/upstream/m/sleep?level=1", catalog).error is not None
    assert route(b"POST", b"/upstream/m/sleep%3Flevel=1", catalog).error is not None
    assert route(b"POST", b"/upstream/m/x%3F/../sleep", catalog).error is not None


# --------------------------------------------------------------------------------------------------- models of peers

FAR = Catalog(
    models={"m": ModelRoute("m"), **{name: ModelRoute(name, is_remote=True, may_travel=True) for name in ("far", "p/far", "b/c")}},
    names={name: name for name in ("m", "far", "p/far", "b/c")},
)


@pytest.mark.parametrize("name", ["far", "p/far"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/rerank", "/v1/audio/transcriptions", "/v1/responses/r1/cancel"])
def test_an_inference_path_of_a_peers_model_is_no_raw_route(name: str, path: str) -> None:
    """Its body is read as at the path itself, and the model is settled."""
    found = route(b"POST", f"/upstream/{name}{path}?x=1".encode(), FAR)

    assert (found.kind, found.path, found.name, found.is_settled, found.error) == (Kind.INFERENCE, f"{path}?x=1".encode(), name, True, None)
    assert found.rerank == (path == "/v1/rerank")
    assert route(b"POST", path.encode(), FAR).is_settled is False


def test_a_model_of_this_machine_is_reached_raw() -> None:
    """Its engine is its own, whatever a body says."""
    found = route(b"POST", b"/upstream/m/v1/chat/completions?model=far", FAR)

    assert (found.kind, found.path, found.name) == (Kind.UPSTREAM, b"/v1/chat/completions?model=far", "m")


@pytest.mark.parametrize("query", ["model=m", "model=p/far", "x=1&model=nobody"])
def test_path_and_query_may_not_name_two_models_of_a_peer(query: str) -> None:
    """Neither would be right."""
    error = route(b"GET", f"/upstream/far/v1/realtime?{query}".encode(), FAR).error

    assert error is not None
    assert (error.status, error.code) == (400, "two_models")
    assert route(b"GET", b"/upstream/far/v1/realtime?model=far", FAR).error is None


@pytest.mark.parametrize(
    ("target", "put", "inserted"),
    [
        (b"/x", b"/x", b"/x?model=n"),
        (b"/x?", b"/x?", b"/x?model=n"),
        (b"/x?a=model", b"/x?a=model", b"/x?a=model&model=n"),
        (b"/x?model=far&a=1", b"/x?model=n&a=1", b"/x?model=n&a=1"),
        (b"/x?model=far&%6dod%65l=other", b"/x?model=n&model=n", b"/x?model=n&model=n"),
        (b"/x?a=1;model=other&Model=other&+model", b"/x?a=1;model=n&model=n&model=n", b"/x?a=1;model=n&model=n&model=n"),
        (b"/x?model", b"/x?model=n", b"/x?model=n"),
        (b"/x?supermodel=far", b"/x?supermodel=far", b"/x?supermodel=far&model=n"),
    ],
)
def test_a_query_names_one_model_to_any_reader(target: bytes, put: bytes, inserted: bytes) -> None:
    """However a name is spelt, and wherever some readers separate pairs; all else keeps its bytes."""
    assert with_model(target, "n") == put
    assert with_model(target, "n", insert=True) == inserted
