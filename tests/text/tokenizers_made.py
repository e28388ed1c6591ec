"""Real tokenizers of the kinds that models have, trained in code: byte-level BPE and SentencePiece-like BPE with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cb_ray.text.codec import TextCodec

SPECIAL = ["<|begin|>", "<|end|>"]
_TEXT = [
    "The quick brown fox, the lazy dog: 1, 2, 3.",
    "naïve café",
    "你好世界你好世界",
    "🎉🦙🎉🦙 👩‍👩‍👧‍👦",
    "שלום עליכם",
    "e\u0301\u200b  \n\t",
]


@cache
def byte_level(size: int = 420, chat_template: str | None = None) -> TextCodec:
    """A byte-level BPE codec; several characters are pieces of merges, and any text survives a round trip. Adds no tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("né™", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = chat_template
    return TextCodec(fast)


@cache
def byte_fallback(chat_template: str | None = None) -> TextCodec:
    """A codec in the manner of Llama 2: ▁ for a space, <0xE2> for bytes that have no token, and <s> before every text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyzé", "▁a", "he", "ll", "▁w", "or", "▁he", "▁hell"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("▁", "he"), ("▁he", "ll")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = chat_template
    return TextCodec(fast)
