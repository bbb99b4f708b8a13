"""Draw the pictures of README.md: the memory of a training step, and a training step in time.

    pip install matplotlib
    python tests/pictures.py            # writes .github/memory.svg and .github/step.svg
    python tests/pictures.py --memory   # prints the peaks that README.md shows

The amounts of memory are those of the tensors that a step creates, without what libraries need for
themselves. They are the same on any processor; the times in the second picture are not.
"""

import inspect
import json
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import torch
from conftest import ROOT, load
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

SCALER = torch.amp.GradScaler("cpu", enabled=False)
STEPS = {  # name in the picture: script, what its train takes in addition
    "02 training loop": ("02_train_gpu.py",),
    "03 checkpointing": ("03_memory.py", 3),
    "04 accumulation": ("04_grad_accum.py", 4),
    "05 bfloat16": ("05_amp.py", torch.bfloat16, SCALER),
}
INK, GRID, BLUE, SKY, ORANGE, GREEN = "#222", "#ddd", "#0072b2", "#56b4e9", "#e69f00", "#009e73"


class Memory(TorchDispatchMode):
    """Follows the bytes of all tensors that are created under it, until they are freed."""

    def __init__(self):
        super().__init__()
        self.alive, self.record = {}, []  # {address: bytes}, [(time, sum of bytes)]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        outputs = operation(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs))}
        for storage in storages(outputs):
            address = storage.data_ptr()
            if address not in given and address not in self.alive:
                self.alive[address] = storage.nbytes()
                weakref.finalize(storage, self.freed, address)
        self.note()
        return outputs

    def freed(self, address):
        del self.alive[address]
        self.note()

    def note(self):
        size = sum(self.alive.values())
        if not self.record or size != self.record[-1][1]:
            self.record.append((time.perf_counter(), size))


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def step(script, *extra, width=64, depth=0):
    """One step with 480 images: the record of its memory, and when its backward passes ran.

    depth: so many more convolutions after the first. A step with 4 images comes before, which creates Adam's state.
    """
    module = load(script)
    torch.manual_seed(0)
    model = module.build_model(width)
    for _ in range(depth):
        convolution = torch.nn.Conv2d(width, width, 3, padding=1)
        model.insert(2, torch.nn.Sequential(convolution, torch.nn.ReLU()))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = LambdaLR(optimizer, lambda number: 1.0)
    first, batch = (
        DataLoader([(torch.randn(size, 1, 28, 28), torch.randint(10, (size,)))], batch_size=None)
        for size in (4, 480)
    )
    extra = torch.device("cpu"), *extra
    if "scheduler" in inspect.signature(module.train).parameters:  # 05 steps it in a hook
        extra = scheduler, *extra
    module.train(model, first, optimizer, *extra)
    passes, backward = [], torch.Tensor.backward

    def timed_backward(loss):
        start = time.perf_counter()
        backward(loss)
        passes.append((start, time.perf_counter()))

    torch.Tensor.backward = timed_backward
    try:
        with Memory() as memory:
            module.train(model, batch, optimizer, *extra)
    finally:
        torch.Tensor.backward = backward
    return memory.record, passes


def peak(script, *extra, **sizes):
    """Bytes at the peak of a step, above what was there before it."""
    return max(size for _, size in step(script, *extra, **sizes)[0])


def new_figure(rows, columns, height, **options):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 10, "text.color": INK})
    plt.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "the same file every time"})
    figure, axes = plt.subplots(rows, columns, figsize=(8.3, height), squeeze=False, **options)
    figure.patch.set_facecolor("white")
    for axis in axes.flat:
        axis.spines[["top", "right", "left", "bottom"]].set_color(GRID)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, length=0)
    return figure, axes


def draw_memory(path):
    figure, axes = new_figure(1, 4, 3.1, sharey=True)
    for axis, (name, (script, *extra)), color in zip(
        axes[0], STEPS.items(), (BLUE, ORANGE, GREEN, SKY)
    ):
        record, passes = step(script, *extra)
        begin, end, top = record[0][0], record[-1][0], max(size for _, size in record)
        record = [
            now
            for last, now in zip([(begin, 0), *record], record)
            if abs(now[1] - last[1]) > 3e5 or now[1] == top or now[0] == end
        ]  # without the smallest changes: the file stays small
        times = [(at - begin) / (end - begin) for at, _ in record]
        sizes = [size / 1e6 for _, size in record]
        for start, stop in passes:
            span = (start - begin) / (end - begin), (stop - begin) / (end - begin)
            axis.axvspan(*span, color="#f0f0f0", linewidth=0)
        axis.fill_between(times, sizes, step="post", color=color, alpha=0.35, linewidth=0)
        axis.step(times, sizes, where="post", color=color, linewidth=1.5)
        axis.axhline(max(sizes), color=color, linewidth=1, linestyle="--")
        axis.text(1, max(sizes) + 1.5, f"{max(sizes):.0f} MB", ha="right", weight="bold", size=12)
        axis.set_title(name, loc="left", size=11, color=INK)
        axis.set(xlim=(0, 1), ylim=(0, 105), xticks=[])
        if script.startswith("02"):
            middle = (passes[0][0] - begin) / (end - begin) / 2
            axis.text(middle, 2, "forward", rotation=90, ha="center", va="bottom", size=9)
            axis.text(0.5 + middle, 2, "backward", ha="center", va="bottom", size=9)
    axes[0, 0].set_ylabel("MB above the memory of the model", color=INK)
    figure.text(0.5, 0.03, "one training step of 480 images (gray: backward passes)", ha="center")
    figure.subplots_adjust(left=0.08, right=0.99, top=0.9, bottom=0.11, wspace=0.12)
    figure.savefig(path, metadata={"Date": None})


def draw_step(path):
    """The last step that 09 has recorded: its regions, and the operations that they call."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "09_profile.py", "--device", "cpu", "--epochs", "1"]
        subprocess.run([*command, "--trace", f"{folder}/trace.json"], check=True)
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    whole = [event for event in events if event["name"].startswith("ProfilerStep#")][-1]
    begin, length = whole["ts"], whole["dur"]
    inside = [e for e in events if begin <= e["ts"] and e["ts"] + e["dur"] <= begin + length]
    inside = [e for e in inside if e["tid"] == whole["tid"] and e is not whole]
    figure, axes = new_figure(1, 1, 2.3)
    axis, ends = axes[0, 0], {0: 0, 1: 0}
    colors = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
    region = None
    for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
        name, at = event["name"], event["ts"]
        row = 0 if at >= ends[0] and name in colors or "DataLoader" in name else 1
        if at < ends[row]:
            continue  # called by the operation that is drawn already
        ends[row] = at + event["dur"]
        if row == 0:
            region = "data" if "DataLoader" in name else name
            ends[1] = at
        name = (
            region
            if row == 0
            else name.split("::")[-1].split(": ")[-1].split("#")[-1].removesuffix("0")
        )
        color = colors.get(region, SKY) if at < ends[0] else "#bbb"
        x, width = (at - begin) / 1000, event["dur"] / 1000
        axis.barh(-row, width, 0.9, x, color=color, alpha=1 - 0.5 * row, edgecolor="white", lw=0.5)
        share = event["dur"] / length
        if share > 0.09 or share > 0.03 + 0.01 * row and len(name) < 12:
            turned = {} if share > 0.09 else {"rotation": 90}
            ink = "white" if row == 0 and region in ("forward", "optimizer") else INK
            size = 10 - row - 0.5 * (len(turned) * row)
            axis.text(
                x + width / 2, -row, name, color=ink, ha="center", va="center", size=size, **turned
            )
    axis.set(xlim=(0, length / 1000), yticks=[0, -1], yticklabels=["regions", "operations"])
    axis.set_xlabel("milliseconds of one training step", color=INK)
    figure.subplots_adjust(left=0.1, right=0.99, top=0.97, bottom=0.22)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    if "--memory" in sys.argv:
        steps = [(script, extra) for script, *extra in STEPS.values()]
        steps[1:2] = [("03_memory.py", [segments]) for segments in (2, 3, 4, 6, 9)]
        names = [
            f"{script[:2]} {extra[0] if script[:2] in ('03', '04') else ''}"
            for script, extra in steps
        ]
        print(f"| MB | {' | '.join(names)} |")
        for sizes in {"width": 8}, {"width": 64}, {"width": 64, "depth": 32}:
            peaks = [f"{peak(script, *extra, **sizes) / 1e6:.1f}" for script, extra in steps]
            print(f"| {sizes} | {' | '.join(peaks)} |", flush=True)
    else:
        draw_memory(ROOT / ".github" / "memory.svg")
        draw_step(ROOT / ".github" / "step.svg")
