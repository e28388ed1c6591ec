"""The wish: transformers' fields and defaults, every form it may come in, and every value it may not have."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import transformers

from cb_ray.config import CompileConfig, ContinuousBatchingConfig, EngineFacts, WorkloadHints
from cb_ray.errors import ConfigError


def defaults(cls: type) -> list[tuple[str, Any]]:
    return [(f.name, f.default) for f in dataclasses.fields(cls)]


def test_fields_and_defaults_are_transformers_own() -> None:
    """Same names, same defaults, same order, so that positional use and keyword use both carry over."""
    assert defaults(ContinuousBatchingConfig) == defaults(transformers.ContinuousBatchingConfig)
    assert defaults(CompileConfig) == defaults(transformers.CompileConfig)
    ours, theirs = (
        {n for n, v in vars(c).items() if isinstance(v, property)}
        for c in (ContinuousBatchingConfig, transformers.ContinuousBatchingConfig)
    )
    assert ours >= theirs


def test_hints_have_transformers_fields() -> None:
    """The lengths and the count of a batch that is known beforehand."""
    from transformers.generation.continuous_batching.utils import WorkloadHints as Theirs

    assert list(inspect.signature(WorkloadHints).parameters) == list(inspect.signature(Theirs).parameters)
    with pytest.raises(ConfigError):
        WorkloadHints(max_prompt_length=-1)


WISHES: list[Any] = [
    ContinuousBatchingConfig(page_size=8, seed=3, varlen_compile_config=CompileConfig(mode="default")),
    transformers.ContinuousBatchingConfig(page_size=8, seed=3, varlen_compile_config=transformers.CompileConfig(mode="default")),
    {"page_size": 8, "seed": 3, "varlen_compile_config": {"mode": "default"}},
]


@pytest.mark.parametrize("wish", WISHES, ids=["ours", "transformers", "dict"])
def test_a_wish_may_come_in_any_form_and_is_not_changed(wish: Any) -> None:
    """Ours, transformers' class or a dictionary give the same copy; the object itself stays as it was."""
    before = copy.deepcopy(wish)
    config = ContinuousBatchingConfig.of(wish)
    assert config == ContinuousBatchingConfig(page_size=8, seed=3, varlen_compile_config=CompileConfig(mode="default"))
    config.page_size = 99
    assert wish == before
    assert ContinuousBatchingConfig.of() == ContinuousBatchingConfig()


BAD: list[tuple[str, Any]] = [
    ("page_size", 3),
    ("page_size", 0),
    ("page_size", -8),
    ("page_size", 16.0),
    ("page_size", True),
    ("num_blocks", 0),
    ("max_batch_tokens", 0),
    ("max_memory_percent", 0.0),
    ("max_memory_percent", 2.0),
    ("max_requests_per_batch", 0),
    ("max_blocks_per_request", -1),
    ("allow_block_sharing", 1),
    ("use_async_batching", "yes"),
    ("use_cuda_graph", (True,)),
    ("q_padding_interval_size", -1),
    ("kv_padding_interval_size", None),
    ("varlen_compile_config", 3),
    ("default_compile_level", 4),
    ("default_compile_level", -1),
    ("scheduler_type", "shortest_first"),
    ("scheduler_type", None),
    ("safety_margin", -0.1),
    ("safety_margin", 1.5),
    ("safety_margin", float("nan")),
    ("return_logprobs", None),
    ("seed", -1),
    ("seed", 1.5),
    ("auto_switch_to_flash", None),
    ("cpu_offload_space", -1.0),
    ("cpu_offload_space_safety_threshold", 1.1),
    ("max_queue_size", -1),
    ("per_request_processors", None),
    ("drop_unsupported_processors", 2),
    ("disable_nccl_graph_mixing", None),
    ("cpu_group_timeout", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    """The error is a ValueError that names the field and the value, whichever way the wish came in."""
    for wish in ({name: value}, ContinuousBatchingConfig(**{name: value})):
        with pytest.raises(ConfigError) as caught:
            ContinuousBatchingConfig.of(wish)
        assert caught.value.field == name and repr(value) in str(caught.value)


def test_every_field_is_checked() -> None:
    """No field is without a rule: each refuses a value of a type that none of them has."""
    for f in dataclasses.fields(ContinuousBatchingConfig):
        if f.name not in ("use_default_compile_configs", "max_cached_graphs", "block_size"):
            with pytest.raises(ConfigError):
                ContinuousBatchingConfig.of({f.name: object()})


def test_unknown_names_are_helped() -> None:
    """A misspelt setting names the nearest right one; a scheduler names the choices; the class itself raises TypeError."""
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        ContinuousBatchingConfig.of({"page_sizes": 8})
    with pytest.raises(ConfigError, match="fifo, prefill_first, priority"):
        ContinuousBatchingConfig.of({"scheduler_type": "fif"})
    with pytest.raises(ConfigError, match="dynamic"):
        ContinuousBatchingConfig(varlen_compile_config={"dynamics": True})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ContinuousBatchingConfig(page_sizes=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="got int"):
        ContinuousBatchingConfig.of(5)


@pytest.mark.parametrize(
    ("alias", "value", "field", "wanted"),
    [
        ("block_size", 16, "page_size", 16),
        ("max_cached_graphs", 4, "page_size", 256),
        ("use_default_compile_configs", True, "default_compile_level", 3),
        ("use_default_compile_configs", False, "default_compile_level", 0),
    ],
)
def test_deprecated_aliases_warn_and_keep_their_meaning(alias: str, value: Any, field: str, wanted: Any) -> None:
    """The warning names the alias; an engine made of the config does not warn again."""
    with pytest.warns(FutureWarning, match=alias):
        config = ContinuousBatchingConfig(**{alias: value})
    assert getattr(config, field) == wanted
    assert getattr(ContinuousBatchingConfig.of(config), field) == wanted


def test_facts_are_values() -> None:
    """Nothing in them changes; they can be sent to another process; none is optional."""
    facts = EngineFacts.of(page_size=8, num_blocks=10, available_bytes=1000, spending=(("KV cache", 700),), notes=("a note",))
    assert pickle.loads(pickle.dumps(facts)) == facts
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.page_size = 9  # type: ignore[misc]
    assert all(f.default is dataclasses.MISSING for f in dataclasses.fields(EngineFacts))
    with pytest.raises(TypeError):
        EngineFacts.of(page_sizes=8)


def test_facts_explain_where_the_bytes_go() -> None:
    """One line per item with its share, what is left, the capacity in tokens, and what could not be granted."""
    text = EngineFacts.of(
        page_size=8, num_blocks=10, available_bytes=2048, spending=(("KV cache", 1024),), notes=("use_cuda_graph is ignored",)
    ).explain()
    for part in ("2.0 KiB", "KV cache", "50.0%", "left over", "hold 80 tokens", "use_cuda_graph is ignored"):
        assert part in text


def test_the_page_about_settings_is_made_of_them() -> None:
    """docs/configuration.md says what the code says; `python -m tests.config_page > docs/configuration.md` renews it."""
    from tests import config_page

    assert config_page.PAGE.read_text() == config_page.page()
