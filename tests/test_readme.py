"""The code of the README and of docs/clients.md is run as it stands, against the application that it starts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
CLIENTS = (Path(__file__).parents[1] / "docs" / "clients.md").read_text(encoding="utf-8")
PAGES = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", CLIENTS, re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(code, id=f"{heading} {number}")
    for heading, text in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [code for language, code in BLOCKS if language == "bash"]

pytestmark = [pytest.mark.real, pytest.mark.serve]


@pytest.fixture(scope="module")
def application(smollm2: Path) -> Iterator[None]:
    """`deployments/app.yaml` as it stands, on its own port, in a small cluster."""
    import ray
    import yaml
    from ray import serve

    from cb_ray.serving.app import build
    from cb_ray.serving.ending import shut_down

    config = yaml.safe_load((Path(__file__).parents[1] / "deployments" / "app.yaml").read_text(encoding="utf-8"))
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 1024 * 1024)
    try:
        serve.start(http_options=config["http_options"])
        (app,) = config["applications"]
        serve.run(build(app["args"]), name=app["name"], route_prefix=app["route_prefix"])
        yield
    finally:
        shut_down()


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    """`make run` and `make test` are the first things that the README names, and the first targets that there are."""
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    assert targets[:2] == ["run", "test"]
    assert [line.split()[1] for line in SHELL[0].splitlines()] == ["run", "test"]


def test_curl(application: None) -> None:
    """The README's curl gets an answer that names Paris, with right usage."""
    done = subprocess.run(["bash", "-c", SHELL[1]], capture_output=True, text=True, check=True, timeout=120)
    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("code", PYTHON, ids=["openai client", "handle call", "one process"])
def test_python(application: None, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each Python block of the README runs as it is printed."""
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("code", SNIPPETS)
def test_clients(application: None, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each Python block of docs/clients.md runs as it is printed, with the client that it is about."""
    exec(compile(code, "clients.md", "exec"), {"__name__": "clients"})
    assert capsys.readouterr().out


def test_the_page_of_clients_knows_them_all() -> None:
    """A heading that is renamed must not lose its code unseen."""
    assert [heading for heading, _ in PAGES] == [
        "curl",
        "The openai package",
        "The anthropic package",
        "LangChain",
        "Load generators",
        "Against OpenAI's surface",
    ]
    assert len(SNIPPETS) == 7
