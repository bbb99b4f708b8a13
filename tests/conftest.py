"""What all tests share: how a user runs a script, what it prints, and tiny data sets."""

import functools
import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("0*.py"))
FAMILY = SCRIPTS[1:]  # 02 and the scripts that are 02 plus one technique
SHORT = ("--device", "cpu", "--limit", "2000", "--epochs", "2", "--batch-size", "96")
HEADER = re.compile(r"(\S+) \| torch (\S+) \| ([\d,]+) images \| batch (\d+) \| width (\d+)")
EPOCH = re.compile(
    r"epoch (\d+)/(\d+) \| loss (\d+\.\d{4}) \| accuracy (\d+\.\d\d)% \| ([\d,]+) images/s"
    r" \| gpu memory (\d+) MiB"
)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "multigpu: needs two CUDA GPUs")


def pytest_collection_modifyitems(items):
    for item in items:
        for mark, gpus in ("gpu", 1), ("multigpu", 2):
            if item.get_closest_marker(mark) and torch.cuda.device_count() < gpus:
                item.add_marker(pytest.mark.skip(reason=f"needs {gpus} CUDA GPU(s)"))


def load(script):
    """Import a script, whose name is no identifier, as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{script[:2]}", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, *flags, launcher=("-W", "error"), timeout=300, **options):
    """Run a script as a user does, warnings being errors; return the finished process."""
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / script), *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def torchrun(*flags, processes=2, options=("--standalone",), script="07_ddp.py", **kwargs):
    """Run 07 under torchrun, one thread a process."""
    launcher = ("-m", "torch.distributed.run", *options, f"--nproc_per_node={processes}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    return run(script, *flags, launcher=launcher, env=env, **kwargs)


def results(done):
    """The epoch lines of a finished process as tuples (epoch, loss, accuracy), the form checked."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(HEADER.fullmatch(line) for line in lines), done.stdout
    epochs = [EPOCH.fullmatch(line) for line in lines if line.startswith("epoch")]
    assert epochs and all(epochs), done.stdout
    return [(int(match[1]), match[3], match[4]) for match in epochs]


@functools.cache
def short(script):
    """The short-iteration run of a script on the CPU, made once for all tests that look at it."""
    return torchrun(*SHORT, processes=1) if script == "07_ddp.py" else run(script, *SHORT)


def write_mnist(folder, train=1003, test=101):
    """Write a random but learnable data set of any size in MNIST's own, unpacked, file format."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in ("train", train), ("t10k", test):
        targets = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        images = torch.randint(64, (count, 28, 28), generator=generator, dtype=torch.uint8)
        for image, target in zip(images, targets):
            image[2 * target : 2 * target + 4] += 128  # a bar, the higher the smaller the digit
        header = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        header = struct.pack(">2i", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + targets.numpy().tobytes())
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A data folder of 1003 training and 101 test images, sizes that nothing divides."""
    return write_mnist(tmp_path_factory.mktemp("tiny"))
