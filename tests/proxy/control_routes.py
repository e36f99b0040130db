"""Every route by which an engine is steered, every way of writing it, and an engine that understands them all."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from urllib.parse import unquote_to_bytes

SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS"})

# vLLM 0.11 to 0.33, SGLang 0.5, the servers of SageMaker, gated launches: refused by every method.
_ANY_METHOD = """
sleep wake_up is_sleeping collective_rpc reset_prefix_cache reset_mm_cache reset_encoder_cache server_info pause resume is_paused
release_kv_cache_memory scale_elastic_ep is_scaling_elastic_ep abort_requests inference/v1/abort_requests weight_checker
get_world_size weight_info init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update
start_draft_weight_update finish_weight_update update_weights update_weight_version reload_weights load_lora_adapter
unload_lora_adapter v1/load_lora_adapter v1/unload_lora_adapter start_profile stop_profile fault_tolerance/apply
fault_tolerance/status

release_memory_occupation resume_memory_occupation pause_generation continue_generation flush_cache update_weights_from_disk
update_weights_from_tensor update_weights_from_tensor_checker update_weights_from_distributed update_weights_from_ipc
begin_weight_update end_weight_update init_weights_update_group destroy_weights_update_group
init_weights_send_group_for_remote_instance send_weights_to_remote_instance get_remote_instance_transfer_engine_info
remote_instance_transfer_engine_info get_transfer_engine_info register_transfer_engine_info get_weights_by_name
get_weights_checksum get_server_info set_internal_state get_internal_state open_session close_session abort_request freeze_gc
configure_logging set_trace_level slow_down pd_role_switch weights_checker start_expert_distribution_record
stop_expert_distribution_record dump_expert_distribution_record dumper/{} load_lora_adapter_from_tensors set_lora
merge_lora_weights unmerge_lora_weights add_external_corpus remove_external_corpus list_external_corpora
hicache/storage-backend hicache/storage-backend/clear get_hicache_l3_cache_layout clear_hicache_storage_backend
attach_hicache_storage_backend detach_hicache_storage_backend register_encoder_url unregister_encoder_url list_encoder_urls
scheduler_receive_url scheduler_receive_meta_data gate/activate

models/load models/unload cors-proxy

unload shutdown sdapi/v1/server-kill sdapi/v1/server-restart sdapi/v1/unload-checkpoint api/admin/reload_config
"""
# llama-server's and others' routes that also tell something when they are read.
_WRITING = "props slots/{} lora-adapters models adapters adapters/{} load sdapi/v1/options"

ANY_METHOD = tuple(_ANY_METHOD.split())
WRITING = tuple(_WRITING.split())
ROUTES = ANY_METHOD + WRITING
ASKED = tuple(route.replace("{}", "0").encode() for route in ROUTES)
_TEMPLATES = {tuple(route.split("/")): route for route in ROUTES}
_LONGEST = max(map(len, _TEMPLATES))

OVERRIDING_METHOD = ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "x_http_method_override", "X-HTTP_Method-Override")
OVERRIDING_PATH = (
    *("X-Original-URL", "X-Rewrite-URL", "X-Original-URI", "X-Forwarded-Uri", "X-Forwarded-Path", "X-Envoy-Original-Path"),
    *("X_Original_URL", "x-rewrite_url", "X-Path-Info", "X-WAWS-Unencoded-URL"),
)


# ----------------------------------------------------------------------------------------------- an engine that understands


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _unescape(path: bytes) -> bytes:
    return unquote_to_bytes(re.sub(rb"%u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)).encode("utf-8", "replace"), path))


def _take_overlong(path: bytes) -> bytes:
    def meant(found: re.Match[bytes]) -> bytes:
        bits = f"{found[0][0]:08b}".partition("0")[2] + "".join(f"{byte:08b}"[2:] for byte in found[0][1:])
        point = int(bits, 2)
        return bytes((point,)) if point < 0x80 else found[0]

    return re.sub(
        rb"[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3}|[\xf8-\xfb][\x80-\xbf]{4}|[\xfc\xfd][\x80-\xbf]{5}",
        meant,
        path,
    )


def _resolve(path: bytes, *, merge: bool) -> bytes:
    out: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            if out:
                out.pop()
        elif segment != b"." and (segment or not merge):
            out.append(segment)
    return b"/" + b"/".join(out).lstrip(b"/")


_STEPS: tuple[Callable[[bytes], bytes], ...] = (
    _unescape,
    _take_overlong,
    lambda path: _bytes(unicodedata.normalize("NFKC", _text(path))),
    lambda path: _bytes(_text(path).casefold()),
    lambda path: _bytes(_text(path).upper().lower()),
    lambda path: path.decode("ascii", "ignore").encode(),
    lambda path: _bytes(re.split(r"[\udc80-\udcff]", _text(path), maxsplit=1)[0]),
    lambda path: re.sub(rb"[\0-\x1f\x7f]", b"", path),
    lambda path: re.split(rb"[?#\0\r\n]", path, maxsplit=1)[0],
    lambda path: re.sub(rb";[^/]*", b"", path),
    lambda path: path.replace(b"\\", b"/"),
    lambda path: re.sub("[\u2044\u2215]", "/", _text(path)).encode("utf-8", "surrogateescape"),  # as code pages have it
    lambda path: path.replace(b"+", b" "),
    lambda path: re.sub(rb"%(?![0-9a-fA-F]{2})", b"", path),
    lambda path: re.sub(rb"/{2,}", b"/", path),
    lambda path: re.sub(rb"[ .]+(?=/|\Z)", b"", path),
    lambda path: re.sub(rb"(?<=/)[ ]+", b"", path),
    lambda path: _resolve(path, merge=True),
    lambda path: _resolve(path, merge=False),
    lambda path: re.sub(rb"\A(?:/?[a-z]+:)?//[^/]*(?=/)", b"", path),
)


def readings(path: bytes, limit: int = 4000) -> set[bytes]:
    """Everything a path becomes by any of the things servers do to one, done in any order, any number of times."""
    found = {path}
    fresh = [path]
    while fresh and len(found) < limit:
        seen = fresh.pop()
        for step in _STEPS:
            made = step(seen)
            if made not in found:
                found.add(made)
                fresh.append(made)
    return found


def control_route(methods: Iterable[bytes], paths: Iterable[bytes]) -> str | None:
    """The control route that the most forgiving engine takes a request for, below whatever prefix it is mounted."""
    changes = not SAFE.issuperset(methods)
    for path in paths:
        for reading in readings(path):
            segments = [part.decode("latin-1") for part in reading.split(b"/") if part]
            for size in range(1, _LONGEST + 1):
                end = tuple(segments[-size:])
                for ending in {end, (*end[:-1], "{}")}:
                    route = _TEMPLATES.get(ending) if len(segments) >= size else None
                    if route is not None and (changes or route in ANY_METHOD):
                        return route
    return None


# ------------------------------------------------------------------------------------------------------------- spellings

Spell = Callable[[bytes], bytes]


def _escaped(path: bytes) -> bytes:
    return b"".join(b"%%%02x" % byte for byte in path)


def _encoded(text: str) -> bytes:
    return _escaped(text.encode())


def _letters(change: Callable[[str], str], first_only: bool = False) -> Spell:
    """Write letters otherwise; what is an escape stays one."""

    def spell(path: bytes) -> bytes:
        done = 0

        def one(found: re.Match[bytes]) -> bytes:
            nonlocal done
            if len(found[0]) > 1 or (first_only and done):
                return found[0]
            letter = found[0].decode()
            made = change(letter)
            done += made != letter
            return made.encode("latin-1") if made.startswith("%") else _encoded(made) if made != letter else found[0]

        return re.sub(rb"%u[0-9a-fA-F]{4}|%[0-9a-fA-F]{2}|[a-z]", one, path)

    return spell


def _overlong(size: int) -> Callable[[str], str]:
    """A letter of ASCII in `size` bytes of what is no UTF-8."""
    lead = {2: 0xC0, 3: 0xE0, 4: 0xF0, 5: 0xF8, 6: 0xFC}[size]

    def write(letter: str) -> str:
        point = ord(letter)
        tail = [0x80 | (point >> 6 * place) & 0x3F for place in range(size - 1)][::-1]
        return "".join(f"%{byte:02x}" for byte in (lead | point >> 6 * (size - 1), *tail))

    return write


def _into(what: bytes) -> Spell:
    """Put something into the last segment, behind its first letter, outside of escapes."""

    def spell(path: bytes) -> bytes:
        head, slash, leaf = path.rpartition(b"/")
        found = re.match(rb"%u[0-9a-fA-F]{4}|%[0-9a-fA-F]{2}|[^%]", leaf)
        return path if found is None else head + slash + leaf[: found.end()] + what + leaf[found.end() :]

    return spell


def _after(what: bytes) -> Spell:
    return lambda path: path + what


def _before(what: bytes) -> Spell:
    return lambda path: what + path


def _for_slashes(what: bytes) -> Spell:
    return lambda path: path.replace(b"/", what)


_FULL_WIDTH = lambda letter: chr(ord(letter) + 0xFEE0)  # noqa: E731
_TAILS = (
    *(b"/", b"//", b"%2f", b"%252f", b"%5c", b"\\", b".", b"..", b"...", b"%2e", b"/.", b"/./", b"/%2e", b"/x/..", b"/x/%2e%2e/"),
    *(b"/x%2fy/..", b"%2fx/..", b"/x%2f..", b"%2fx%2f%2e%2e", b"/x/y/../..", b"/x//..", b"/x\\..", b"/x/..;/", b"/x/..%00", b"/..;x"),
    *(b"%20", b"%20%20", b"%09", b"%0a", b"%0d%0a", b"%0d%0aX:%20y", b"%00", b"%00.png", b"%00/x", b"%00x/y", b"%2500", b"%7f", b"+"),
    *(b"%3f", b"%3Fx=1", b"%3Fx/y", b"%253Fx/y", b"%23", b"%23x", b"%23x/y", b"%3fx/../y", b";", b";a=b", b"%3ba=b", b"%253Ba=b"),
    *(b";a%2fb", b";a%252fb", b";a%2f..%2fb", b";/", b";jsessionid=1/", b"%3b%2f", b"%ff", b"%c3", b"%80", b"%fe%ff", b"%c2%a0"),
    *(b"%e2%80%8b", b"%ef%bb%bf", b"%c2%ad", b"%c0%80", b"%c0%80x", b"%c0%ae", b"%c0%af", b"%e0%80%af", b"%ef%bc%8f", b"%ef%bc%8e"),
    *(b"%ef%bc%9fx/y", b"%ef%bc%9bx", b"%ef%bc%83x/y", b"/x/%ef%bc%8e%ef%bc%8e", b"/x/%e2%80%a5", b"/x%e2%88%95..", b"/x%ef%bc%bc.."),
    *(b"%ffx", b"%ff/..", b"%u0000", b"%u002f", b"%u003fx/y", b"%25%30%30", b"%", b"%25"),
)
_HEADS = (
    *(b"/", b"//", b"./", b"%2e/", b"%2f", b"%5c", b"\\", b"x/../", b"x/%2e%2e/", b"x/.%2e/", b"x/%252e%252e/", b"x/..;/", b"x/..;y=z/"),
    *(b"x/..%2f", b"x%2f..%2f", b"x\\..\\", b"x%5c..%5c", b"x/%c0%ae%c0%ae/", b"x/%c0%2e%c0%2e/", b"x/%e0%80%ae%e0%80%ae/"),
    *(b"x/%uff0e%uff0e/", b"x/%ef%bc%8e%ef%bc%8e/", b"x%3Fy/../", b"../", b"../../../", b"..%2f..%2f", b"root/path/", b"v1/", b";x/"),
    *(b"v1/chat/completions/../../../", b"v1/chat/completions;x/", b"http://engine/", b"http:%2f%2fengine/", b"//engine:80/", b"@engine/"),
    *(b"%20", b"%09", b"%00", b"%ef%bb%bf", b"%e2%80%8b", b"+", b"%ff", b"x%00/../"),
)
SPELLINGS: dict[str, Spell] = {
    "as it is": lambda path: path,
    "upper": lambda path: re.sub(rb"%u?[0-9a-fA-F]{2}|[a-z]", lambda found: found[0].upper() if len(found[0]) == 1 else found[0], path),
    "title": lambda path: path.title(),
    "first letter escaped": _letters(lambda letter: f"%{ord(letter):02x}", first_only=True),
    "first letter escaped, upper": _letters(lambda letter: f"%{ord(letter) - 32:02X}", first_only=True),
    "letters escaped": _letters(lambda letter: f"%{ord(letter):02X}"),
    "all escaped": _escaped,
    "all escaped twice": lambda path: _escaped(_escaped(path)),
    "escaped thrice": lambda path: path.replace(b"%", b"%2525").replace(b"e", b"%252565"),
    "escaped five times": lambda path: path.replace(b"%", b"%25").replace(b"e", b"%2525252565"),
    "escaped nine times": lambda path: path.replace(b"e", b"%" + b"25" * 8 + b"65"),
    "%u": _letters(lambda letter: f"%u{ord(letter):04x}"),
    "%25u": _letters(lambda letter: f"%25u{ord(letter):04x}", first_only=True),
    "%u of full-width": _letters(lambda letter: f"%uff{ord(letter) - 32:02x}"),
    "full-width": _letters(_FULL_WIDTH),
    "one full-width": _letters(_FULL_WIDTH, first_only=True),
    "full-width, raw": lambda path: path.replace(b"e", "ｅ".encode()).replace(b"s", "ｓ".encode()),
    "full-width escapes": lambda path: path.replace(b"e", _encoded("％６５")),
    "full-width upper": _letters(lambda letter: chr(ord(letter) - 32 + 0xFEE0)),
    "bold": _letters(lambda letter: chr(0x1D41A + ord(letter) - 97)),
    "circled": _letters(lambda letter: chr(0x24D0 + ord(letter) - 97)),
    "long s, kelvin, dotless i": lambda path: path.replace(b"s", _encoded("ſ")).replace(b"k", _encoded("K")).replace(b"i", _encoded("ı")),
    **{f"overlong {size}": _letters(_overlong(size)) for size in (2, 3, 4, 5, 6)},
    "overlong, escaped twice": lambda path: _letters(_overlong(2))(path).replace(b"%", b"%25"),
    **{
        f"into: {what!r}": _into(what)
        for what in (b"%00", b"%0a", b"%0d", b"%7f", b"%ff", b"%c2%ad", b"%e2%80%8b", b"%ef%bb%bf", b"%u200b")
    },
    **{
        f"slashes: {what!r}": _for_slashes(what)
        for what in (
            *(b"//", b"/./", b"%2f", b"%2F", b"%252F", b"%25252f", b"%c0%af", b"%c0%2f", b"%e0%80%af", b"%f0%80%80%af", b"%5c", b"%255C"),
            *(b"\\", b"/x/../", b";x/", b"%ef%bc%8f", b"%uff0f", b"%u002f", b"%u2215", b"%e2%88%95", b"%e2%81%84", b"/%20/", b"%00/"),
        )
    },
    **{f"tail: {what!r}": _after(what) for what in _TAILS},
    **{f"head: {what!r}": _before(what) for what in _HEADS},
}
"""By name: what makes of a route without its first slash another way of writing it."""

QUERIES = (b"", b"?level=1", b"?", b"?x=/../..", b"?/v1/chat/completions", b"?tags=weights&tags=kv_cache", b"??", b"?%00")
