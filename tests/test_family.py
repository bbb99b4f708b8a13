"""03 to 09 are 02 plus one technique and nothing else.

Below their docstrings, the differences between each of them and 02 must be those written down here.
A fix made in 02 and missed in a copy, a stray line, a moved statement or a renamed variable is
reported with its script and line. To accept a change that is meant: python tests/test_family.py
prints the new table; read it, then paste it.
"""

import ast
import difflib
import pprint
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "02_train_gpu.py"
TECHNIQUES = sorted(path.name for path in ROOT.glob("0[3-9]_*.py"))
VERBATIM = "positive_int output_path InMemory load_data build_model evaluate save".split()


def lines(script):
    """The lines of a script, those of its docstring blanked so that numbers stay right."""
    text = (ROOT / script).read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    below = text.splitlines()[docstring.end_lineno :]
    return [""] * docstring.end_lineno + below


def differences(script):
    """[(line of 02 before the place, lines of 02 replaced, number of lines put there), ...]."""
    base, copy = lines(BASE), lines(script)
    base, copy = [line for line in base if line], [line for line in copy if line]
    matcher = difflib.SequenceMatcher(None, base, copy, autojunk=False)
    return [
        (base[i - 1].strip(), [line.strip() for line in base[i:j]], l - k)
        for tag, i, j, k, l in matcher.get_opcodes()
        if tag != "equal"
    ]
