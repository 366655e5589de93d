"""Python text as `ruff format` leaves it."""

import ast
import subprocess

from ruff.__main__ import find_ruff_bin

LINE_LENGTH = 120


def formatted(source: str, name: str = "emitted.py") -> str:
    """`source`, parsed and formatted. Raises SyntaxError, with the text, where it is no Python: a fault of ours."""
    ast.parse(source, name)
    options = ["--isolated", "--line-length", str(LINE_LENGTH), "--stdin-filename", name]
    done = subprocess.run(
        [find_ruff_bin(), "format", *options, "-"], input=source, capture_output=True, text=True, check=True
    )
    return done.stdout
