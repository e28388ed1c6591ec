"""The command line: what it refuses before anything starts, and that it starts nothing it need not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cb_ray import __version__
from cb_ray.cli import COMMANDS, main
from cb_ray.errors import ConfigError
from cb_ray.serving.command import read_applications

APP = """\
applications:
  - name: cb-ray
    import_path: cb_ray.serving.app:build
    args: {model: "demo:smollm2-135m", engine: {page_size: 32}}
  - name: other
    import_path: somebody.elses:app
    args: {anything: goes}
"""


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is not listed does not exist for a newcomer."""
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())


def test_the_help_loads_nothing_heavy() -> None:
    """`cb-ray --version` answers at once."""
    script = "import sys\nfrom cb_ray.cli import main\ntry:\n    main(['--version'])\nfinally:\n    print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    version, modules = result.stdout.splitlines()
    assert version == f"cb-ray {__version__}"
    assert not {"torch", "transformers", "ray", "fastapi"} & set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "engine.page_sizes=3"], "did you mean 'page_size'?"),
        (["--set", "engine.page_size=many"], "page_size"),
        (["--set", "engine.page_size"], "--set needs KEY=VALUE"),
        (["--set", "model.x=1"], "model is a value, not a group"),
        (["no/such.yaml"], "cannot read no/such.yaml: No such file"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve itself would report success and fail later, in a log."""
    assert main(["serve", "--check", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("cb-ray serve: ")
    assert words in captured.err


def test_settings_on_the_command_line_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """`--set a.b=value` nests as YAML does and reads values as YAML does."""
    given = ["--set", "engine.page_size=32", "--set", "pool.max_replicas=2", "--served-model-name", "chat"]
    assert main(["serve", "--check", "org/model", *given]) == 0
    assert "cb-ray: serves org/model as chat" in capsys.readouterr().out


def test_our_applications_in_a_file_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other applications in the same file are left to Serve; a file without one of ours is a mistake."""
    file = tmp_path / "app.yaml"
    file.write_text(APP)
    assert list(read_applications(file)) == ["cb-ray"]
    assert main(["serve", "--check", str(file)]) == 0
    file.write_text(APP.replace("page_size", "page_sizes"))
    assert main(["serve", "--check", str(file)]) == 1
    assert "did you mean 'page_size'?" in capsys.readouterr().err
    file.write_text("applications: []")
    with pytest.raises(ConfigError, match="no application with import_path"):
        read_applications(file)


def test_a_file_and_settings_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file would win silently, since Serve reads it."""
    file = tmp_path / "app.yaml"
    file.write_text(APP)
    assert main(["serve", "--check", str(file), "--set", "max_queue_size=3"]) == 1
    assert "change them there" in capsys.readouterr().err


def test_the_deployments_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    """What `deployments/` ships is what `build` accepts."""
    files = sorted((Path(__file__).parent.parent / "deployments").glob("*.yaml"))
    for file in files:
        assert main(["serve", "--check", str(file)]) == 0, capsys.readouterr().err
    assert files or not (Path(__file__).parent.parent / "deployments").exists()


def test_what_is_served_can_be_saved_and_served_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`cb-ray serve MODEL --save FILE` writes a file that `serve run` takes, with the same settings; without it the cache has one."""
    file = tmp_path / "app.yaml"
    assert main(["serve", "--check", "--set", "engine.page_size=32", "--port", "8123", "--save", str(file)]) == 0
    assert f"settings: {file}" in capsys.readouterr().err
    assert read_applications(file) == {"cb-ray": {"model": "demo:smollm2-135m", "engine": {"page_size": 32}}}
    assert "port: 8123" in file.read_text()
    assert main(["serve", "--check", str(file)]) == 0
    assert main(["serve", "--check", "--save", "/proc/nowhere/app.yaml"]) == 1


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The script for a shell has the commands, and the options of each."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "--served-model-name" in script and "overload" not in script
