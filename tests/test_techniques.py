"""What each technique promises beyond the result of 02.

python tests/test_techniques.py    prints the peaks of memory that README.md shows
"""

import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import SHORT, load, run
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

QUICK = ["--device", "cpu", "--limit", "400", "--batch-size", "96", "--epochs", "2"]


class Recorder(torch.optim.SGD):
    """An optimizer that leaves the weights alone and keeps the gradients it is given."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.gradients = []

    def step(self, closure=None):
        for group in self.param_groups:
            grads = [parameter.grad.flatten() for parameter in group["params"]]
            self.gradients.append(torch.cat(grads))


def batches(*sizes, dtype=torch.float64):
    """A loader of batches of these sizes."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (
            torch.randn(size, 1, 28, 28, generator=generator, dtype=dtype),
            torch.randint(10, (size,), generator=generator),
        )
        for size in sizes
    ]
    return DataLoader(made, batch_size=None)


def gradients(script, loader, *extra):
    """The gradients of every update of one epoch in float64, the loss and the scheduler's steps."""
    module = load(script)
    torch.manual_seed(0)
    model = module.build_model(3).double()
    optimizer = Recorder(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    loss = module.train(model, loader, optimizer, scheduler, torch.device("cpu"), *extra)
    return torch.stack(optimizer.gradients), loss, scheduler.last_epoch


@pytest.mark.parametrize("accum", [1, 3, 4, 7, 50, 64])
def test_accumulated_gradient_is_that_of_the_batch(accum):
    """Also with an uneven last piece, an uneven last batch and a batch smaller than accum."""
    loader = batches(50, 50, 23, 2)
    expected, loss, steps = gradients("02_train_gpu.py", loader)
    found, found_loss, found_steps = gradients("04_grad_accum.py", loader, accum)
    assert steps == found_steps == 4
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert found_loss == pytest.approx(loss, rel=1e-6)


def test_accumulation_evaluates_by_the_piece(monkeypatch):
    module = load("04_grad_accum.py")
    monkeypatch.setattr(sys, "argv", ["04_grad_accum.py", *QUICK, "--accum", "5"])
    _, loader = module.load_data(module.parse_args())
    assert max(len(targets) for _, targets in loader) == 20  # 96 / 5, rounded up


def peak_of_a_step(script, *extra, width=8, depth=0):
    """Bytes at the peak of a step of 02's batch: the running sum of what the profiler saw."""
    module = load(script)
    torch.manual_seed(0)
    model = module.build_model(width)
    for _ in range(depth):  # a deep stack: so many more convolutions after the first
        model.insert(
            2, torch.nn.Sequential(torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU())
        )
    model = model.to(memory_format=torch.channels_last)
    optimizer = Recorder(model.parameters())  # no state: the peak is that of a first step
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    loader = batches(480, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module.train(model, loader, optimizer, scheduler, torch.device("cpu"), *extra)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events))


def test_peak_of_a_step(monkeypatch):
    """03 and 04, at their default flags, need less than 02."""
    base = peak_of_a_step("02_train_gpu.py")
    for script, flag, at_most in (
        ("03_memory.py", "segments", 0.85),
        ("04_grad_accum.py", "accum", 0.5),
    ):
        monkeypatch.setattr(sys, "argv", [script])
        default = getattr(load(script).parse_args(), flag)
        assert peak_of_a_step(script, default) < at_most * base


def test_memory_report(short):
    """Bytes by hand for a width of 8."""
    parameters = 4 * (8 * 37 + 16 * 73 + 256 * 401 + 10 * 257)
    state = 2 * parameters + 8 * 4  # two moments, and a step count for each tensor
    lines = short("03_memory.py")[0].stdout.splitlines()[-2:]
    assert lines[0] == (
        f"parameters and gradients, {parameters:,} bytes each | optimizer state, {state:,} bytes"
    )
    assert lines[1].startswith("peak of a step | only a CUDA device counts it")


@pytest.mark.gpu
def test_memory_report_on_a_gpu():
    """The peak falls with segments."""
    done = run("03_memory.py", "--epochs", "1", "--limit", "960")
    peaks = re.findall(r"peak of a step, \d segments \| ([\d,]+) bytes", done.stdout)
    without, checkpointed = (int(size.replace(",", "")) for size in peaks)
    assert checkpointed < 0.95 * without
    assert "after empty_cache | allocated" in done.stdout


class Calls:
    """A disabled GradScaler that notes in which order it is called."""

    def __init__(self, log):
        self.log, self.scaler = log, torch.amp.GradScaler("cpu", enabled=False)

    def __getattr__(self, name):
        self.log.append(name)
        return getattr(self.scaler, name)


def test_amp_order(monkeypatch):
    log, module = [], load("05_amp.py")
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *a, **k: (log.append("clip"), clip(*a, **k))
    )
    model = module.build_model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    loader = batches(8, dtype=torch.float32)
    module.train(
        model, loader, optimizer, scheduler, torch.device("cpu"), torch.bfloat16, Calls(log)
    )
    assert log == ["scale", "unscale_", "clip", "step", "get_scale", "update", "get_scale"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_amp_skips_a_step_that_overflows():
    module = load("05_amp.py")
    torch.manual_seed(0)
    model = module.build_model(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    good, bad = batches(8, dtype=torch.float32), batches(8, dtype=torch.float32)
    bad.dataset[0][0][0] = torch.inf

    def train(loader):
        args = optimizer, scheduler, torch.device("cpu"), torch.bfloat16, scaler
        module.train(model, loader, *args)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return weights, scheduler.last_epoch, scaler.get_scale()

    weights, steps, scale = train(good)
    assert (steps, scale) == (1, 1024)
    same, steps, scale = train(bad)
    assert torch.equal(same, weights)
    assert (steps, scale) == (1, 512)
    moved, steps, scale = train(good)
    assert not torch.equal(moved, weights) and moved.isfinite().all()
    assert (steps, scale) == (2, 512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_scales_only_float16(dtype, monkeypatch, capsys, tmp_path):
    made, real = [], torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda *a, **k: made.append(real(*a, **k)) or made[-1]
    )
    monkeypatch.setattr(sys, "argv", ["05_amp.py", *QUICK, "--dtype", dtype])
    load("05_amp.py").main()
    assert [scaler.is_enabled() for scaler in made] == [dtype == "float16"]
    assert f"| torch.{dtype}\n" in capsys.readouterr().out


def test_compile_compiles_once(short, monkeypatch):
    """One graph for all of training, and none for evaluation; nothing compiles anew."""
    done = short("08_compile.py")[0]
    assert "ecompil" not in done.stderr and "break" not in done.stderr, done.stderr
    graphs, compile = [], torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model, mode: compile(model, backend=count))
    monkeypatch.setattr(sys, "argv", ["08_compile.py", *QUICK])
    load("08_compile.py").main()
    assert len(graphs) == 1


def test_compile_without_a_compiler(tmp_path):
    """torch says it, as the README quotes it."""
    env = {"PATH": "", "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = run("08_compile.py", *SHORT, env=env)
    assert done.returncode != 0 and "No working C++ compiler found" in done.stderr


def recorded(path):
    """The names of the events in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if "name" in event]


def test_profile(short):
    done, path = short("09_profile.py")
    names = recorded(path.parent / "trace.json")
    for name in "forward", "backward", "optimizer":
        assert names.count(name) == 3  # of 40: the file is as large however many epochs there are
    lines = [line for line in done.stdout.splitlines() if " | " not in line]
    shares = [float(match[1]) for match in map(re.compile(r".*? ([\d.]+)% ").match, lines) if match]
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True) and shares[0] > 10
    parts = re.findall(r"(\w[\w ]*) (\d+)%", done.stdout.splitlines()[-2])
    assert [name for name, _ in parts] == ["forward", "backward", "optimizer", "data or waiting"]
    assert sum(int(share) for _, share in parts) == pytest.approx(100, abs=2)


def test_profile_never_spans_an_evaluation(monkeypatch, tmp_path):
    """Four steps an epoch are the fewest it takes; evaluation alone calls argmax."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *QUICK])
    load("09_profile.py").main()
    names = recorded(tmp_path / "trace.json")
    assert "aten::convolution" in names and "aten::argmax" not in names
    assert sum(name.startswith("ProfilerStep#") for name in names) == 3


def test_profile_that_cannot_be_written(monkeypatch):
    """The profiler only logs it, so the script looks."""
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *QUICK, "--trace", "/nowhere/trace.json"])
    with pytest.raises(FileNotFoundError, match=r"/nowhere/trace\.json"):
        load("09_profile.py").main()


if __name__ == "__main__":
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for sizes in {"width": 8}, {"width": 64}, {"width": 64, "depth": 32}:
        print(sizes, "02", peak_of_a_step("02_train_gpu.py", **sizes))
        for segments in 2, 3, 4, 6, 9:
            print("03", segments, peak_of_a_step("03_memory.py", segments, **sizes))
        print("04", peak_of_a_step("04_grad_accum.py", 4, **sizes))
        print("05", peak_of_a_step("05_amp.py", torch.bfloat16, scaler, **sizes), flush=True)
