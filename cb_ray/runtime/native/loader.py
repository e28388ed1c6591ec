"""Loads the compiled kernels into torch and hands out their ops.

Owns `cb_ray::*` in torch's registry: their schemas come with the library, their fake implementations stand here, so that
torch.compile and torch.export can trace over them. May not know how the library is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import compiler

logger = logging.getLogger(__name__)

_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # as the kernels number them


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why there are no native kernels here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOps:
    """The native ops. All of them take CPU tensors only, and none of them knows gradients.

    Shapes, for Q query rows of B requests, packed: query [Q, heads, Dk]; caches [blocks, page, kv_heads, Dk or Dv], contiguous
    but for the stride of their blocks; block_table int32 [B, max_blocks]; cu_q int32 [B + 1], first row of each request; starts
    int32 [B], tokens in the cache before this step. Query j of request b stands at position starts[b] + j and sees positions up
    to its own, at most `window` of them (0: all). The slot of position p is block_table[b, p // page] * page + p % page. Entries
    of a table left of every window are never read. Rows of the query from cu_q[B] on belong to nobody; their answer is 0.
    """

    library: Path
    levels: tuple[str, ...]  # dispatch levels this machine can run, plainest first

    paged_attention: Callable[..., Tensor]
    """(query, key_cache, value_cache, block_table, cu_q, starts, scale, window, softcap, sinks) -> [Q, heads, Dv].

    Of float32, bfloat16 or float16, query and cache each; sums in float32. softcap 0: none. sinks: [heads] or None."""

    write_kv: Callable[..., None]
    """(key, value, key_cache, value_cache, slots): row r goes to slot slots[r] (int32 or int64)."""

    write_and_attend: Callable[..., Tensor]
    """(query, key, value, key_cache, value_cache, slots, block_table, cu_q, starts, scale, window, softcap, sinks): both."""

    greatest: Callable[[Tensor], tuple[Tensor, Tensor]]
    """(logits [rows, vocabulary]) -> (float32 [rows], int64 [rows]): the greatest of each row and the first place where it
    stands, as `logits.max(-1)`, NaN included; no float copy of the logits is made."""

    sample: Callable[..., tuple[Tensor, Tensor]]
    """(logits, temperature, top_k, top_p, min_p, fewest, numbers) -> (float32 [rows] greatest logits, int64 [rows] tokens).

    One entry per row: temperature, top_p and min_p float32, top_k and fewest int32, numbers float64 in [0, 1). Temperature 0
    takes the greatest; top_k 0, top_p 1 and min_p 0 cut nothing. Top-k keeps ties of the k-th; top-p keeps the likeliest until
    they have that probability, `fewest` at least; min-p is relative to the likeliest. A token is drawn by inverse CDF in
    vocabulary order. A row whose greatest logit is no finite number has no token to speak of."""

    forbid_: Callable[..., None]
    """(logits [rows, vocabulary], places int64 [n], allowed int32 [n, words]): -inf in row places[i] where the bit is 0, in place.
    The lowest bit of a word comes first; bits beyond the vocabulary count for nothing."""

    linear: Callable[..., Tensor]
    """(x [..., K], weight [N, K], bias, residual) -> [..., N]: x weight^T + bias, rounded, then added to the residual.

    x is contiguous and K a multiple of 32. The weight is read as it lies. Made for the few rows of a step."""

    linear_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(x, query weight, key weight, value weight, and a bias or None for each): three linears of the same x in one call."""

    gated_mlp: Callable[..., Tensor]
    """(x, gate, up, down, gelu_tanh, residual): down(act(x gate^T) * x up^T), act SiLU or the tanh form of GELU."""

    rms_norm: Callable[..., Tensor]
    """(x [..., K], weight [K], epsilon, style) -> as x, where y = x / sqrt(mean(x^2) + epsilon) and the style says what is
    rounded to x's type: 0, round(round(y) * weight); 1, round(y * weight); 2, round(y * (1 + weight))."""

    rotary_: Callable[..., None]
    """(query [..., rows, heads, width], key, cos [..., rows, turned], sin): turns the first `turned` numbers of each head in
    place, the two halves against each other; products and sums are rounded to the query's type."""

    decoder_layer: Callable[..., Tensor]
    """(x [..., Q, K], cos, sin, three of each norm: weight, epsilon, style; weights of the heads' norms or None, epsilon, style;
    weights of query, key, value, output; their biases or None; gate, up, down, gelu_tanh; key_cache, value_cache, slots,
    block_table, cu_q, starts, scale, window, softcap) -> as x. All of the above, one after the other."""

    @property
    def level(self) -> str:
        """The dispatch level in use."""
        return _functions(self.library).cb_ray_level().decode()

    def own_threads(self, count: int) -> int:
        """Share calls among `count` threads of our own; 0, as at first: in torch's pool. The answer is what was before.

        Torch's pool waits for every thread at each call. Our own helpers are not waited for when the system has no processor for
        them, so a step suffers little from other processes. Only of use where nearly all work of a step is ours, and best with
        torch.set_num_threads(1) in the thread that steps: threads of either pool spin for a while after a call, in the other's
        way, and one stray operation in torch's pool may wait longer than a whole step takes. For the whole process."""
        return int(_functions(self.library).cb_ray_own_threads(count))

    def peak(self, dtype: torch.dtype, rounds: int) -> float:
        """Multiply and add `rounds` times in registers, on the calling thread, and say how many operations that was. Holds no lock,
        so that several threads may; what it gives per second is the roof of every product."""
        return float(_functions(self.library).cb_ray_peak(_TYPES.index(dtype), rounds))

    @contextlib.contextmanager
    def at_level(self, level: str) -> Iterator[None]:
        """Use another dispatch level for a while, in the whole process: for tests and benchmarks. Raises ValueError."""
        functions, before = _functions(self.library), self.level
        functions.cb_ray_force_level(self.levels.index(level))
        try:
            yield
        finally:
            functions.cb_ray_force_level(self.levels.index(before))


@functools.cache
def load() -> NativeOps | Unavailable:
    """The native ops, compiled first if need be (some seconds, once); or why there are none, after one log line."""
    started = time.perf_counter()
    try:
        path = compiler.library(compiler.Torch(version=str(torch.__version__), root=Path(torch.__file__).parent))
        torch.ops.load_library(path)
        _register_fakes()
        ops = _ops(path)
    except (compiler.BuildError, OSError, RuntimeError) as error:
        cause = error.__cause__ or error  # torch's loader hides what the system's said
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        logger.warning("No native CPU kernels, torch's own attention is used instead: %s", reason)
        return Unavailable(reason=reason)
    logger.info("Native CPU kernels: %s, ready after %.1f s", ops.level, time.perf_counter() - started)
    return ops


def _ops(path: Path) -> NativeOps:
    functions, levels = _functions(path), []
    while name := functions.cb_ray_level_name(len(levels)):
        levels.append(name.decode())
    here = torch.ops.cb_ray
    return NativeOps(
        library=path,
        levels=tuple(levels),
        paged_attention=here.paged_attention.default,
        write_kv=here.write_kv.default,
        write_and_attend=here.write_and_attend.default,
        greatest=here.greatest.default,
        sample=here.sample.default,
        forbid_=here.forbid_.default,
        linear=here.linear.default,
        linear_qkv=here.linear_qkv.default,
        gated_mlp=here.gated_mlp.default,
        rms_norm=here.rms_norm.default,
        rotary_=here.rotary_.default,
        decoder_layer=here.decoder_layer.default,
    )


def _functions(path: Path) -> ctypes.CDLL:
    functions = ctypes.CDLL(str(path))
    functions.cb_ray_level.restype = ctypes.c_char_p
    functions.cb_ray_level_name.restype = ctypes.c_char_p
    functions.cb_ray_peak.restype = ctypes.c_double
    functions.cb_ray_peak.argtypes = [ctypes.c_int, ctypes.c_int64]
    return functions


def _register_fakes() -> None:
    @torch.library.register_fake("cb_ray::paged_attention")
    def _(query, key_cache, value_cache, block_table, cu_q, starts, scale, window, softcap, sinks):
        return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])

    @torch.library.register_fake("cb_ray::write_kv")
    def _(key, value, key_cache, value_cache, slots):
        return None

    @torch.library.register_fake("cb_ray::write_and_attend")
    def _(query, key, value, key_cache, value_cache, slots, block_table, cu_q, starts, scale, window, softcap, sinks):
        return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])

    @torch.library.register_fake("cb_ray::greatest")
    def _(logits):
        rows = logits.shape[0]
        return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int64)

    @torch.library.register_fake("cb_ray::sample")
    def _(logits, temperature, top_k, top_p, min_p, fewest, numbers):
        rows = logits.shape[0]
        return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int64)

    @torch.library.register_fake("cb_ray::forbid_")
    def _(logits, places, allowed):
        return None

    @torch.library.register_fake("cb_ray::linear")
    def _(x, weight, bias, residual):
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @torch.library.register_fake("cb_ray::linear_qkv")
    def _(x, query, key, value, query_bias, key_bias, value_bias):
        return tuple(x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in (query, key, value))

    @torch.library.register_fake("cb_ray::gated_mlp")
    def _(x, gate, up, down, gelu_tanh, residual):
        return x.new_empty(*x.shape[:-1], down.shape[0])

    @torch.library.register_fake("cb_ray::rms_norm")
    def _(x, weight, epsilon, style):
        return torch.empty_like(x)

    @torch.library.register_fake("cb_ray::decoder_layer")
    def _(x, *others):
        return torch.empty_like(x)

    @torch.library.register_fake("cb_ray::rotary_")
    def _(query, key, cos, sin):
        return None
