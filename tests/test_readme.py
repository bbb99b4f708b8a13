"""What the README says of files, flags, commands and differences is so."""

import difflib
import re

import pytest
from conftest import FAMILY, ROOT
from test_family import code

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_exist():
    for path in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\b(?:slurm/\w+\.sh|\d\d_\w+\.py)\b", README):
        assert (ROOT / path).exists(), path


def test_flags_exist():
    """Every flag after the name of a script is one of its flags."""
    commands = re.findall(r"\b(\d\d_\w+\.py)((?: +--?[\w-]+(?:[ =][\w.]+)?)+)", README)
    assert len(commands) >= 3
    for script, flags in commands:
        text = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"--[\w-]+", flags):
            assert f'add_argument("{flag}"' in text, f"{script} {flag}"
    for flag in re.findall(r"`(--[\w-]+)[ `=]", README):
        sources = [*ROOT.glob("0*.py"), *ROOT.glob("slurm/*.sh")]
        known = "".join(path.read_text(encoding="utf-8") for path in sources)
        assert flag in known or flag in ("--local_rank", "--shm-size", "--help"), flag


def test_first_commands_are_those_of_ci():
    lines = README.splitlines()
    commands = [line.strip() for line in lines[:15] if line.startswith("    ")]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert all(f"{command} || exit 1" in ci for command in commands)


@pytest.mark.parametrize("script", FAMILY[1:])
def test_lines_replaced_and_added(script):
    base, copy = ([line.strip() for _, line in code(name)] for name in (FAMILY[0], script))
    matcher = difflib.SequenceMatcher(None, base, copy, autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    replaced = sum(j - i for _, i, j, _, _ in changes)
    added = sum(j - i for _, _, _, i, j in changes)
    row = next(line for line in README.splitlines() if line.startswith(f"| [{script}]"))
    assert f"| {replaced} / {added} |" in row


def test_versions_are_those_of_the_metadata():
    """The oldest versions stand in 02's metadata block; other scripts are held to it."""
    text = (ROOT / FAMILY[0]).read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=(.*)"\n# dependencies = \["(.*)", "(.*)"\]', text)
    python, torch, torchvision = oldest.groups()
    versions = f"Python {python}, {torch.replace('>=', ' ')} and {torchvision.replace('>=', ' ')}"
    assert versions in README
