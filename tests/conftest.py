"""What the tests share: how a user runs a script and what it prints."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

ROOT = Path(__file__).resolve().parent.parent
FAMILY = sorted(path.name for path in ROOT.glob("0[2-9]_*.py"))
SHORT = ["--device", "cpu", "--limit", "2000", "--epochs", "2", "--batch-size", "96"]
COMPILED = tempfile.TemporaryDirectory()  # torch's own folder may hold another processor's code
# A warning is a failure if it points to a line of ours; one that torch raises inside itself is not,
# even where torch is in a virtual environment inside this folder.
OUR_WARNING = re.compile(
    rf"^{re.escape(str(ROOT))}[\\/](tests[\\/])?[^\\/:]+\.py:\d+: \w*Warning: .*", re.MULTILINE
)
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Your own project\n")[1]
SECTION = SECTION.split("\n## ")[0]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
IN_PAIRS = {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "recompiles,graph_breaks"}
HEADER = re.compile(
    r"(\S+) \| torch (\S+) \| ([\d,]+) images \| batch (\d+) \| width (\d+)(?: \| (.*))?"
)
EPOCH = re.compile(
    r"epoch (\d+)/(\d+) \| loss (\d+\.\d{4}) \| accuracy (\d+\.\d\d)% \| ([\d,]+) images/s"
    r"(?: \| peak memory (\d+) MiB)?"
)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "multigpu: needs two CUDA GPUs")


def pytest_addoption(parser):
    parser.addoption("--reversed", action="store_true", help="run the last test first")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--reversed"):
        items.reverse()
    for item in items:
        for mark, gpus in ("gpu", 1), ("multigpu", 2):
            if item.get_closest_marker(mark) and torch.cuda.device_count() < gpus:
                item.add_marker(pytest.mark.skip(reason=f"needs {gpus} CUDA GPU(s)"))


def load(script):
    """Import a script, whose name is no identifier, as a module."""
    name = f"script_{Path(script).name[:2]}"
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block(word):
    """The only block of code of README.md's section "Your own project" that contains the word."""
    [found] = [code for code in BLOCKS if word in code]
    return found


def execute(code, **names):
    """Run code in a namespace of its own, which is returned."""
    names = {**vars(lr_scheduler), "torch": torch, "nn": nn, "np": np, **names}
    names.setdefault("device", torch.device("cpu"))
    exec(code, names)  # noqa: S102
    return names


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def command(script, *flags, torchrun=("--standalone", "--nproc_per_node=1"), python=sys.executable):
    """The command line a user types. 07 goes through torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", *torchrun] if Path(script).name.startswith("07") else []
    )
    return [python, *launcher, str(ROOT / script), *map(str, flags)]


def run(script, *flags, torchrun=("--standalone", "--nproc_per_node=1"), env=None, **options):
    """Run a script to its end and return the process, with its output as text."""
    return subprocess.run(
        command(script, *flags, torchrun=torchrun),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1" if Path(script).name.startswith("07") else "2",
            "TORCHINDUCTOR_CACHE_DIR": COMPILED.name,
            "PYTHONWARNINGS": "default",  # shows every kind of warning, once for each line
            **(env or {}),
        },
        capture_output=True,
        text=True,
        check=False,
        **{"timeout": 300, **options},
    )


def results(done):
    """The epochs of a finished run as tuples (epoch, loss, accuracy), once all lines are checked."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert not OUR_WARNING.search(done.stderr), done.stderr
    lines = done.stdout.splitlines()
    assert any(HEADER.fullmatch(line) for line in lines), done.stdout
    epochs = [EPOCH.fullmatch(line) for line in lines if line.startswith("epoch")]
    assert epochs and all(epochs), done.stdout
    return [(int(epoch[1]), float(epoch[3]), float(epoch[4])) for epoch in epochs]


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """short(script): the process and the saved weights of its short run. All run once, in pairs.

    The folder "new" is missing at first: each script creates it.
    """
    folder, runs = tmp_path_factory.mktemp("short") / "new", {}
    extra = {
        "07": ["--checkpoint", folder / "07" / "run.pt"],
        "09": ["--trace", folder / "09" / "trace.json"],
    }

    def start(script):
        flags = [*SHORT, "--save", folder / script, *extra.get(script[:2], [])]
        return run(script, *flags, env=IN_PAIRS, cwd=folder.parent)

    def short(script):
        if not runs:
            names = sorted(FAMILY, key=lambda name: name != script)  # what was asked for first
            runs.update({name: pool.apply_async(start, [name]) for name in names})
        return runs[script].get(), folder / script

    with ThreadPool(2) as pool:
        yield short


class Imitated(type):
    """A type in place of torch.device that makes nothing but the CPU, for isinstance as well."""

    def __call__(cls, *name):
        return cls.real("cpu")

    def __instancecheck__(cls, value):
        return isinstance(value, cls.real)


@pytest.fixture
def imitated_gpu(monkeypatch):
    """Lets a script's branches for CUDA run on the CPU: with --device cuda, it gets the CPU."""
    device, calls = torch.device, []

    def call(name, value):
        monkeypatch.setattr(torch.cuda, name, lambda *args: calls.append(name) or value)

    monkeypatch.setattr(torch, "device", Imitated("device", (), {"real": device}))
    for name in "reset_peak_memory_stats", "empty_cache":
        call(name, None)
    for name in "max_memory_allocated", "memory_allocated", "memory_reserved":
        call(name, 2**20)
    call("get_device_capability", (7, 5))
    call("device_count", 1)
    return calls
