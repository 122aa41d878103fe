"""``python -m jaxkv``: the command line."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; 2 means a refusal."""
    try:
        from jaxkv.demo import run as demo
    except ModuleNotFoundError as error:
        print(f"jaxkv demo needs {error.name}: pip install 'jaxkv[demo]'", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m jaxkv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    help_text = "serve a small hybrid model from one paged pool and compare with dense"
    demo.add_arguments(commands.add_parser("demo", help=help_text, description=help_text))
    options = parser.parse_args(arguments)
    try:
        return demo.run(options)
    except ValueError as error:
        print(f"jaxkv {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
