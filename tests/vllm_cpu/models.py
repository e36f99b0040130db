"""Make the models the tests serve, with random weights.  Run by the vLLM environment's Python:

    python models.py FOLDER [NAME ...]

`tiny-SEED` and `mid-SEED` chat (mid is large enough that its memory is seen to move), `rerank-SEED` scores.  A model that
is there and was made by this very file is left alone; a new one appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

DEFAULTS = ("tiny-1", "tiny-2", "tiny-3", "mid-1", "mid-2", "rerank-1")
MADE_BY = "made-by"
# name -> hidden size, layers, size of the feed-forward part, vocabulary
CHAT_SHAPES = {"tiny": (128, 2, 256, 512), "mid": (1536, 12, 4096, 32_000)}
CHAT_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RERANK_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXT = "the actor waits in the green room until the curtain lifts and the lights go down good evening"


def make(folder: Path, name: str) -> Path:
    """The folder of one model."""
    kind, _, seed = name.rpartition("-")
    path, mark = folder / name, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (path / MADE_BY).is_file() and (path / MADE_BY).read_text() == mark:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch:
        new = Path(scratch, name)
        if kind == "rerank":
            make_rerank(new, int(seed))
        else:
            make_chat(new, int(seed), *CHAT_SHAPES[kind])
        (new / MADE_BY).write_text(mark)
        shutil.rmtree(path, ignore_errors=True)
        new.rename(path)
    return path


def make_chat(path: Path, seed: int, hidden: int, layers: int, feed_forward: int, vocabulary: int) -> None:
    """A Llama in bfloat16 with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, special_tokens=list(CHAT_TOKENS), initial_alphabet=alphabet))
    begin, end, pad = CHAT_TOKENS[:3]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=begin, eos_token=end, pad_token=pad)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.5,  # with the usual 0.02 every greedy answer is one token over and over
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def make_rerank(path: Path, seed: int) -> None:
    """A BERT cross-encoder of 2 layers x 64 that knows a few words."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate([*RERANK_TOKENS, *dict.fromkeys(TEXT.split())])}
    words = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    pad, unknown, start, separator, mask = RERANK_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=separator,
        mask_token=mask,
        model_max_length=128,
    ).save_pretrained(path)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(ids),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        num_labels=1,
        initializer_range=0.5,  # so that scores of different texts differ clearly
    )
    BertForSequenceClassification(config).save_pretrained(path)


if __name__ == "__main__":
    for wanted in sys.argv[2:] or DEFAULTS:
        print(make(Path(sys.argv[1]), wanted))
