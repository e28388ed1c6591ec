"""The command `cb-ray`. Owns the list of subcommands; each lives in a module of its own, imported when it is called.

A subcommand is a module with `add_arguments(parser)` and `run(given) -> int`; its docstring's first line is its help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass

from . import __version__
from .errors import CbRayError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: where it lives, and its line in the list."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("cb_ray.serving.command", "serve a model over HTTP with an OpenAI-compatible API"),
    "chat": Command("cb_ray.serving.chat_command", "talk to a running server from the terminal"),
    "verify": Command("cb_ray.bench.verify", "prove that a model gives the same tokens here as with model.generate"),
    "drain": Command("cb_ray.serving.drain", "empty the Ray node on this machine before it goes"),
    "plan": Command("cb_ray.foresight.command", "how many replicas, which routing: the real scheduler in simulated time"),
    "replay": Command("cb_ray.foresight.replay", "send a request log again, to a server or to the simulator"),
    "bench": Command("cb_ray.bench.command", "measure the engine on this machine"),
    "completion": Command("cb_ray.completion", "print a completion script for a shell"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0 well, 1 an error that was explained, 2 a misused command line."""
    listing = "\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="cb-ray",
        description="Continuous-batching LLM inference with transformers' API.",
        epilog=f"commands:\n{listing}\n\ncb-ray COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cb-ray {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)

    name: str = chosen.command
    module = importlib.import_module(COMMANDS[name].module)
    subparser = argparse.ArgumentParser(prog=f"cb-ray {name}", description=(module.__doc__ or "").split("\n")[0])
    module.add_arguments(subparser)
    try:
        return module.run(subparser.parse_args(chosen.rest))
    except CbRayError as error:
        print(f"cb-ray {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
