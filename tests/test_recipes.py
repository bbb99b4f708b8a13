"""The code of README.md's section "Your own project", taken from there, run, and compared."""

import contextlib
import copy
import re
import sys
from functools import partial
from math import cos, pi
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import BLOCKS, ROOT, block, execute, load
from PIL import Image
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST


def main(script, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--device", "cpu", *map(str, flags)])
    load(script).main()


def test_every_block_has_a_test():
    tests = [Path(__file__).with_name(name) for name in ("test_recipes.py", "test_loops.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    words = re.findall(r'block\("(.+?)"\)', text)
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
