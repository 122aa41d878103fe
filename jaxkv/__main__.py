"""``python -m jaxkv``: the command line."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, override

COMMANDS = {
    "plan": ("jaxkv._src.cli.plan", "say which requests fit into the memory, and what to change"),
    "demo": ("jaxkv._src.demo.run", "serve a small hybrid model from one paged pool, and check it"),
    "env": (
        "jaxkv._src.env",
        "say what is installed, and which kernels run here, for a bug report",
    ),
}


class UsageError(Exception):
    """An unknown argument, or one without its value."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` instead of ending the process."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def _version() -> str:
    try:
        return importlib.metadata.version("jaxkv")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "that is not installed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its exit status; 2 means a refusal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(prog="python -m jaxkv", description="Paged KV caches for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxkv {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = None
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if arguments[:1] == [name]:  # others may need packages that are not installed
            try:
                run = importlib.import_module(module)
            except ModuleNotFoundError as error:
                return _refuse(f"{name} needs {error.name}: pip install 'jaxkv[demo]'")
            run.add_arguments(command)
    try:
        options, rest = parser.parse_known_args(arguments)
        if run is None:  # argparse accepted an option before the command
            parser.error("give the command first")
        if rest:
            commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    except UsageError as error:
        if "--json" not in arguments:
            return _refuse(str(error), prefix="")
        print(json.dumps({"error": str(error)}, indent=2))
        return 2
    try:
        status = run.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `| head`; without this, Python complains again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, NotImplementedError) as error:
        return _refuse(f"{options.command}: {error}")


def _refuse(message: str, prefix: str = "jaxkv ") -> int:
    print(f"{prefix}{message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
