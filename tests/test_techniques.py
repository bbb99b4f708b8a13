"""What each technique promises beyond the result of 02."""

import json
import re
import sys

import pytest
import torch
from conftest import SHORT, fails, load, run
from torch.optim.lr_scheduler import LambdaLR


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
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 1, 28, 28, generator=generator, dtype=dtype),
            torch.randint(10, (size,), generator=generator),
        )
        for size in sizes
    ]


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


def test_memory_report_is_exact(short):
    """Bytes by hand for batches of 96 images and a width of 8, tensor by tensor."""
    parameters = 8 * 26 + 16 * 73 + 256 * 401 + 10 * 257
    whole = [
        784 * 4,  # the images, for the weights of the first convolution
        8 * 12 * 12 * 4,  # its relu's output, also the second convolution's input
        16 * 10 * 10 * 4,  # what is pooled
        16 * 5 * 5 * 8,  # where the maxima were, int64
        16 * 5 * 5 * 4,  # the second relu's output
        16 * 5 * 5 * 4,  # the same, flattened: a copy, since channels come last
        256 * 4,  # the third relu's output, also the last layer's input
        10 * 4,  # log-probabilities
        8,  # targets, int64
    ]
    checkpointed = whole[:1] + whole[4:]  # four layers of nine are computed again from the images
    expected = {
        "parameters": parameters * 4,
        "gradients": parameters * 4,
        "optimizer state": parameters * 8 + 8 * 4,  # two moments, and a step count for each tensor
        "activations": 96 * sum(whole) + 4,  # 4: the sum of the class weights in the loss
        "activations, 2 segments": 96 * sum(checkpointed) + 4,
    }
    lines = re.findall(
        r"^(\w.*?) +\| +([\d,]+) bytes$", short("03_memory.py")[0].stdout, re.MULTILINE
    )
    assert {name: int(size.replace(",", "")) for name, size in lines} == expected


@pytest.mark.gpu
def test_memory_report_agrees_with_cuda():
    """What CUDA holds more after a forward pass is what the report counts, within 10 %."""
    module, device = load("03_memory.py"), torch.device("cuda")
    model = module.build_model(64).to(device, memory_format=torch.channels_last)
    inputs, targets = (tensor.to(device) for tensor in batches(1024, dtype=torch.float32)[0])
    counted = module.saved_bytes(model, 1, inputs, targets) - inputs.nbytes - targets.nbytes
    before = torch.cuda.memory_allocated()
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    assert torch.cuda.memory_allocated() - before == pytest.approx(counted, rel=0.1), loss


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
    order = [name for name in log if name != "get_scale"]
    assert order == ["scale", "unscale_", "clip", "step", "update"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_amp_skips_a_step_that_overflows():
    module = load("05_amp.py")
    torch.manual_seed(0)
    model = module.build_model(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    good, bad = batches(8, 8, dtype=torch.float32)
    bad[0][0] = torch.inf

    def train(batch):
        args = optimizer, scheduler, torch.device("cpu"), torch.bfloat16, scaler
        module.train(model, [batch], *args)
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
    flags = ["--device", "cpu", "--limit", "100", "--batch-size", "50", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["05_amp.py", *flags, "--dtype", dtype])
    load("05_amp.py").main()
    assert [scaler.is_enabled() for scaler in made] == [dtype == "float16"]
    assert ("use bfloat16" in capsys.readouterr().err) == (dtype == "float16")


def test_compile_compiles_once(short):
    """Only the first step, printed apart, compiles: not the later ones, nor evaluation."""
    done = short("08_compile.py")[0]
    lines = [line.split(" | ")[0] for line in done.stdout.splitlines()]
    assert lines == ["cpu", "compiling in the first step", "first step", "epoch 1/2", "epoch 2/2"]
    assert "ecompil" not in done.stderr and "break" not in done.stderr, done.stderr


def test_compile_without_a_compiler(tmp_path):
    env = {"PATH": "", "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    fails(run("08_compile.py", *SHORT, env=env), "No working C++ compiler", "such as g++")


def test_profile(short):
    done, path = short("09_profile.py")
    trace = path.parent / "trace.json"
    events = json.loads(trace.read_text())["traceEvents"]
    regions = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name in "data", "forward", "backward", "optimizer":
        assert regions.count(name) == 3  # of 40: the file is as large however many epochs there are
    assert sum(name.startswith("ProfilerStep#") for name in regions) == 3
    lines = [line for line in done.stdout.splitlines() if " | " not in line]
    shares = [float(match[1]) for match in map(re.compile(r".*? ([\d.]+)% ").match, lines) if match]
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True) and shares[0] > 10
    assert trace.stat().st_size < 20e6
