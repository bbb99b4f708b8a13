"""The changes that README.md shows for a loop of one's own, applied to it, run and compared."""

import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BASE = next(
    code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Net()" in code
)
DATA = f"""
import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST

def load(train):
    data = MNIST({str(ROOT / "data")!r}, train=train)
    return TensorDataset(data.data[:510, None] / 255, data.targets[:510])

train_set, test_set = load(True), load(False)
"""
PLAIN = [("nn.BatchNorm2d(16)", "nn.Identity()"), ("nn.Dropout(0.2)", "nn.Dropout(0.0)")]


def changes(number):
    """The blocks of a technique's section, as pairs (old lines, new lines)."""
    section = re.search(rf"^### {number}:.*?(?=^###? )", README, re.DOTALL | re.MULTILINE)[0]
    for block in re.findall(r"^   ```diff\n(.*?)^   ```", section, re.DOTALL | re.MULTILINE):
        lines = [line[3:] for line in block.splitlines(True)]
        yield tuple("".join(line[1:] or "\n" for line in lines if line[0] in f" {s}") for s in "-+")


def program(*numbers, also=()):
    """The README's loop with the changes of these techniques, then with others as well.

    A line that an earlier technique has put under autocast is changed there.
    """
    text = BASE
    for number in numbers:
        found = list(changes(number))
        assert len(found) >= 2, number
        for old, new in found:
            if old not in text:
                old, new = (textwrap.indent(lines, "    ") for lines in (old, new))
            assert text.count(old) == 1, f"{number}: {text.count(old)} places for\n{old}"
            text = text.replace(old, new)
    for old, new in also:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """trained(program): what it prints for each epoch, its weights, and all of its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("data.py").write_text(DATA)

    def trained(text, processes=0):
        Path("mine.py").write_text(text)
        if processes:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            command, env = [sys.executable, "-m", *launcher, "mine.py"], {"OMP_NUM_THREADS": "1"}
            options = {"env": {**os.environ, **env}, "capture_output": True, "text": True}
            done = subprocess.run(command, check=False, timeout=200, **options)
            assert done.returncode == 0, done.stdout + done.stderr
            output = done.stdout
        else:
            sys.modules.pop("data", None)
            runpy.run_path("mine.py", run_name="__main__")
            output = capsys.readouterr().out
        lines = re.findall(r"^(\d) (\d+\.\d+) (\d+\.\d+)%$", output, re.MULTILINE)
        assert [line[0] for line in lines] == ["0", "1", "2"], output
        weights = torch.load("model.pt", weights_only=True)
        return [tuple(map(float, line[1:])) for line in lines], weights, output

    return trained


def assert_close(found, expected, **tolerance):
    """The same epochs and weights; the number of BatchNorm's updates aside."""
    for epoch in zip(found[0], expected[0]):
        assert epoch[0][0] == pytest.approx(epoch[1][0], abs=1e-3)
    names = [name for name in expected[1] if not name.endswith("num_batches_tracked")]
    for name in names:
        torch.testing.assert_close(found[1][name], expected[1][name], **tolerance)


EXACT, ROUNDED = {"rtol": 0, "atol": 0}, {"rtol": 1e-3, "atol": 1e-5}


def test_on_a_device(trained):
    assert_close(trained(program("02")), trained(BASE), **EXACT)


def test_checkpointed(trained):
    """With the momentum, BatchNorm's running statistics are those of one update per step."""
    norm = "nn.BatchNorm2d(16, momentum=1 - 0.9**0.5)"
    assert f"`{norm}`" in README
    expected = trained(program("02"))
    found = trained(program("02", "03", also=[("nn.BatchNorm2d(16)", norm)]))
    assert_close(found, expected, **ROUNDED)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(trained(program("02", "03")), expected, **ROUNDED)


def test_accumulated(trained):
    """Without BatchNorm and dropout: also for the last batch, whose micro-batches are smaller."""
    found = trained(program("02", "04", also=PLAIN))
    assert_close(found, trained(program("02", also=PLAIN)), **ROUNDED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(dtype, trained):
    also = [("torch.float16 if old_gpu else torch.bfloat16", f"torch.{dtype}")]
    found, expected = trained(program("02", "05", also=also)), trained(program("02"))
    assert found[0][-1][0] == pytest.approx(expected[0][-1][0], abs=0.05)
    assert {weight.dtype for name, weight in found[1].items() if "num" not in name} == {
        torch.float32
    }
    assert not torch.equal(found[1]["head.2.weight"], expected[1]["head.2.weight"])


def test_dataparallel(trained):
    """Without two GPUs it changes nothing."""
    assert_close(trained(program("02", "06")), trained(program("02")), **EXACT)


def test_distributed(trained):
    """Two processes train the model that one trains, with the same printed results."""
    text = program("02", "07", also=[PLAIN[1], ("nn.BatchNorm2d(16)", "nn.GroupNorm(4, 16)")])
    one, two = trained(text, processes=1), trained(text, processes=2)
    assert_close(two, one, **ROUNDED)
    assert [epoch[1] for epoch in one[0]] == [epoch[1] for epoch in two[0]]
    trained(program("02", "07"), processes=2)  # with BatchNorm and dropout it runs


def test_three_techniques_in_one_loop(trained):
    """The loop that the README shows is the one that its changes make; two ranks train it."""
    text = program("02", "05", "07")
    assert f"```python\n{text}```" in README, text
    norm = ("nn.BatchNorm2d(16)", "nn.GroupNorm(4, 16)")
    found = trained(text.replace(*PLAIN[1]).replace(*norm), processes=2)
    expected = trained(program("02", "07", also=[PLAIN[1], norm]), processes=2)
    assert found[0][-1][0] == pytest.approx(expected[0][-1][0], abs=0.05)
    assert not torch.equal(found[1]["head.2.weight"], expected[1]["head.2.weight"])


def test_compiled(trained, monkeypatch):
    """In one graph, with the result of the eager model that drops the last batch as well."""
    graphs, compile = [], torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=count))
    found = trained(program("02", "08"))
    assert len(graphs) == 1
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert_close(found, trained(program("02", "08")), **ROUNDED)


def test_profiled(trained):
    found = trained(program("02", "09"))
    assert_close(found, trained(program("02")), **EXACT)
    row = re.search(r"^ +forward .* (\d+)  $", found[2], re.MULTILINE)
    assert row and row[1] == "3"
