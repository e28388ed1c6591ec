"""New weights for a running engine: all of them or none, and not one token from old pages."""

from __future__ import annotations

import json
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from cb_ray.engine.generate import init_continuous_batching
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.engine.weights import Update
from cb_ray.engine.weights_source import PackedWeights, TensorWeights, fingerprint, pack_weights
from cb_ray.errors import EngineStoppedError, UpdateRunningError, WeightsError, WeightsLostError
from tests.engine.fakes import PATIENCE, Background
from tests.tiny import make_model

SMALL: dict[str, Any] = {"page_size": 4, "num_blocks": 96, "max_batch_tokens": 64}
PROMPT = list(range(20, 50))


def greedy(count: int = 6) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)


def alone(model: Any, prompt: list[int], count: int = 6) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def other(seed: int = 1, **overrides: Any) -> Any:
    """A model of the same shapes with other weights."""
    return make_model("llama", seed=seed, **overrides)


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: Any, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.fixture
def manager() -> Iterator[ContinuousBatchingManager]:
    manager = init_continuous_batching(make_model("llama"), greedy(), SMALL)
    manager.start()
    yield manager
    manager.destroy()


def ask(manager: ContinuousBatchingManager, prompt: list[int] = PROMPT, **more: Any) -> Any:
    output = manager.get_result(manager.add_request(prompt, **more), timeout=PATIENCE)
    assert output is not None and output.error is None, output
    return output


def as_directory(model: Any, tmp_path: Path, **how: Any) -> Path:
    model.save_pretrained(tmp_path / "new", **how)
    return tmp_path / "new"


SOURCES: dict[str, Callable[[Any, Path], Any]] = {
    "directory": as_directory,
    "several files": lambda model, path: as_directory(model, path, max_shard_size="100KB"),
    "tensors": lambda model, path: model.state_dict(),
    "arrays": lambda model, path: {name: value.numpy() for name, value in model.state_dict().items()},
    "packed": lambda model, path: pickle.loads(pickle.dumps(pack_weights(model.state_dict()))),
    "callable": lambda model, path: model.state_dict,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_after_an_update_every_token_is_of_the_new_weights(manager: ContinuousBatchingManager, kind: str, tmp_path: Path) -> None:
    """From each kind of source: the answers are the new model's own, and the old model's pages are not found any more."""
    new = other()
    old_answer, new_answer = alone(manager.model, PROMPT), alone(new, PROMPT)
    assert old_answer != new_answer
    assert ask(manager).generated_tokens == old_answer
    loaded = manager.update_weights(SOURCES[kind](new, tmp_path))
    assert loaded.version == 1 and loaded.num_bytes == sum(value.nbytes for value in new.state_dict().values())
    output = ask(manager)
    assert (output.generated_tokens, output.num_cached_tokens, output.weights_versions) == (new_answer, 0, (1,))
    assert ask(manager).num_cached_tokens == 28, "pages of the new weights are"
    assert same(manager.model, new.state_dict())


def test_the_same_weights_have_the_same_fingerprint_wherever_they_are_read(tmp_path: Path) -> None:
    """Files, tensors and arrays of one model; another model has another."""
    model, prints = make_model("llama"), set[str]()
    for seed in (1, 2):
        found = {Update(make(other(seed), tmp_path / str(seed) / kind), model).fingerprint for kind, make in SOURCES.items()}
        assert len(found) == 1
        prints |= found
    assert len(prints) == 2


def test_half_precision_is_converted_and_packed(tmp_path: Path) -> None:
    """A checkpoint in bfloat16 is cast into a float32 model; numpy has no such type, an object store none the less."""
    model, new = make_model("llama"), other().to(torch.bfloat16)
    packed = pickle.loads(pickle.dumps(pack_weights(new.state_dict())))
    assert isinstance(packed, PackedWeights) and len(packed) == len(new.state_dict())
    for source in (as_directory(new, tmp_path), packed):
        Update(source, model).apply()
        assert same(model, {name: value.float() for name, value in new.state_dict().items()})
        Update(other(2).state_dict(), model).apply()


def test_arrays_of_an_object_store_are_read_where_they_lie() -> None:
    """They are read only, and reading them warns of nothing and copies nothing."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = TensorWeights({"a": array, "empty": np.empty((0, 3), np.int64), "number": np.array(2.5)})
    assert weights.tensor("a").data_ptr() == array.ctypes.data and weights.tensor("a").tolist() == array.tolist()
    assert weights.shapes() == {"a": (3, 4), "empty": (0, 3), "number": ()} and float(weights.tensor("number")) == 2.5


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 255), max_size=40),
    st.integers(0, 39),
    st.integers(1, 255),
    st.sampled_from(["uint8", "int16", "int64"]),
)
def test_a_fingerprint_tells_of_any_changed_byte(values: list[int], at: int, change: int, dtype: str) -> None:
    """Whatever the type and the length."""
    first = np.array(values, dtype=dtype)
    second = first.copy()
    if values:
        second.view(np.uint8)[at % second.nbytes] ^= change
    one, two = (fingerprint(TensorWeights({"x": array}), ["x"]) for array in (first, second))
    assert (one == two) == (not values)


# ---- refusals ---------------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Any], Path], Any]:
    return lambda state, path: {key: value for key, value in state.items() if key != name}


def with_value(name: str, value: Any) -> Callable[[dict[str, Any], Path], Any]:
    return lambda state, path: {**state, name: value}


def directory(change: Callable[[Path], object], **overrides: Any) -> Callable[[dict[str, Any], Path], Any]:
    def make(state: dict[str, Any], path: Path) -> Path:
        made = as_directory(other(**overrides), path)
        change(made)
        return made

    return make


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lacking(path: Path) -> None:
    file = path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "model.norm.weight"}, file)


def of_another_rope(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 77.0
    (path / "config.json").write_text(json.dumps(config))


def raising() -> Any:
    raise ConnectionError("no route to the store")


BAD: dict[str, tuple[Callable[[dict[str, Any], Path], Any], str]] = {
    "a name is missing": (without("model.norm.weight"), "lacks model.norm.weight"),
    "a name too many": (with_value("lora.weight", torch.zeros(3)), "has, and the model has not, lora.weight"),
    "another shape": (with_value("model.norm.weight", torch.zeros(65)), r"shape \(64,\), got \(65,\)"),
    "no tensor": (with_value("model.norm.weight", [1.0]), "tensor or an array, got list"),
    "whole numbers": (with_value("model.norm.weight", torch.zeros(64, dtype=torch.int64)), "type torch.float32, got torch.int64"),
    "an array torch has no type for": (with_value("model.norm.weight", np.zeros(64, dtype="U3")), "no type like <U3"),
    "no directory": (lambda state, path: path / "nothing", "does not exist"),
    "an empty directory": (lambda state, path: path, "no config.json"),
    "a damaged file": (directory(truncated), "cannot be read"),
    "a file that lacks a name": (directory(lacking), "lacks model.norm.weight"),
    "another size": (directory(lambda path: None, intermediate_size=128), "intermediate_size=128"),
    "another meaning": (directory(of_another_rope), "rope_parameters"),
    "a callable that raises": (lambda state, path: raising, "no route to the store"),
    "a callable that gives another": (lambda state, path: lambda: raising, "another callable"),
    "a number": (lambda state, path: 7, "got int"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    manager: ContinuousBatchingManager, what: str, tmp_path: Path
) -> None:
    """A ValueError that says what is wrong; weights, version and cache are as before."""
    make, message = BAD[what]
    before, answer = copied(manager.model), ask(manager).generated_tokens
    with pytest.raises(WeightsError, match=message) as refused:
        manager.update_weights(make(dict(other().state_dict()), tmp_path))
    assert isinstance(refused.value, ValueError) and refused.value.http_status == 400
    assert same(manager.model, before)
    output = ask(manager)
    assert (output.generated_tokens, output.num_cached_tokens, output.weights_versions) == (answer, 28, (0,))


def breaking(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    from cb_ray.engine import weights

    put, done = weights._put, list[int]()

    def breaks(value: torch.Tensor, target: torch.Tensor) -> None:
        done.append(1)
        if len(done) == after:
            raise OSError("the disk is gone")
        put(value, target)

    monkeypatch.setattr(weights, "_put", breaks)


@pytest.mark.parametrize("reread", [False, True])
def test_a_copy_that_fails_half_way_is_undone(
    manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reread: bool
) -> None:
    """From the host's memory, or from where the old weights can be read again."""
    before, answer = copied(manager.model), ask(manager).generated_tokens
    old = as_directory(manager.model, tmp_path) if reread else None
    breaking(monkeypatch, 5)
    with pytest.raises(WeightsError, match="the disk is gone"):
        manager.update_weights(other().state_dict(), restore_from=old)
    assert same(manager.model, before)
    output = ask(manager)
    assert (output.generated_tokens, output.num_cached_tokens, output.weights_versions) == (answer, 28, (0,))


def test_an_engine_with_neither_old_nor_new_weights_fails(
    manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It never computes with a mixture: requests fail with the cause, and there is no engine until somebody starts one."""
    breaking(monkeypatch, 5)
    with pytest.raises(WeightsLostError, match="mixture"):
        manager.update_weights(other().state_dict(), restore_from=tmp_path / "gone")
    name = manager.add_request(PROMPT)
    output = manager.get_result(name, timeout=PATIENCE) if name else None
    assert output is None or (output.error is not None and "mixture" in output.error)
    assert isinstance(manager.fatal_error, WeightsLostError)


# ---- beside requests --------------------------------------------------------------------------------------------------------


def streamed(manager: ContinuousBatchingManager, prompt: list[int], count: int, enough: int) -> tuple[str, Any]:
    """A long request that has made at least `enough` tokens."""
    name = manager.add_request(prompt, max_new_tokens=count, streaming=True)
    assert name is not None
    while True:
        output = manager.get_result(name, timeout=PATIENCE)
        assert output is not None
        if len(output.generated_tokens) >= enough:
            return name, output


def test_a_stream_goes_on_through_an_update_and_tells_its_versions(manager: ContinuousBatchingManager) -> None:
    """With `recompute`, from some token on it says what the new model says to everything before; nothing is lost or repeated."""
    new = other()
    name, _ = streamed(manager, PROMPT, 300, 20)
    manager.update_weights(new.state_dict(), recompute=True, weights_version=7)
    *_, last = manager.request_id_iter(name)
    tokens = last.generated_tokens
    assert len(tokens) == 300 and last.weights_versions == (0, 7)
    old_tokens = alone(other(0), PROMPT, 300)
    agreed = next(i for i, (a, b) in enumerate(zip(tokens, old_tokens, strict=True)) if a != b)
    assert agreed >= 20
    switched = next(n for n in range(20, agreed + 1) if alone(new, [*PROMPT, *tokens[:n]], 300 - n) == tokens[n:])
    assert switched <= agreed


def test_two_updates_at_once_are_one_and_an_error(manager: ContinuousBatchingManager) -> None:
    """The second is told at once, and the first is not disturbed."""
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        inside.set()
        assert go_on.wait(PATIENCE)
        return other().state_dict()

    first = Background(lambda: manager.update_weights(slow, weights_version=3))
    assert inside.wait(PATIENCE)
    with pytest.raises(UpdateRunningError, match="version 3 is running") as refused:
        manager.update_weights(other().state_dict())
    assert refused.value.http_status == 409
    assert ask(manager).weights_versions == (0,), "requests go on while the first one reads"
    go_on.set()
    assert first.value().version == 3
    assert ask(manager).weights_versions == (3,)


def test_an_engine_that_does_not_run_takes_weights_too(manager: ContinuousBatchingManager) -> None:
    """Stopped with its cache kept, or for good: after the next start nothing old is found, and the count goes on."""
    new = other()
    ask(manager)
    manager.stop(keep_for_next_session=True)
    assert manager.update_weights(new.state_dict()).version == 1
    manager.start()
    output = ask(manager)
    assert (output.generated_tokens, output.num_cached_tokens, output.weights_versions) == (alone(new, PROMPT), 0, (1,))
    manager.stop()
    assert manager.update_weights(other(2).state_dict()).version == 2
    manager.start()
    assert ask(manager).weights_versions == (2,)
    manager.destroy()
    with pytest.raises(EngineStoppedError):
        manager.update_weights(new.state_dict())


def test_a_version_that_comes_back_finds_no_page(manager: ContinuousBatchingManager) -> None:
    """Weights are put back under their old number: what was cached under it may be a mixture, so it is not found, and streams
    that run compute again."""
    old, new = copied(manager.model), other()
    answer = ask(manager).generated_tokens
    manager.update_weights(new.state_dict())
    name, _ = streamed(manager, PROMPT[::-1], 60, 3)
    manager.update_weights(old, weights_version=0)
    output = ask(manager)
    assert (output.generated_tokens, output.num_cached_tokens, output.weights_versions) == (answer, 0, (0,))
    *_, last = manager.request_id_iter(name)
    assert last.weights_versions == (1, 0) and len(last.generated_tokens) == 60


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """A checkpoint names them once; a state dict names both; two different ones are refused."""
    model, new = make_model("llama", tie_word_embeddings=True), other(tie_word_embeddings=True)
    for source in (as_directory(new, tmp_path), new.state_dict(), {"lm_head.weight": None}):
        if isinstance(source, dict) and source.get("lm_head.weight") is None:
            source = {name: value for name, value in new.state_dict().items() if name != "model.embed_tokens.weight"}
        Update(source, model).apply()
        assert same(model, new.state_dict())
        Update(other(2, tie_word_embeddings=True).state_dict(), model).apply()
    with pytest.raises(WeightsError, match="two different ones"):
        Update({**new.state_dict(), "lm_head.weight": torch.zeros_like(new.lm_head.weight)}, model)


def test_names_that_only_transformers_knows_are_loaded_by_it(manager: ContinuousBatchingManager, tmp_path: Path) -> None:
    """A checkpoint of the inner model, or in torch's own format, is read as transformers reads it, while the engine stands still."""
    new = other()
    path = as_directory(new, tmp_path)
    file = path / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    manager.update_weights(path)
    assert ask(manager).generated_tokens == alone(new, PROMPT)
    file.unlink()
    torch.save(other(2).state_dict(), path / "pytorch_model.bin")
    manager.update_weights(path)
    assert ask(manager).generated_tokens == alone(other(2), PROMPT)
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="missing keys"):
        manager.update_weights(path)


def test_a_hub_revision_is_that_very_commit(
    manager: ContinuousBatchingManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`org/name@revision` takes the revision's files from the hub's cache, without a network; an unknown one is refused."""
    import huggingface_hub.constants

    commits = {"a" * 40: other(1), "b" * 40: other(2)}
    for commit, model in commits.items():
        model.save_pretrained(tmp_path / "models--org--tiny" / "snapshots" / commit)
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "step-2").write_text("b" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    from cb_ray.engine import weights_source

    fetch = weights_source.snapshot_download
    monkeypatch.setattr(weights_source, "snapshot_download", lambda *args, **kwargs: fetch(*args, cache_dir=tmp_path, **kwargs))
    for revision, model in (("a" * 40, commits["a" * 40]), ("step-2", commits["b" * 40])):
        manager.update_weights(f"org/tiny@{revision}")
        assert ask(manager).generated_tokens == alone(model, PROMPT)
    with pytest.raises(WeightsError, match="org/tiny at step-9 cannot be fetched"):
        manager.update_weights("org/tiny@step-9")
