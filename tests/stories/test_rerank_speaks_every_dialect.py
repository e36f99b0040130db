"""B53: the path and the shape of reranking differ by engine and by client."""

import json
from pathlib import Path
from typing import Any

from .rig import Reply, Rig, fake

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking")
DOCUMENTS = ["x", {"text": "y"}, "z"]
# What the fake gives the documents at 0, 1, 2: 0, 7/11, 3/11.
BEST_FIRST = [1, 2, 0]


async def rerank(rig: Rig, model: str, path: str = "/v1/rerank", **fields: Any) -> Reply:
    body = {"model": model, "query": "q", "documents": DOCUMENTS, **fields}
    return await (await rig.send("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})).rest()


def order(reply: Reply) -> list[int]:
    assert reply.status == 200, reply.body
    results = reply.json["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    return [result["index"] for result in results]


async def test_every_path_gives_the_same_answer_whatever_the_engine_speaks(tmp_path: Path) -> None:
    """Engines with `documents` and with `texts`, known by name or found out: sorted, cut to top_n, indices in the client's order."""
    models = {"j": fake(rerank="j"), "t": fake(rerank="t"), "tei": fake(rerank="t", config={"engine": "tei"})}
    async with Rig(tmp_path, models) as rig:
        for name in models:
            answers = [await rerank(rig, name, path, top_n=2) for path in PATHS]
            assert [order(answer) for answer in answers] == [BEST_FIRST[:2]] * len(PATHS)
            assert len({json.dumps(answer.json["results"]) for answer in answers}) == 1

            for top_n, expected in ((0, BEST_FIRST), (1, BEST_FIRST[:1]), (3, BEST_FIRST), (99, BEST_FIRST)):
                assert order(await rerank(rig, name, top_n=top_n)) == expected
            assert order(await rerank(rig, name)) == BEST_FIRST

            echoed = await rerank(rig, name, top_n=2, return_documents=True)
            assert [result["document"] for result in echoed.json["results"]] == [{"text": "y"}, {"text": "z"}]
            assert ["document" in result for result in (await rerank(rig, name)).json["results"]] == [False] * 3

            many = order(await rerank(rig, name, documents=[f"text {index}" for index in range(1000)]))
            assert sorted(many) == list(range(1000))
        assert {name: rig.starts(name) for name in models} == dict.fromkeys(models, 1)


async def test_a_wrong_rerank_request_starts_no_engine(tmp_path: Path) -> None:
    """No documents, no query, a document that is none: 400."""
    async with Rig(tmp_path, {"j": fake()}) as rig:
        wrong: list[dict[str, Any]] = [
            {"documents": []},
            {"documents": "x"},
            {"documents": [1]},
            {"documents": [["x"]]},
            {"query": 5},
            {"query": None},
            {"top_n": -1},
            {"top_n": "two"},
        ]
        for fields in wrong:
            reply = await rerank(rig, "j", **fields)
            assert (reply.status, reply.error.get("type")) == (400, "invalid_request_error"), (fields, reply.body)
        assert rig.starts() == 0


async def test_an_engine_that_cannot_rerank_is_told_apart_and_left_alone(tmp_path: Path) -> None:
    """Its 501 is passed on with a hint; it is asked once and not started anew."""
    async with Rig(tmp_path, {"n": fake(rerank="n")}) as rig:
        reply = await rerank(rig, "n")
        assert (reply.status, "not in rerank mode" in reply.error["message"]) == (501, True)
        assert (len(rig.inferences("n")), rig.starts("n")) == (1, 1)
        assert (await rig.model("n"))["state"] == "ready"


async def test_a_real_reranker_answers_on_every_path(tmp_path: Path, llama_server: Path, tiny_rerank: Path) -> None:
    """llama-server with --reranking: the same results by every path, top_n and echoed documents included; without the flag 501."""
    command = f"{llama_server} -m {tiny_rerank} --no-warmup -t 1 --port ${{PORT}}"
    models = {
        "real": {"cmd": f"{command} --reranking", "device": "ram"},
        "plain": {"cmd": command, "device": "ram"},
    }
    devices = {"devices": {"ram": {"memory": "4GiB"}}}
    async with Rig(tmp_path, models, config=devices) as rig:
        documents = ["a lamp on the stage", {"text": "a rope"}, "a door that creaks", "x"]
        answers = [await rerank(rig, "real", path, query="lamp", documents=documents, top_n=3) for path in PATHS]
        first = order(answers[0])
        assert (len(first), set(first) <= {0, 1, 2, 3}) == (3, True)
        assert [order(answer) for answer in answers] == [first] * len(PATHS)
        echoed = await rerank(rig, "real", query="lamp", documents=documents, return_documents=True)
        texts = ["a lamp on the stage", "a rope", "a door that creaks", "x"]
        assert [result["document"]["text"] for result in echoed.json["results"]] == [texts[index] for index in order(echoed)]
        many = await rerank(rig, "real", query="lamp", documents=[f"word {index}" for index in range(200)], top_n=5)
        assert len(order(many)) == 5
        refused = await rerank(rig, "plain", query="lamp", documents=documents)
        assert (refused.status, "--reranking" in refused.error["message"]) == (501, True)
        assert [(await rig.model(name))["starts"] for name in models] == [1, 1]
