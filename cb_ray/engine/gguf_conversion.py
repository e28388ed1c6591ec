"""A `.gguf` file becomes an ordinary model directory: weights, configs, tokenizer and chat template, as from_pretrained expects.

Owns what transformers' own GGUF reader leaves open: the precision on disk, the generation config, and pre-tokenizers that it
does not know. Knows transformers and gguf; nothing of requests, caches or where the file came from.
"""

# gguf and parts of transformers come without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelSourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Vocabularies whose merges were learned with every digit apart. transformers reads them with GPT-2's rule, which keeps digits
# and the space before them together, and so gives other tokens than the model was trained on wherever a number is indented.
_DIGITS_APART = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What the file says of itself and the conversion needs to know."""

    dtype: str  # of most of the weights; bfloat16 where they are quantized
    pre_tokenizer: str | None
    end_of_turn: int | None  # where a chat's turn ends, if that is not the end-of-sequence id


def convert_gguf(file: Path, directory: Path, *, progress: bool = True) -> None:
    """Fill `directory` with the model and tokenizer of `file`. Weights are dequantized; float weights keep their precision.

    Raises ModelSourceError when packages are missing or the file holds something that transformers cannot read.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelSourceError(f"reading {file.name} needs {' and '.join(missing)}; pip install 'cb-ray[gguf]' brings them")
    try:
        header = _read_header(file)
        with _progress_bars(progress):
            model, tokenizer = _load(file, header)
            _complete(model, tokenizer, header)
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
        raise ModelSourceError(f"{file} cannot be converted: {error}") from error


def _read_header(file: Path) -> _Header:
    import gguf

    reader = gguf.GGUFReader(file)
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    if not sizes:
        raise ModelSourceError(f"{file} holds no weights")

    def value(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    dtype = _FLOATS.get(sizes.most_common(1)[0][0], "bfloat16")
    return _Header(dtype=dtype, pre_tokenizer=value("pre"), end_of_turn=value("eot_token_id"))


def _load(file: Path, header: _Header) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=header.dtype, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    return model, tokenizer


def _complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, header: _Header) -> None:
    """Set what the original model's files say and a GGUF does not, or says in a way that transformers passes over."""
    from tokenizers import pre_tokenizers
    from transformers import GenerationConfig

    ends = [token for token in (tokenizer.eos_token_id, header.end_of_turn) if token is not None]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(set(ends)) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    if header.pre_tokenizer in _DIGITS_APART:
        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


@contextmanager
def _progress_bars(shown: bool) -> Generator[None]:
    """transformers' progress bars on or off for a while."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        yield
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
