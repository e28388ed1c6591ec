"""The model of the pool's benchmarks: random weights, and one word for each token, so that a client can count tokens by their text.

Owns how it is made; kept in the user's cache. The weights have unit gain and small embeddings, so that the model listens to its
whole context: a token lost, repeated or taken from a stale page changes everything after it. Knows transformers and tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.model_cache import cached_directory
from ...user_cache import user_cache_dir

VOCAB_SIZE = 512
MAX_LENGTH = 4096
BANDS = 4  # of the vocabulary; a model of version n speaks words of band n alone


def words_model(width: int = 512, layers: int = 8, seed: int = 0, band: int | None = None) -> Path:
    """The directory of such a model. `band`: all words it says lie in that quarter of the vocabulary, which tells whose they are."""
    name = f"words-2-{width}x{layers}-seed{seed}" + ("" if band is None else f"-band{band}")
    return cached_directory(user_cache_dir() / "bench", name, partial(_make, width, layers, seed, band))


def word(token: int) -> str:
    return f"w{token:03d}"


def tokens_of(text: str) -> list[int]:
    """The token ids that a text of such words stands for. Raises ValueError for any other text."""
    return [int(piece.removeprefix("w")) for piece in text.split()]


def prompt_of(numbers: Any, length: int, prefix: Sequence[int] = ()) -> list[int]:
    """`prefix` and then random ids up to `length`; `numbers` is a random.Random."""
    return [*prefix, *(numbers.randrange(1, VOCAB_SIZE) for _ in range(length - len(prefix)))]


def _make(width: int, layers: int, seed: int, band: int | None, directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                gain = 0.05 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * gain)
        model.lm_head.weight[0] = 0.0  # the padding word has no text; it is never the best
        if band is not None:
            size = VOCAB_SIZE // BANDS
            silent = torch.ones(VOCAB_SIZE, dtype=torch.bool)
            silent[band * size : (band + 1) * size] = False
            model.lm_head.weight[silent] = 0.0
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    model.save_pretrained(directory)
    vocabulary = {word(token): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=word(0), unk_token=word(0), model_max_length=MAX_LENGTH)
    fast.save_pretrained(directory)
