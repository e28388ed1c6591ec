"""Digests of full token pages: the names under which pages of a prompt are found again, by engines and routers alike.

Owns the one digest function. Knows nothing but the standard library. A digest covers its page and all pages before it:

    root(salt) ─▶ digest 0 = H(root, page 0) ─▶ digest 1 = H(digest 0, page 1) ─▶ …

so equal digests mean equal prefixes (BLAKE2b with 128 bits; the same on every machine and in every process).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_digest(salt: str = "") -> bytes:
    """The digest before the first page. Another salt gives another family of digests, so tenants never share pages."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"cb-ray pages").digest()


def next_digest(parent: bytes, page: Sequence[int]) -> bytes:
    """Digest of one full page of token ids that follows the prefix named `parent`."""
    return hashlib.blake2b(parent + array("q", page).tobytes(), digest_size=DIGEST_BYTES).digest()


def page_digests(token_ids: Sequence[int], page_size: int, salt: str = "") -> tuple[bytes, ...]:
    """Digests of all full pages of `token_ids`, `len(token_ids) // page_size` of them."""
    digests: list[bytes] = []
    parent = root_digest(salt)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        parent = next_digest(parent, token_ids[start : start + page_size])
        digests.append(parent)
    return tuple(digests)
