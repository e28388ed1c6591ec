"""Print a completion script for a shell: `eval "$(cb-ray completion bash)"`.

Owns the one parser that knows all commands at once, which nothing else needs. The scripts are shtab's (extra `completion`).
"""

from __future__ import annotations

import argparse
import importlib
import sys

from .errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="whose completion")


def run(given: argparse.Namespace) -> int:
    """Raises ConfigError where shtab is not installed."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigError("completion scripts are made by shtab; pip install 'cb-ray[completion]' brings it") from error
    sys.stdout.write(shtab.complete(whole_parser(), given.shell) + "\n")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Every command with its options. A command whose libraries are not installed is left out."""
    from .cli import COMMANDS

    parser = argparse.ArgumentParser(prog="cb-ray")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        try:
            module = importlib.import_module(command.module)
        except ImportError:
            continue
        module.add_arguments(commands.add_parser(name, help=command.summary))
    return parser
