"""The code of README.md's sections on losses and on loops of other kinds, against plain loops.

Everything is in float64, which autocast leaves alone. Each listing is also run without one of its
factors, and must then give other weights.
"""

import contextlib
import copy
import itertools
import math
import os
import re
import textwrap
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import SECTION, block, execute
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.optim import SGD
from torch.utils.data import DataLoader

GAN_LOSS = nn.BCEWithLogitsLoss()
OPTIMIZERS = {"model": "optimizer", "generator": "optimizer_g", "discriminator": "optimizer_d"}
WEIGHT = torch.tensor([1, 2, 3, 4, 50.0]).double()
PLAIN = """
for inputs, targets in loader:
    loss = criterion(model(inputs), targets)
    loss.backward()
    total_loss += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
"""
AS_IN_04 = """
for batch_inputs, batch_targets in loader:
    for inputs, targets in zip(batch_inputs.chunk(accum), batch_targets.chunk(accum)):
        loss = criterion(model(inputs), targets) * len(targets) / len(batch_targets)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SEEDED = """  # the micro-batches of a batch in one graph, each with its own seed
for inputs, targets in loader:
    outputs = []
    for part, seed in zip(inputs.chunk(accum), torch.randint(2**62, (accum,)).tolist()):
        torch.manual_seed(seed)
        outputs.append(model(part))
    criterion(torch.cat(outputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TOKENS = """
state = None
for inputs, targets in loader:
    logits, state = model(inputs, state)
    state = tuple(tensor.detach() for tensor in state)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GAN = """  # BatchNorm has the statistics of each half of a batch
def loss(halves, label):
    halves = [discriminator(half) for half in halves]
    return sum(criterion(half, torch.full_like(half, label)) for half in halves) / 2

for real, noise in loader:
    fake = [generator(half) for half in noise.chunk(2)]
    (loss(real.chunk(2), 1.0) + loss([half.detach() for half in fake], 0.0)).backward()
    optimizer_d.step()
    loss(fake, 1.0).backward()
    optimizer_g.step()
    optimizer_d.zero_grad()
    optimizer_g.zero_grad()
"""
GROUPED = """
scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=len(loader))
for inputs, targets in loader:
    criterion(model(inputs), targets).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(9, 6), nn.LSTM(6, 6), nn.Linear(6, 9)

    def forward(self, inputs, state):
        outputs, state = self.lstm(self.embedding(inputs), state)
        return self.head(outputs), state


def contrastive(outputs, targets):
    similarity = normalize(outputs) @ normalize(targets).T
    return cross_entropy(similarity / 0.1, torch.arange(len(targets)))


def dice(outputs, targets):
    outputs, targets = outputs.sigmoid(), (targets > 0).double()
    return 1 - (2 * (outputs * targets).sum() + 1) / (outputs.sum() + targets.sum() + 1)


def network(*middle, outputs=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), *middle, nn.Tanh(), nn.Linear(9, outputs)).double()


def train(code, loader, wrap=None, criterion=None, **models):
    """Run the code, with each model also under the name ddp_…; return all weights and the loss."""
    models = copy.deepcopy(models)
    names = {"loader": loader, "criterion": criterion, "weight": WEIGHT, "accum": 4, "epochs": 2}
    names |= {"world_size": 2, "rank": dist.get_rank() if wrap else 0, "dtype": torch.bfloat16}
    names |= {"dist": dist, "contextlib": contextlib, "itertools": itertools, "math": math}
    names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    for name, model in models.items():
        names |= {name: model, OPTIMIZERS[name]: SGD(model.parameters(), lr=0.1)}
        names |= {f"ddp_{name}": wrap(model)} if wrap else {}
    torch.manual_seed(1)
    total_loss = torch.as_tensor(execute(code, total_loss=0, **names)["total_loss"])
    weights = [weight for model in models.values() for weight in model.parameters()]
    return nn.utils.parameters_to_vector(weights).detach(), total_loss


def without(code, old, new=""):
    assert old in code, old
    return code.replace(old, new)


def differs(found, expected):
    return not torch.allclose(found[0], expected[0], rtol=0, atol=1e-6)


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-10)


def batches(draw):
    """Two batches of 30 with targets drawn like this, in loaders of the whole and of each rank."""
    torch.manual_seed(0)
    whole = [(torch.randn(30, 6).double(), draw(30)) for _ in range(2)]
    return whole, [[tuple(x.chunk(2)[rank] for x in pair) for pair in whole] for rank in (0, 1)]


def values(size):
    return torch.randn(size, 5).double()


def classes(size):
    return torch.randint(5, (size,))


def padded(size):
    return torch.where(torch.rand(size) < 0.4, -100, classes(size))


def form_2():
    """For each `s` in the README: how it changes a listing, the plain loss, and both loaders."""

    def adapt(code, line):
        name = "batch_targets" if "batch_targets" in code else "targets"
        code = without(code, f"weight[{name}].sum()", line.replace("targets", name))
        if "weight" not in line:
            code = re.sub(r'(weight=|"weight": )weight, ', "", code)
        if line == "1":  # a sum of squares
            code = code.replace("cross_entropy", "mse_loss")
            code = re.sub(r" +dist\.all_reduce\(s\).*\n", "", code)
        return code

    lines = re.findall(r"`s = ([^`]+)`", SECTION)
    assert len(lines) == 4
    for line in lines:
        weight = WEIGHT if "weight" in line else None
        criterion = partial(cross_entropy, weight=weight)
        draw = padded if "-100" in line else classes
        if line == "1":
            criterion, draw = partial(mse_loss, reduction="sum"), values
        yield partial(adapt, line=line), criterion, *batches(draw)


def test_accumulation_of_a_sum_divided_by_s():
    """VAE, class weights, padding, both: the weights and the loss; not with the share of 04."""
    for adapt, criterion, loader, _ in form_2():
        code = adapt(block("these add up"))
        expected = train(PLAIN, loader, criterion=criterion, model=network())
        found = train(code, loader, model=network())
        assert_same(found, expected)
        torch.testing.assert_close(found[1], expected[1])
        mean = "sum" if "mse_loss" in code else "mean"
        share = f'"{mean}") * len(targets) / len(batch_targets)'
        as_in_04 = without(code, '"sum") / s', share)
        assert differs(train(as_in_04, loader, model=network()), expected)


@pytest.mark.parametrize("criterion", [contrastive, dice])
def test_accumulation_in_two_passes(criterion):
    loader, _ = batches(values)
    options = {"loader": loader, "criterion": criterion, "model": network()}
    expected = train(PLAIN, **options)
    assert_same(train(block("ends at the outputs"), **options), expected)
    assert differs(train(AS_IN_04, **options), expected)


def test_two_passes_with_dropout_batchnorm_and_scaler():
    """Not without the seeds, nor when the scaled gradient of the outputs is scaled again."""
    loader, _ = batches(values)
    model = network(nn.BatchNorm1d(9), nn.Dropout())
    options = {"loader": loader, "criterion": contrastive, "model": model}
    expected, code = train(SEEDED, **options), block("def forward(inputs, seed)")
    assert_same(train(code, **options), expected)
    assert differs(train(without(code, "torch.manual_seed(seed)", "pass"), **options), expected)
    again = without(code, "backward(gradient)", "backward(scaler.scale(gradient))")
    assert differs(train(again, **options), expected)


def language():
    """Three batches [T, B] of a text with padding, in loaders of the whole and of each rank."""
    torch.manual_seed(0)
    text = torch.randint(9, (3, 6, 12)), torch.randint(9, (3, 6, 12))
    text[1][torch.rand(3, 6, 12) < torch.linspace(0, 0.8, 12)] = -100
    whole = list(zip(*text))
    parts = [[(x[:, rank::2], y[:, rank::2]) for x, y in whole] for rank in (0, 1)]
    return Language().double(), whole, parts


def test_time_in_dimension_0_and_hidden_state():
    model, loader, _ = language()
    expected, code = train(TOKENS, loader, model=model), block("states = [None]")
    assert_same(train(code, loader, model=model), expected)
    for old, new in (
        ("dim=1", "dim=0"),
        ("tuple(tensor.detach() for tensor in state)", "None"),
        (', reduction="sum") / s', ") * len(targets) / batch_targets.numel()"),
    ):
        assert differs(train(without(code, old, new), loader, model=model), expected)


def test_several_batches_per_update():
    """Dictionaries; the last group has fewer batches, and its last one fewer images."""
    images, targets = torch.randn(28, 6).double(), torch.randint(5, (28,))
    loader = [{"inputs": x, "targets": y} for x, y in zip(images.split(3), targets.split(3))]
    whole = 2 * list(zip(images.split(12), targets.split(12)))  # two epochs
    options = {"criterion": nn.CrossEntropyLoss(), "model": network()}
    expected, code = train(GROUPED, whole, **options), block("while group :=")
    assert_same(train(code, loader, **options), expected)
    equal = without(code, 'loss * len(batch["targets"]) / total', "loss / accum")
    assert differs(train(equal, loader, **options), expected)
    with pytest.raises(ValueError, match="Tried to step"):
        train(without(code, "math.ceil(len(loader) / accum)", "2"), loader, **options)


def test_samples_of_an_iterable_dataset():
    """Each sample is read once, by one worker of one rank."""
    names = {"itertools": itertools, "read_samples": lambda: range(23)}
    stream, found = execute(block("class Stream"), **names)["Stream"], []
    for workers, rank in itertools.product((0, 2), (0, 1)):
        options = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(stream(rank, 2), 4, num_workers=workers, **options)
        found += torch.cat([*loader]).tolist()
    assert sorted(found) == sorted([*range(23)] * 2)


def test_ema():
    """Its average, exact after a resume, unless the state of the average is not loaded."""
    loader, _ = batches(classes)
    inputs, targets = loader[0]

    def start():
        model = network(nn.BatchNorm1d(9))
        names = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1, momentum=0.9)}
        return execute(block("AveragedModel"), **names)

    def steps(names, count):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in [1, math.inf, 1, 1][:count]:  # the scaler skips the second
            loss = cross_entropy(names["model"](inputs), targets) * factor
            scaler.scale(loss).backward()
            scaler.step(names["optimizer"])
            scaler.update()
            names["optimizer"].zero_grad()
            yield names["model"][0].weight.detach().clone()

    names = start()
    first, skipped, third, fourth = steps(names, 4)
    assert torch.equal(first, skipped) and names["ema"].n_averaged == 3
    expected = torch.lerp(torch.lerp(first, third, 0.001), fourth, 0.001)
    torch.testing.assert_close(names["ema"].module[0].weight, expected, rtol=0, atol=1e-12)
    assert torch.equal(names["ema"].module[1].running_mean, names["model"][1].running_mean)
    states = {key: names[key].state_dict() for key in ("model", "optimizer", "ema")}
    states = copy.deepcopy(states)
    list(steps(names, 1))
    for states["ema"]["n_averaged"] in torch.tensor(3), torch.tensor(0):
        resumed = start()
        for key, state in states.items():
            resumed[key].load_state_dict(copy.deepcopy(state))
        list(steps(resumed, 1))
        same = torch.equal(resumed["ema"].module[0].weight, names["ema"].module[0].weight)
        assert same == (states["ema"]["n_averaged"] == 3)


def tasks_for_two_ranks():
    """Per task: the code and its options, the loaders of the ranks, what is expected, if it is."""
    for adapt, criterion, loader, parts in form_2():
        expected = train(PLAIN, loader, criterion=criterion, model=network())
        for code in block("divided by world_size"), block("once per batch"):
            code, options = adapt(code), {"model": network()}
            yield code, options, parts, expected, True
            yield without(code, "* world_size"), options, parts, expected, False
            if "mse_loss" not in code:
                own = without(code, "dist.all_reduce(s)", "s *= world_size")
                yield own, options, parts, expected, False
    loader, parts = batches(values)
    for criterion in contrastive, dice:
        options, code = {"criterion": criterion, "model": network()}, block("all_outputs[rank]")
        expected = train(PLAIN, loader, **options)
        yield code, options, parts, expected, True
        for old, new in ("* world_size", ""), ("ddp_model", "model"):
            yield without(code, old, new), options, parts, expected, False
        one = without(code, "torch.cat(all_outputs), torch.cat(all_targets)", "outputs, targets")
        yield without(one, "* world_size"), options, parts, expected, False  # 07 as it is
    model, loader, parts = language()
    options, expected = {"model": model}, train(TOKENS, loader, model=model)
    code = without(block("states = [None]"), "model(inputs", "ddp_model(inputs")
    code = without(code, ".sum()\n", ".sum()\n    dist.all_reduce(s)\n")
    yield code, options, parts, expected, False
    yield without(code, "/ s", "* world_size / s"), options, parts, expected, True
    torch.manual_seed(0)
    loader = [(torch.randn(16, 6).double(), torch.randn(16, 6).double()) for _ in range(3)]
    parts = [[tuple(x.chunk(2)[rank] for x in pair) for pair in loader] for rank in (0, 1)]
    options = {"discriminator": network(nn.BatchNorm1d(9), outputs=1), "criterion": GAN_LOSS}
    options["generator"] = network(nn.BatchNorm1d(9), outputs=6)
    expected, code = train(GAN, loader, **options), block("ddp_generator")
    yield code, options, parts, expected, True
    for old, new in (
        ("ddp_generator", "generator"),
        ("ddp_discriminator", "discriminator"),
        ("discriminator.requires_grad_(False)", ""),
    ):
        yield without(code, old, new), options, parts, expected, False


def on_rank(rank, path, tasks, stop):
    """Do the tasks on one of two ranks, then stop when rank 0 decides, and save the results."""
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(minutes=1)}
    dist.init_process_group("gloo", init_method=f"file://{path}", **options)
    found, wrap = [], nn.parallel.DistributedDataParallel
    for code, options, parts in tasks:
        weights, total_loss = train(code, parts[rank], wrap, **options)
        dist.all_reduce(total_loss)
        found.append((weights, total_loss / 2))
    names = {"dist": dist, "rank": rank, "patience": 3}
    torch.save((found, execute(stop, **names)["epoch"]), f"{path}.{rank}")
    time.sleep(0.5)  # until the other rank has what it needs
    os._exit(0)  # without the destructors of Gloo, in which torch 2.4 can hang


def test_on_two_ranks(tmp_path):
    """The weights are those of one process that has the whole batch; early stopping agrees.

    A task that lacks a factor, or calls the unwrapped model, ends with other weights.
    """
    tasks, path = list(tasks_for_two_ranks()), str(tmp_path / "store")
    stop = "for epoch in range(9):\n    waited = 3 if epoch == 4 + rank else rank\n"
    stop += textwrap.indent(block("dist.broadcast(stop"), "    ")
    given = [task[:3] for task in tasks]
    torch.multiprocessing.spawn(on_rank, (path, given, stop), nprocs=2)
    ranks = [torch.load(f"{path}.{rank}", weights_only=True) for rank in (0, 1)]
    assert [epoch for _, epoch in ranks] == [4, 4]
    for (code, *_, expected, right), *found in zip(tasks, *(results for results, _ in ranks)):
        if right:
            for each in found:
                assert_same(each, expected)
            if "total_loss +=" in code:
                torch.testing.assert_close(found[0][1], expected[1])
        else:
            assert any(differs(each, expected) for each in found), code
