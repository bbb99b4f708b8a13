"""What each technique promises beyond the result of 02."""

import json
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHORT, load, run
from pictures import SCALER, STEPS, peak
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset

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
    """Also with a smaller last micro-batch, a smaller last batch, and a batch smaller than accum."""
    loader = batches(50, 50, 23, 2)
    expected, loss, steps = gradients("02_train_gpu.py", loader)
    found, found_loss, found_steps = gradients("04_grad_accum.py", loader, accum)
    assert steps == found_steps == 4
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    assert found_loss == pytest.approx(loss, rel=1e-6)


def test_accumulation_evaluates_by_the_micro_batch(monkeypatch):
    module = load("04_grad_accum.py")
    monkeypatch.setattr(sys, "argv", ["04_grad_accum.py", *QUICK, "--accum", "5"])
    _, loader = module.load_data(module.parse_args())
    assert max(len(targets) for _, targets in loader) == 20  # 96 / 5, rounded up


def test_peak_of_a_step(monkeypatch):
    """03, 04 and 05, at their default flags, need less than 02; as much less as README.md says."""
    base = peak("02_train_gpu.py", width=8)
    for script, flag, at_most in (
        ("03_memory.py", "segments", 0.85),
        ("04_grad_accum.py", "accum", 0.5),
    ):
        monkeypatch.setattr(sys, "argv", [script])
        default = getattr(load(script).parse_args(), flag)
        assert peak(script, default, width=8) < at_most * base
    assert peak("05_amp.py", torch.bfloat16, SCALER, width=8) < 0.7 * base


def test_picture_of_memory_shows_the_peaks_of_today():
    text = (ROOT / ".github" / "memory.svg").read_text(encoding="utf-8")
    shown = [int(number) for number in re.findall(r">(\d+) MB<", text)]
    assert shown == pytest.approx([peak(*step) / 1e6 for step in STEPS.values()], rel=0.02)
    assert all(name in text for name in STEPS)
    assert len(text) < 60_000


def test_memory_report(short):
    """Bytes by hand for a width of 8."""
    parameters = 4 * (8 * 37 + 16 * 73 + 256 * 401 + 10 * 257)
    state = 2 * parameters + 8 * 4  # two moments, and a step count for each tensor
    assert short("03_memory.py")[0].stdout.splitlines()[-1] == (
        f"parameters and gradients, {parameters:,} bytes each | optimizer state, {state:,} bytes"
    )


def test_memory_report_is_of_training_mode(imitated_gpu, monkeypatch, capsys):
    """Without and with checkpointing, dropout and BatchNorm behave as they do in training."""
    module, modes = load("03_memory.py"), []
    real = module.checkpoint_sequential

    def checkpoint_sequential(model, segments, *args, **options):
        modes.append((segments, model.training))
        return real(model, segments, *args, **options)

    monkeypatch.setattr(module, "checkpoint_sequential", checkpoint_sequential)
    monkeypatch.setattr(sys, "argv", ["03_memory.py", *QUICK, "--device", "cuda", "--width", "3"])
    module.main()
    assert modes[-2:] == [(1, True), (3, True)]
    lines = capsys.readouterr().out.splitlines()[-4:]
    peak = "peak of a forward and backward pass, {} segments | 1,048,576 bytes"
    assert lines[:2] == [peak.format(1), peak.format(3)]
    assert [line.split(" |")[0] for line in lines[2:]] == [
        "before empty_cache",
        "after empty_cache",
    ]
    assert imitated_gpu.index("reset_peak_memory_stats") < imitated_gpu.index("memory_allocated")


@pytest.mark.gpu
def test_memory_report_on_a_gpu():
    """The peak falls with segments."""
    done = run("03_memory.py", "--epochs", "1", "--limit", "960")
    peaks = re.findall(
        r"peak of a forward and backward pass, \d segments \| ([\d,]+) bytes", done.stdout
    )
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
    loader = batches(8, dtype=torch.float32)
    module.train(model, loader, optimizer, torch.device("cpu"), torch.bfloat16, Calls(log))
    assert log == ["scale", "unscale_", "clip", "step", "update"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_amp_skips_a_step_that_overflows(monkeypatch):
    """And with it the scheduler's step. The CPU waits for the scaler's number once per step."""
    module, made, waits = load("05_amp.py"), [], []
    scheduler, scaler, item = module.OneCycleLR, torch.amp.GradScaler, torch.Tensor.item

    class Overflowing(TensorDataset):
        """The second and the fifth batch of an epoch overflow."""

        def __getitems__(self, indices):
            images, targets = (tensor[indices] for tensor in self.tensors)
            if not torch.is_inference_mode_enabled():
                waits.append(0)
                images = images * (torch.inf if len(waits) % 10 in (2, 5) else 1)
            return images, targets

    def count(tensor):
        if waits and "optim" not in Path(sys._getframe(1).f_code.co_filename).parts:
            waits[-1] += 1  # on the CPU, Adam also reads the number of its own steps
        return item(tensor)

    monkeypatch.setattr(module, "InMemory", Overflowing)
    monkeypatch.setattr(module, "evaluate", lambda *args: 0.0)
    monkeypatch.setattr(
        module, "OneCycleLR", lambda *a, **k: made.append(scheduler(*a, **k)) or made[0]
    )
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda *a, **k: made.append(scaler(*a, **k)) or made[1]
    )
    flags = ["--device", "cpu", "--limit", "480", "--batch-size", "48", "--dtype", "float16"]
    monkeypatch.setattr(sys, "argv", ["05_amp.py", *flags])
    monkeypatch.setattr(torch.Tensor, "item", count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: lr_scheduler.step() before optimizer.step()
        module.main()
    assert made[0].last_epoch == 20 - 4
    assert made[1].get_scale() == 2**16 / 2**4
    assert waits[:9] + waits[10:19] == [1] * 18  # the last step of an epoch is followed by others


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
    names = recorded(path.parent / "09" / "trace.json")
    for name in "forward", "backward", "optimizer":
        assert names.count(name) == 3  # of 40: the file is as large however many epochs there are
    lines = [line for line in done.stdout.splitlines() if " | " not in line]
    shares = [float(match[1]) for match in map(re.compile(r".*? ([\d.]+)% ").match, lines) if match]
    assert len(shares) == 15
    assert shares == sorted(shares, reverse=True) and shares[0] > 10
    times = regions(done.stdout)
    whole, *parts = (cpu for cpu, gpu in times.values() if gpu is None)
    assert whole * 0.7 < sum(parts) <= whole * 1.01  # the rest: to(), total_loss, prof.step()


def regions(output):
    """What 09 says of each region: {name: (CPU ms per step, GPU ms per step or None)}."""
    line = r"^(\S+) +\| CPU +([\d.]+) ms(?: \| GPU +([\d.]+) ms)? per step$"
    found = re.findall(line, output, re.MULTILINE)
    times = {name: (float(cpu), float(gpu) if gpu else None) for name, cpu, gpu in found}
    names = ["ProfilerStep*", "enumerate(DataLoader)", "forward", "backward", "optimizer"]
    assert list(times) == names, output
    return times


def recorded_on_a_gpu(backlog):
    """The profiler's events of a loop that the GPU limits: per step 1 ms of the CPU, 2 of the GPU.

    The GPU is behind by so many steps when the recording starts. It is busy without a pause, with
    the kernels of earlier steps first, which no recorded region has launched.
    """
    on_gpu, on_cpu, events = DeviceType.CUDA, DeviceType.CPU, []

    def event(name, start, end, device=on_cpu, kernels=()):
        made = FunctionEvent(len(events), name, 1, start, end, stack=[], use_device="cuda")
        made.device_type = device
        for kernel, duration in kernels:
            made.append_kernel(kernel, 0, duration)
        events.append(made)

    free = 0  # when the GPU has done what it was asked for
    for number in range(-backlog, 3):
        start, launched = 1000 * number, []
        for name, at, kernel, duration in (
            ("forward", 100, "conv", 600),
            ("backward", 400, "conv_backward", 1100),
            ("optimizer", 700, "adam", 300),
        ):
            launched.append((name, at, kernel, duration))
            free = max(free, 0) + duration
            event(kernel, free - duration, free, on_gpu)
            if number >= 0:
                event(name, start + at, start + at + 300)
                event(f"aten::{kernel}", start + at, start + at + 250, kernels=[(kernel, duration)])
                event(name, free - duration, free, on_gpu)  # the region's second row
        if number >= 0:
            loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            event("ProfilerStep*", start, start + 1000)
            event(loader, start + 10, start + 90)
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    result = EventList(events, use_device="cuda")
    result._build_tree()
    return result


@pytest.mark.parametrize("backlog", [0, 1, 4, 12])
def test_profile_of_a_loop_that_the_gpu_limits(
    backlog, imitated_gpu, monkeypatch, capsys, tmp_path
):
    """Kernels belong to the region that launched them, however far behind the GPU is."""
    events = recorded_on_a_gpu(backlog)
    monkeypatch.setattr(profile, "key_averages", lambda self: events.key_averages())
    monkeypatch.setattr(profile, "events", lambda self: events)
    monkeypatch.chdir(tmp_path)
    flags = [*QUICK, "--device", "cuda", "--width", "3"]
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *flags])
    load("09_profile.py").main()
    assert regions(capsys.readouterr().out) == {
        "ProfilerStep*": (1.0, 2.0),
        "enumerate(DataLoader)": (0.08, 0.0),
        "forward": (0.3, 0.6),
        "backward": (0.3, 1.1),
        "optimizer": (0.3, 0.3),
    }


def test_profile_whose_region_was_renamed(monkeypatch, tmp_path):
    """The error names the line that is missing."""
    module = load("09_profile.py")
    real = module.record_function
    monkeypatch.setattr(module, "record_function", lambda name: real(name.replace("for", "four")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *QUICK])
    with pytest.raises(KeyError, match="'forward'"):
        module.main()


class Slow(TensorDataset):
    """A loader that takes 0.6 s for each batch."""

    def __getitems__(self, indices):
        time.sleep(0.6)
        return tuple(tensor[indices] for tensor in self.tensors)


@pytest.mark.parametrize(
    "workers, steps, start", [(0, 5, 0), *((4, 13 + i, 3 * (i % 2)) for i in range(4))]
)
def test_profile_shows_the_wait_for_a_slow_loader(
    workers, steps, start, monkeypatch, capsys, tmp_path
):
    """Workers deliver in bursts: wherever the epoch ends, the wait between two must be recorded.

    While the profiler starts, which can take seconds on a GPU, the workers fill their queues.
    """
    module, prepare, threads = load("09_profile.py"), profile.prepare_trace, torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, two would wait for each other
    monkeypatch.setattr(profile, "prepare_trace", lambda self: time.sleep(start) or prepare(self))
    monkeypatch.setattr(module, "InMemory", Slow)
    monkeypatch.chdir(tmp_path)
    flags = ["--device", "cpu", "--batch-size", "24", "--limit", steps * 24, "--epochs", "1"]
    flags += ["--workers", workers, "--width", "1", "--trace", tmp_path / "new" / "trace.json"]
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *map(str, flags)])
    monkeypatch.setattr(module, "evaluate", lambda *args: 0.0)
    module.main()
    torch.set_num_threads(threads)
    times = regions(capsys.readouterr().out)
    assert times["enumerate(DataLoader)"][0] > 0.3 * times["ProfilerStep*"][0]  # without load, 0.9


def test_profile_never_spans_an_evaluation(monkeypatch, tmp_path):
    """Four steps an epoch are the fewest it takes; evaluation alone calls argmax."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["09_profile.py", *QUICK])
    load("09_profile.py").main()
    names = recorded(tmp_path / "trace.json")
    assert "aten::convolution" in names and "aten::argmax" not in names
    assert sum(name.startswith("ProfilerStep#") for name in names) == 3
