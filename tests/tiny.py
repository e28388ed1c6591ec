"""Tiny random models and a tiny tokenizer, made in code, so that no test needs a download.

Owns the sizes, the seeds and the tokenizer of the test models. Knows transformers and tokenizers; nothing of this package.
The weights are not transformers' defaults: matrices have unit gain and embeddings are small beside what the layers add, so
that a model listens to its whole context instead of repeating its last token, and a wrong page becomes a wrong answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 320
MAX_LENGTH = 512  # positions of every tiny model: prompt and output together
WINDOW = 12  # of the sliding families, short enough that a test's prompt crosses it

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "qwen3": ("qwen3", _SIZES),
    "mistral": ("mistral", _SIZES | {"sliding_window": None}),
    "mistral_sliding": ("mistral", _SIZES | {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _SIZES | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gpt2": ("gpt2", _GPT2_SIZES),
}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh tiny causal LM in float32, in eval mode; the same family, seed and overrides give the same weights.

    `family` is a key of FAMILIES; `overrides` are fields of its config. Its generation config is greedy and has no
    end-of-sequence id, so outputs run to their length. The global random generator is left as it was.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

    model_type, sizes = FAMILIES[family]
    config = CONFIG_MAPPING[model_type](**(sizes | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _randomize(model, embedding_std=0.3 if model_type == "gpt2" else 0.05)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def _randomize(model: PreTrainedModel, embedding_std: float) -> None:
    import torch

    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.1)  # norms and biases: near their neutral value, but not neutral
            elif id(parameter) not in tables:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * embedding_std)


def break_token(model: PreTrainedModel, token: int) -> None:
    """Make the embedding of `token` NaN, so that the model gives no numbers where a text has it, and only there."""
    import torch

    table: Any = model.get_input_embeddings()
    with torch.no_grad():
        table.weight[token] = torch.nan


_TEXT = """The engine counts pages and the pages hold keys and values. A request that has been seen before finds its pages
again and there is nothing left to compute but the rest. When memory is short, the newest request waits and then it
continues where it stood. The answer does not change, whatever else is in the batch: that is the promise of the house.
"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with VOCAB_SIZE entries and a ChatML template; any text survives a round trip.

    Ids 0 to 3 are `<|pad|>`, `<|endoftext|>` (beginning), `<|im_start|>` and `<|im_end|>` (end), then 256 bytes and merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def save_model(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny model and its tokenizer as an ordinary model directory, which ends on `<|im_end|>`; returns `directory`."""
    from transformers import GenerationConfig

    tokenizer = make_tokenizer()
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    model = make_model(family, seed=seed, **(overrides | {"eos_token_id": tokenizer.eos_token_id}))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
