"""``python -m jaxkv``: the command line."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, override

COMMANDS = {
    "plan": ("jaxkv.cli.plan", "say how long and how many requests fit, and what to change"),
    "demo": ("jaxkv.demo.run", "serve a small hybrid model from one paged pool, check it"),
}


class UsageError(Exception):
    """Arguments that a command does not have, or that lack a value."""


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with arguments, rather than exit."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; 2 means a refusal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(prog="python -m jaxkv", description="Paged KV caches for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = None
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if arguments[:1] == [name]:  # the others may need what is not installed
            try:
                run = importlib.import_module(module)
            except ModuleNotFoundError as error:
                return _refuse(f"{name} needs {error.name}: pip install 'jaxkv[demo]'")
            run.add_arguments(command)
    try:
        options = parser.parse_args(arguments)
        if run is None:  # an option of ours before the command; argparse took it, we have none
            parser.error("give the command first")
    except UsageError as error:
        if "--json" not in arguments:
            return _refuse(str(error), prefix="")
        print(json.dumps({"error": str(error)}, indent=2))
        return 2
    try:
        status = run.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`, say; Python would complain once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, NotImplementedError) as error:
        return _refuse(f"{options.command}: {error}")


def _refuse(message: str, prefix: str = "jaxkv ") -> int:
    print(f"{prefix}{message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
