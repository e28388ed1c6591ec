"""`TextCodec`: the tokenizer of one model, as a value that many threads may use at once.

Owns encoding, decoding and the exact bytes of each token. May know transformers and tokenizers (imported when one is loaded)
and the ground. It goes to the Rust tokenizer directly, whose `encode` and `decode` hold no state, so no lock is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class TextCodec:
    """Text to token ids and back, for one tokenizer. Nothing in it changes after construction."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "tokenizer") -> None:
        """Raises UnsupportedModelError when the tokenizer has no Rust backend, which incremental decoding needs."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(name, "its tokenizer has no tokenizer.json; convert it to a fast tokenizer first")
        backend.no_truncation()
        backend.no_padding()
        self.tokenizer = tokenizer
        self.backend: Tokenizer = backend
        self.size: int = backend.get_vocab_size()
        self.longest_token: int = max((len(token) for token in backend.get_vocab()), default=1)
        self._kinds = _decoder_kinds(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, name: str = "tokenizer") -> TextCodec:
        """The codec of a model directory (or of a hub id, where there is a hub)."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(path)), name)

    @property
    def eos_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id  # type: ignore[return-value]

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, or None when the model has none."""
        template: Any = self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError for text that is not Unicode (half of a surrogate pair)."""
        if _SURROGATE.search(text):
            raise InvalidRequestError("the text has half of a surrogate pair in it; send whole characters")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; bytes that make no character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for wherever it appears: b" world" for `Ġworld`, b"\\xf0" for a piece of an emoji."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """The same as text, in which a piece of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def at_least(self, num_chars: int) -> int:
        """A lower bound on the number of tokens of any text of `num_chars` characters, found without tokenizing it."""
        return num_chars // self.longest_token

    def _spell(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._kinds:
            known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[character] for character in token) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in self._kinds else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if "Metaspace" in self._kinds or "Replace" in self._kinds:
            return token.replace("▁", " ").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


def _decoder_kinds(backend: Tokenizer) -> frozenset[str]:
    """The types of all decoders in the tokenizer's chain, such as {'ByteLevel'} or {'Replace', 'ByteFallback', 'Fuse'}."""
    if backend.decoder is None:
        return frozenset()
    return frozenset(_types(json.loads(backend.decoder.__getstate__())))  # type: ignore[attr-defined]


def _types(node: Any) -> Iterable[str]:
    yield node["type"]
    for child in node.get("decoders", ()):
        yield from _types(child)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE: printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + rank), byte) for rank, byte in enumerate(hidden))
    return alphabet


_BYTE_OF = _byte_alphabet()
