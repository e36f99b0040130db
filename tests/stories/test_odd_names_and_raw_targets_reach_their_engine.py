"""B12: an encoded slash was decoded on the way; models with odd names never became ready."""

import json
import re
from pathlib import Path
from urllib.parse import quote

from .rig import Rig, fake

NAMES = ("plain", "org/name:tag", "Fam3.5-27B:UD-IQ3_XXS", "modèle 7b", "a+b")
TARGETS = (
    "/files/dir%2Fitem.json",
    "/x%20y",
    "/q?m=a%2Fb&m=2&empty=",
    "/caf%C3%A9",
    "/..%2f..%2fetc/passwd",
    "//double",
)


async def test_five_odd_names_are_served_by_their_own_engines(tmp_path: Path) -> None:
    """By the name in the body, in the query and in the path; the files named after them are safe and differ."""
    async with Rig(tmp_path, {name: fake(vram=100) for name in NAMES}) as rig:
        for name in NAMES:
            reply = await rig.chat(name)
            assert (reply.status, reply.json["model"]) == (200, name)
            target = f"/v1/audio/voices?model={quote(name, safe='')}"
            reply = await (await rig.send("GET", target)).rest()
            assert (reply.status, reply.json["path"]) == (200, "/v1/audio/voices")
            assert rig.journal(name, "begin")[-1]["target"] == target
            for written in {quote(name, safe=""), quote(name, safe="/:+")}:
                reply = await (await rig.send("GET", f"/v1/models/{written}")).rest()
                assert (reply.status, reply.json["id"], reply.json["status"]["value"]) == (200, name, "loaded")
                assert (await rig.api("GET", f"/api/models/{written}")).json["state"] == "ready"
        assert [rig.starts(name) for name in NAMES] == [1] * 5
        logs = [path.name for path in (rig.state_dir / "logs").iterdir() if path.name != "greenroom.log"]
        assert len(logs) == 5
        assert [name for name in logs if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.log", name)] == []


async def test_the_target_reaches_the_engine_byte_for_byte(tmp_path: Path) -> None:
    """Behind the model's prefix nothing is decoded, merged, resolved or reordered, nothing leaves it; HEAD stays HEAD without a body."""
    async with Rig(tmp_path, {name: fake(vram=100) for name in NAMES}) as rig:
        await rig.warm(*NAMES)
        for name in NAMES:
            prefix = f"/upstream/{quote(name, safe='')}"
            for target in TARGETS:
                reply = await (await rig.send("GET", prefix + target)).rest()
                assert (reply.status, rig.journal(name, "begin")[-1]["target"]) == (200, target)
            exchange = await rig.send("HEAD", prefix + TARGETS[0])
            reply = await exchange.head()
            seen = rig.journal(name, "begin")[-1]
            assert (seen["method"], seen["target"], reply.status) == ("HEAD", TARGETS[0], 200)
            exchange.writer.write_eof()
            assert await exchange.reader.read() == b""
            exchange.close()

        # Dot segments lead to no other route: whoever resolves them, it is not us.
        climbing = ("/../../api/status", "/%2e%2e/%2e%2e/api/status", "/..%2f..%2fapi/status", "/../a+b/props", "/x/../../../unload")
        for target in climbing:
            reply = await (await rig.send("GET", f"/upstream/plain{target}")).rest()
            if reply.status == 200:
                assert reply.json == {"path": target.partition("?")[0]}
                assert json.dumps(rig.journal("plain", "begin")[-1]["target"]) == json.dumps(target)
            else:
                assert 400 <= reply.status < 500
        for target in ("/upstream/../api/status", "/upstream/plain/../../v1/models/../../api/status", "/v1/../api/status"):
            reply = await (await rig.send("POST", target)).rest()
            assert reply.status != 202
            assert "devices" not in (reply.json if reply.body.startswith(b"{") else {})
        assert [(await rig.model(name))["state"] for name in NAMES] == ["ready"] * 5
