"""The code of README.md's section "Your own project", taken from there, run, and compared."""

import contextlib
import copy
import os
import re
import sys
import textwrap
import time
from datetime import timedelta
from functools import partial
from math import cos, pi
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, load
from PIL import Image
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Your own project\n")[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION.split("\n## ")[0], re.DOTALL | re.MULTILINE)


def block(word):
    """The only block of the section that contains the word."""
    [found] = [code for code in BLOCKS if word in code]
    return found


def execute(code, **names):
    """Run code in a namespace of its own, which is returned."""
    names = {**vars(lr_scheduler), "torch": torch, "nn": nn, "np": np, **names}
    names.setdefault("device", torch.device("cpu"))
    exec(code, names)  # noqa: S102
    return names


def main(script, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--device", "cpu", *map(str, flags)])
    load(script).main()


def test_every_block_has_a_test():
    words = re.findall(r'block\("(.+?)"\)', Path(__file__).read_text(encoding="utf-8"))
    assert {block(word) for word in words} == set(BLOCKS)


def test_image_folders(monkeypatch, capsys, tmp_path):
    """Red and blue images of any size are told apart; sets whose classes differ are refused."""
    script, mine = (ROOT / "02_train_gpu.py").read_text(encoding="utf-8"), tmp_path / "mine.py"
    start, end = script.index("# For your own data"), script.index("def train(")
    mine.write_text(script[:start] + block("ImageFolder") + script[end:])
    for folder, color in ("cat", (200, 40, 0)), ("dog", (0, 40, 200)):
        for path in tmp_path / "train" / folder, tmp_path / "test" / folder:
            path.mkdir(parents=True)
            for i in range(20):
                Image.new("RGB", (70 + i, 90), color).save(path / f"{i}.png")
    flags = ["--data-dir", tmp_path, "--lr", 0.003, "--batch-size"]
    main(mine, monkeypatch, *flags, 8)
    assert "| 40 images |" in (out := capsys.readouterr().out) and "accuracy 100.00%" in out
    assert load(mine).build_model(8)(torch.zeros(4, 3, 80, 99)).shape == (4, 2)
    with pytest.raises(SystemExit, match="too few images"):
        main(mine, monkeypatch, *flags, 99)
    (tmp_path / "train" / "cat").rename(tmp_path / "train" / "zebra")
    with pytest.raises(SystemExit, match=r"not the same classes: \['dog', 'zebra'\]"):
        main(mine, monkeypatch, *flags, 8)


def on_rank(rank, path, model, weight, data, tasks, found):
    """Do the tasks on one of two ranks, then stop when rank 0 decides; both goes into `found`."""
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(minutes=1)}
    dist.init_process_group("gloo", init_method=f"file://{path}", **options)
    names = {"dist": dist, "world_size": 2, "weight": weight, "accum": 4, "patience": 3}
    names |= {"contextlib": contextlib, "dtype": torch.bfloat16}  # autocast leaves float64 alone
    names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index, (code, targets, mean) in enumerate(tasks):
        part = slice(15 * rank, 15 * rank + 15) if "ddp_model" in code else slice(30)
        names |= {"loader": [(data[part], targets[part])], "model": copy.deepcopy(model)}
        names["optimizer"] = SGD(names["model"].parameters(), lr=1.0)
        ddp_model = nn.parallel.DistributedDataParallel(names["model"])
        result = execute(code, ddp_model=ddp_model, total_loss=0, **names)
        total_loss = result["total_loss"]
        if "ddp_model" in code:
            dist.all_reduce(total_loss)
            total_loss /= 2
        torch.testing.assert_close(total_loss, mean)
        found[rank, index] = names["model"].weight.detach()
    stop = f"for epoch in range(9):\n    waited = 3 if epoch == 4 + {rank} else {rank}\n"
    stop += textwrap.indent(block("dist.broadcast(stop"), "    ")
    found[rank, -1] = execute(stop, **names)["epoch"]
    time.sleep(0.5)  # until the other rank has what it needs
    os._exit(0)  # without the destructors of Gloo, in which torch 2.4 can hang


def test_weights_and_stopping_on_two_ranks(tmp_path):
    """The gradient is that of the whole batch, with each `s`; both ranks stop when rank 0 does.

    The running loss of the micro-batches is the mean over the batch.
    """
    data, labels = torch.randn(30, 6).double(), torch.randint(5, (30,))
    weight, model = torch.tensor([1, 2, 3, 4, 50.0]).double(), nn.Linear(6, 5).double()
    accumulate, distribute = block("these add up"), block("divided by world_size")
    both = block("once per batch")
    tasks, expected, found = [], [], torch.zeros(2, 10, 5, 6).double()
    for line in re.findall(r"`s = (.+)`", SECTION):
        counted = torch.where(torch.rand(30) < 0.4, -100, labels) if "-100" in line else labels
        option = {"weight": weight} if "weight" in line else {}
        loss = nn.functional.cross_entropy(model(data), counted, **option)
        expected += [(model.weight - torch.autograd.grad(loss, model.weight)[0]).detach()] * 3
        for code in accumulate, distribute, both:
            name = "targets" if code is distribute else "batch_targets"
            code = code.replace(f"weight[{name}].sum()", line.replace("targets", name))
            code = code if option else re.sub(r'(weight=|"weight": )weight, ', "", code)
            tasks.append((code, counted, loss.detach()))
    expected = torch.stack([*expected, torch.full((5, 6), 4.0).double()]).expand(2, -1, -1, -1)
    options = str(tmp_path / "store"), model, weight, data, tasks, found
    torch.multiprocessing.spawn(on_rank, options, nprocs=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_check_of_gradients():
    """It passes for the right weights, and fails for wrong ones and for a criterion with weights."""
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 5)
    names = {"model": nn.Sequential(*layers), "criterion": nn.CrossEntropyLoss()}
    data = TensorDataset(torch.randn(30, 6), torch.randint(5, (30,)))
    names["train_loader"], code = DataLoader(data, 30), block("def gradients")
    execute(code, **names)
    with pytest.raises(AssertionError, match="not close"):
        execute(code.replace("* len(y) / len(targets)", "/ 4"), **names)
    names["criterion"] = nn.CrossEntropyLoss(torch.tensor([1, 2, 3, 4, 50.0]).double())
    with pytest.raises(AssertionError, match="not close"):
        execute(code, **names)


def test_prediction(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    main("02_train_gpu.py", monkeypatch, "--limit", 2000, "--batch-size", 48, "--save", "model.pt")
    image = Image.fromarray(MNIST(ROOT / "data", train=False).data[0].numpy()).convert("RGB")
    image.resize((56, 56)).save("digit.png")
    capsys.readouterr()
    execute(block("digit"))
    found = re.fullmatch(r"7 - seven (\d+\.\d)%\n", capsys.readouterr().out)
    assert found and float(found[1]) > 80


def test_resume(monkeypatch, capsys, tmp_path):
    """Broken off in any save, and started again, it ends as if nothing had happened."""
    save, left, ends, run_loop = torch.save, [0], [], partial(execute, __name__="__main__")
    data = torch.randn(700, 784, generator=torch.Generator().manual_seed(0))
    sets = [TensorDataset(x, x[:, :10].argmax(dim=1)) for x in (data[:600], data[600:])]
    monkeypatch.setitem(sys.modules, "data", mock.Mock(train_set=sets[0], val_set=sets[1]))

    def breaks(state, path):
        save(state, path)
        left[0] -= 1
        if left[0] == 0:
            Path(path).write_text("half")
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", breaks)
    for left[0] in 0, 1, 2, 4, 5:
        (tmp_path / f"{left}").mkdir()
        monkeypatch.chdir(tmp_path / f"{left}")
        with pytest.raises(KeyboardInterrupt) if left[0] else contextlib.nullcontext():
            run_loop(block("def save"))
        run_loop(block("def save"))
        states = [torch.load(name, weights_only=True) for name in ("run.pt", "best.pt")]
        ends.append([capsys.readouterr().out, *states])
        assert ends[-1][0] == ends[0][0]
        torch.testing.assert_close(ends[-1][1:], ends[0][1:], rtol=0, atol=0)
    with pytest.raises(SystemExit, match=r"run.pt was written with .*'lr': 0.1"):
        run_loop(block("def save").replace('"lr": 0.1', '"lr": 0.2'))


def test_learning_rates():
    """Warm-up to k times the rate, and another schedule after a resume."""
    names, found = execute(block("warmup ="), model=nn.Linear(1, 1), k=4, epochs=9), []
    for epoch in range(13):
        if epoch == 9:
            names["state"] = {"optimizer": names["optimizer"].state_dict()}
            names = execute(block("initial_lr"), **names, done=5)
        found.append(names["optimizer"].param_groups[0]["lr"])
        names["optimizer"].step()
        names["scheduler"].step()
    decay = np.array([0.5 + cos(pi * i / 4) / 2 for i in range(4)])
    assert found == pytest.approx([0.1, 0.16, 0.22, 0.28, 0.34, *(0.4 * decay), *(0.01 * decay)])


def test_logging_and_early_stopping(monkeypatch):
    """It trains as 02, logs means of 50 losses and reads no other; the best epoch is saved."""
    module, log, reads, item = load("02_train_gpu.py"), mock.Mock(), [], torch.Tensor.item
    data = module.InMemory(torch.randn(800, 1, 28, 28), torch.randint(10, (800,)))
    loader, model = DataLoader(data, 8, collate_fn=tuple), module.build_model(2)
    plain = {"model": model, "optimizer": SGD(model.parameters(), lr=0.05)}
    mine, fixed = copy.deepcopy(plain), {"scheduler": mock.Mock(), "device": "cpu"}
    losses = [module.train(loader=loader, **plain, **fixed) for _ in range(5)]
    monkeypatch.setattr(torch.Tensor, "item", lambda x: reads.append(item(x)) or reads[-1])
    tensorboard = mock.Mock(SummaryWriter=lambda folder: log)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "tqdm", mock.Mock(tqdm=lambda loader, leave: loader))
    fixed |= {
        "train_loader": loader,
        "val_loader": 0,
        "args": mock.Mock(epochs=9),
        "save": log.save,
    }
    evaluate = mock.Mock(side_effect=[0.5, 0.7, 0.6, 0.65, 0.7])
    execute(block("from tqdm") + block("writer.close"), evaluate=evaluate, **mine, **fixed)
    assert torch.equal(mine["model"][0].weight, model[0].weight)
    assert "".join(call[0][0] for call in log.mock_calls) == "aaasaaasaaaaaaaaac"
    logged = [call.args for call in log.add_scalar.call_args_list if call.args[0] == "loss/train"]
    assert [step for _, _, step in logged] == [*range(50, 501, 50)]
    means = np.array([value for _, value, _ in logged]).reshape(5, 2).mean(axis=1)
    assert means == pytest.approx(losses)
    assert len(reads) == 5 * 4  # for the loader's seed, for both logs and at the end


class Draws(list):
    rng = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.rng.random()


def test_seeds_of_workers():
    """Each draws its own numbers in each epoch, and the same again after a resume."""

    def draws(code, seed):
        found, options = [], {"train_set": Draws(range(256)), "epochs": 2, "seed": 5}
        options["train_one_epoch"] = lambda loader: found.append([x.tolist() for x in loader])
        torch.manual_seed(seed)
        execute(code, DataLoader=partial(DataLoader, multiprocessing_context="fork"), **options)
        return found

    first, second = draws(block("worker_init_fn"), 1)
    assert len({number for batch in first + second for number in batch}) == 512
    assert draws(block("worker_init_fn").replace("range(1,", "range(2,"), 2) == [second]
