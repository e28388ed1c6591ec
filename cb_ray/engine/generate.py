"""transformers' entry points, as functions of a model: generate a batch, make a manager, run one in a `with` block.

Owns the life of a manager around one call, persistent managers, and the progress bar. Knows the model only as an object with a
config, a device and a dtype; `attach` binds the functions as the model's methods, so that code written for transformers runs as
it is.
"""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from ..config import ContinuousBatchingConfig, WorkloadHints
from ..errors import ConfigError, nearest
from ..messages import GenerationOutput
from .manager import CACHED_MANAGER, ContinuousBatchingManager

logger = logging.getLogger(__name__)


def generate_batch(
    model: Any,
    inputs: Iterable[Iterable[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    grammar: Any = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generate from all `inputs` (token ids: lists, arrays, 1-D tensors) and return their outputs by request id, in input order.

    With `num_return_sequences` n, each id `req_{i}` is preceded by its children `req_{i}__child#0` … `#{n-2}`. A prompt that
    cannot be served is FAILED in the result, with `error` set; the others finish. `kwargs` are settings of the generation config
    (`max_new_tokens`, `eos_token_id`, …) for this call. `persistent_manager` keeps engine and cache on the model for the next
    call. `grammar` (a `Grammar`, or what `Grammar.of` takes) binds all outputs.

    Raises TypeError for an unknown keyword, and what making the engine raises (ConfigError, UnsupportedModelError, MemoryError).
    """
    prompts = list(inputs)
    if not prompts:
        return {}
    generation_config = _with_settings(_generation_config(model, generation_config), kwargs)
    count = len(prompts) * (generation_config.num_return_sequences or 1)
    hints = WorkloadHints() if persistent_manager else _hints(prompts, generation_config, count)
    with (
        continuous_batching_context_manager(
            model,
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            persistent_manager=persistent_manager,
            warmup=warmup,
            workload_hints=hints,
        ) as manager,
        _progress(count, progress_bar) as on_end,
    ):
        outputs = manager.run_batch(prompts, on_end, record_timestamps=record_timestamps, sampling={"grammar": grammar})
    failed = [output for output in outputs.values() if output.error is not None]
    for output in failed:
        logger.error("request %s failed: %s", output.request_id, output.error)
    return outputs


def init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A manager for `model`, not started. A manager kept by an earlier session is used again when it was made with equal
    settings.

    Raises AttributeError for an object that is no model, ConfigError (a ValueError) for settings that are wrong or missing,
    UnsupportedModelError with the reason when the model cannot be served (it is then left as it was), MemoryError.
    """
    for name in ("config", "device", "dtype"):
        if not hasattr(model, name):
            raise AttributeError(f"{type(model).__name__} has no attribute {name!r}; a transformers model is wanted")
    given = generation_config
    generation_config = _generation_config(model, generation_config)
    if continuous_batching_config is None:
        continuous_batching_config = getattr(generation_config, "continuous_batching_config", None)
        if continuous_batching_config is not None:
            logger.warning("continuous_batching_config inside the generation config is deprecated; hand it over beside it")
    kept: ContinuousBatchingManager | None = model.__dict__.get(CACHED_MANAGER)
    if kept is not None:
        if _serves(kept, None if given is None else generation_config, continuous_batching_config):
            return kept
        logger.info("the kept manager has other settings and makes room for a new one")
        kept.destroy()
    return ContinuousBatchingManager(model, generation_config, continuous_batching_config, workload_hints)


@contextmanager
def continuous_batching_context_manager(
    model: Any,
    generation_config: Any = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: Any = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
) -> Generator[ContinuousBatchingManager]:
    """A started manager inside the block. At its end the engine finishes its requests and stops (see `stop` for `block` and
    `timeout`).

    When the block raises, the engine is stopped hard: nobody is left to read. `persistent_manager` keeps it for the next session.
    """
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
    try:
        if warmup and not manager.warmed_up:
            manager.warmup()
        manager.start()
        yield manager
    except BaseException:
        _finish(manager, block=True, timeout=timeout, keep=False, hard=True)
        raise
    _finish(manager, block=block, timeout=timeout, keep=persistent_manager, hard=False)


def _finish(manager: ContinuousBatchingManager, *, block: bool, timeout: float | None, keep: bool, hard: bool) -> None:
    if manager.is_running():
        manager.stop(block=block, timeout=timeout, keep_for_next_session=keep, hard_stop=hard)
    if not keep and not manager.is_running():
        manager.destroy()


def destroy_cached_continuous_batching_manager(model: Any) -> None:
    """Give back what a persistent manager keeps on `model`; nothing when there is none."""
    kept: ContinuousBatchingManager | None = model.__dict__.get(CACHED_MANAGER)
    if kept is not None:
        kept.destroy()


def attach(model: Any) -> Any:
    """Bind the functions of this module as methods of `model`, in place of transformers' own; returns the model."""
    methods: tuple[Callable[..., Any], ...] = (
        generate_batch,
        init_continuous_batching,
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
    )
    for function in methods:
        setattr(model, function.__name__, types.MethodType(function, model))
    return model


# ---- settings of one call ---------------------------------------------------------------------------------------------------


def _generation_config(model: Any, given: Any) -> Any:
    config = getattr(model, "generation_config", None) if given is None else given
    if config is None:
        raise ConfigError("a generation config is needed: the model has none, and none was handed over", "generation_config")
    return config


def _with_settings(config: Any, settings: dict[str, Any]) -> Any:
    """The generation config of one call: a copy with the call's keywords in it. None leaves a setting as it is."""
    known = [str(name) for name in config.__dict__ if name[0] != "_"]
    for name in settings:
        if name not in known:
            raise TypeError(f"generate_batch() got an unexpected keyword argument {name!r}; {nearest(name, known)}")
    changes = {name: value for name, value in settings.items() if value is not None}
    if not changes:
        return config
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _hints(prompts: list[Any], config: Any, count: int) -> WorkloadHints:
    lengths: list[int] = []
    for prompt in prompts:
        with suppress(TypeError):  # what has no length is no prompt, and fails by itself
            lengths.append(len(prompt))
    new_tokens = config.max_new_tokens
    return WorkloadHints(
        max_prompt_length=max(lengths, default=0),
        max_generated_length=new_tokens if isinstance(new_tokens, int) and new_tokens > 0 else 0,
        num_requests=count,
    )


def _serves(kept: ContinuousBatchingManager, generation_config: Any, config: Any) -> bool:
    """Whether a kept manager was made with these settings; those that are not given do not count."""
    if generation_config is not None and generation_config.to_dict() != kept.generation_config.to_dict():
        return False
    return config is None or ContinuousBatchingConfig.of(config) == kept.wish


@contextmanager
def _progress(count: int, shown: bool) -> Generator[Callable[[], object]]:
    if not shown:
        yield lambda: None
        return
    with tqdm(total=count, desc="generating", unit="request") as bar:
        yield bar.update
