"""Findings that follow from a dtype that is written in the file."""

from __future__ import annotations

import textwrap

import pytest
import torch

from ampscope.ext.preflight.checks import check_source
from ampscope.ext.preflight.half_parameters import HALF_ULP, SMALLEST_FP16
from ampscope.ext.preflight.source import SourceFile


def codes(text: str) -> list[str]:
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    return [f.code.code for f in check_source(SourceFile("t.py", head + textwrap.dedent(text)))]


def test_the_smallest_fp16_number_is_pytorch_s() -> None:
    at, above = torch.tensor([SMALLEST_FP16, SMALLEST_FP16 * 1.001]).half()
    assert at == 0
    assert above > 0


HALF = """
model = nn.Linear(4, 2).cuda()
{cast}
optimizer = torch.optim.{optimizer}
scaler = {scaler}
for x in batches:
    loss = model(x).mean()
    optimizer.zero_grad()
    {steps}
"""
SCALED = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
PLAIN = "loss.backward(); optimizer.step()"


@pytest.mark.parametrize(
    ("cast", "optimizer", "steps", "found"),
    [
        ("model.half()", "Adam(model.parameters())", SCALED, ["AMP022"]),
        ("model.half()", "Adam(model.parameters())", PLAIN, ["AMP023"]),
        ("model.half()", "Adam(model.parameters(), eps=1e-4)", PLAIN, []),
        ("model.half()", "SGD(model.parameters(), lr=0.1)", PLAIN, []),
        ("model.to(torch.bfloat16)", "AdamW(model.parameters())", PLAIN, ["AMP023"]),
        ("model.bfloat16()", "AdamW(model.parameters(), betas=(0.9, 0.95))", PLAIN, []),
        (
            "for p in model.parameters():\n    if p.dim() > 1:\n        p.data = p.data.half()",
            "Adam(model.parameters())",
            SCALED,
            ["AMP022"],
        ),
        ("model.half(); model.float()", "Adam(model.parameters())", SCALED, []),
        ("model.eval()", "Adam(model.parameters())", SCALED, []),
        ("if deploy: model.half()", "Adam(model.parameters())", SCALED, []),
        ("teacher = model.half", "Adam(model.parameters())", SCALED, []),
    ],
)
def test_parameters_that_are_cast(cast: str, optimizer: str, steps: str, found: list[str]) -> None:
    text = HALF.format(
        cast=cast, optimizer=optimizer, steps=steps, scaler="torch.amp.GradScaler('cuda')"
    )
    assert codes(text) == found


@pytest.mark.parametrize(
    ("dtype", "name", "beta"),
    [(torch.bfloat16, "bf16", 0.999), (torch.float16, "fp16", 0.9999)],
)
def test_a_second_moment_that_cannot_fall_is_pytorch_s(
    dtype: torch.dtype, name: str, beta: float
) -> None:
    assert 1 - beta < HALF_ULP[name]
    every = torch.linspace(1, 2, 4096, dtype=torch.float64).to(dtype)
    assert torch.equal(every.clone().mul_(beta), every)


WRAPPED = """
from torch.nn.parallel import DistributedDataParallel as DDP
def build(args):
    model = Net()
    optimizer = make_optimizer(model)
    model = {wrapped}
    return model, optimizer
scaler = torch.amp.GradScaler("cuda")
def train(loss, optimizer):
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""


@pytest.mark.parametrize(
    ("wrapped", "found"),
    [
        ("DDP(model, device_ids=[0]).half()", ["AMP022"]),
        ("nn.DataParallel(model.to(torch.float16)); model.train()", ["AMP022"]),
        ("nn.DataParallel(model).half().cuda(); model.train()", ["AMP022"]),
        ("nn.DataParallel(model.eval()).half()", []),
        ("nn.DataParallel(model).half(); model.requires_grad_(False)", []),
        ("DDP(model).to(torch.bfloat16)", []),
        ("DDP(model).to(args.dtype)", []),
        ("FSDP(model).half()", []),  # ShardedGradScaler takes fp16 gradients
        ("DDP(model).half(); model.float()", []),
    ],
)
def test_what_is_wrapped_for_training_and_cast(wrapped: str, found: list[str]) -> None:
    assert codes(WRAPPED.format(wrapped=wrapped)) == found


def test_a_layer_that_is_cast_where_the_model_makes_it() -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2){cast}

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""
    assert codes(text.format(cast=".half()")) == ["AMP022"]
    assert codes(text.format(cast="")) == []


NO_SCALER = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    with torch.autocast("cuda", dtype={dtype}):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("dtype", "found"),
    [("torch.float16", ["AMP012"]), ("torch.bfloat16", []), ("amp_dtype", [])],
)
def test_fp16_without_a_scaler(dtype: str, found: list[str]) -> None:
    assert codes(NO_SCALER.format(dtype=dtype)) == found


def test_a_trainer_of_a_library_may_scale_the_loss() -> None:
    text = "from accelerate import Accelerator\n" + NO_SCALER.format(dtype="torch.float16")
    assert codes(text) == []


STATE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
saved = torch.load("c.pt")
optimizer.load_state_dict(saved["optimizer"])
{load}
with torch.autocast("cuda"):
    loss = model(x).mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
torch.save({{"optimizer": optimizer.state_dict(), {save}}}, "c.pt")
"""


@pytest.mark.parametrize(
    ("save", "load", "found"),
    [
        ("", "", ["AMP021"]),
        ('"scaler": scaler.state_dict()', "", ["AMP021"]),
        ('"scaler": scaler.state_dict()', 'scaler.load_state_dict(saved["scaler"])', []),
        ("**rest(scaler)", "", []),
    ],
)
def test_the_scaler_s_state_in_the_checkpoint(save: str, load: str, found: list[str]) -> None:
    assert codes(STATE.format(save=save, load=load)) == found


def test_the_scaler_s_state_where_another_file_saves_or_opens_autocast() -> None:
    elsewhere = STATE.replace(
        'torch.save({{"optimizer": optimizer.state_dict(), {save}}}, "c.pt")', ""
    )
    assert codes(elsewhere.format(load="")) == ["AMP021"]
    assert codes(elsewhere.format(load='scaler.load_state_dict(saved["scaler"])')) == []
    assert codes(elsewhere.format(load="restore(scaler, saved)")) == []
    assert codes(elsewhere.replace("torch.load", "weights_of").format(load="")) == []
    region = STATE.replace('with torch.autocast("cuda"):', "if True:")
    assert codes(region.format(load="", save="")) == ["AMP021"]


def test_the_scaler_s_state_where_a_function_of_the_file_loads_the_optimizer() -> None:
    text = STATE.replace('optimizer.load_state_dict(saved["optimizer"])', "resume(opt=optimizer)")
    text = "def resume(opt):\n    opt.load_state_dict(torch.load('c.pt')['optimizer'])\n" + text
    assert codes(text.format(load="", save="")) == ["AMP021"]
    assert codes(text.format(load="", save="**rest(scaler)")) == []


AGAIN = """
for x in batches:
    loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if diverged(loss):
        saved = torch.load("c.pt")
        optimizer.load_state_dict(saved["optimizer"])
        scaler = torch.amp.GradScaler("cuda")
        {load}
"""


def test_a_scaler_made_anew_where_the_optimizer_is_loaded() -> None:
    assert codes(AGAIN.format(load="pass")) == ["AMP021"]
    assert codes(AGAIN.format(load='scaler.load_state_dict(saved["scaler"])')) == []
    assert codes(AGAIN.format(load="pass").replace("optimizer.load_state_dict", "show")) == []
    assert codes(AGAIN.format(load="restore(scaler, saved)")) == []


def test_a_scaler_made_for_each_fold_replaces_none() -> None:
    text = """
for fold in folds:
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(warm)
    scaler = torch.amp.GradScaler("cuda")
    for x in fold:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
"""
    assert codes(text) == []


@pytest.mark.parametrize(("divided", "found"), [("", ["AMP020"]), ("/ scaler.get_scale()", [])])
def test_a_penalty_on_scaled_gradients(divided: str, found: list[str]) -> None:
    text = f"""
def penalty(scaler, x):
    out = critic(x)
    grads = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0] {divided}
    loss = grads.norm()
    scaler.scale(loss).backward()
"""
    assert codes(text) == found


@pytest.mark.parametrize(("around", "found"), [("no_grad", ["PRE004"]), ("autocast", [])])
def test_evaluation_outside_autocast(around: str, found: list[str]) -> None:
    context = {"no_grad": "torch.no_grad()", "autocast": "torch.autocast('cuda')"}[around]
    text = f"""
def evaluate(model, batches):
    model.eval()
    for x in batches:
        with {context}:
            out = model(x)

def train(model, scaler, optimizer):
    for x in batches:
        with torch.autocast("cuda"):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    evaluate(model, batches)
"""
    assert codes(text) == found


TRAINED_WRAPPED = """
def evaluate(model, batches):
    {evaluated}
    with torch.no_grad():
        for x in batches:
            out = {called}(x)

def train(model, scaler, optimizer):
    wrapped = {wrapped}
    for x in batches:
        with torch.autocast("cuda"):
            loss = wrapped(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    evaluate(model, batches)
"""


@pytest.mark.parametrize(
    ("wrapped", "evaluated", "called", "found"),
    [
        ("nn.parallel.DistributedDataParallel(model)", "model.eval()", "model", ["PRE004"]),
        ("torch.compile(model)", "model.eval()", "model", ["PRE004"]),
        ("Critic(model)", "model.eval()", "model", []),
        ("torch.compile(model)", "held = copy.deepcopy(model).eval()", "held", ["PRE004"]),
        ("torch.compile(model)", "held = copy.deepcopy(other).eval()", "held", []),
    ],
)
def test_evaluation_outside_autocast_of_a_wrapped_or_copied_model(
    wrapped: str, evaluated: str, called: str, found: list[str]
) -> None:
    assert (
        codes(TRAINED_WRAPPED.format(wrapped=wrapped, evaluated=evaluated, called=called)) == found
    )


def test_evaluation_outside_autocast_in_a_method_beside_the_one_that_trains() -> None:
    text = """
class Trainer:
    def train(self, batches):
        for x in batches:
            with torch.autocast("cuda"):
                loss = self.model(x).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
{indent}def evaluate(self, batches):
{indent}    self.model.eval()
{indent}    for x in batches:
{indent}        out = self.model(x)
"""
    assert codes(text.format(indent="    ")) == ["PRE004"]
    assert codes(text.format(indent="")) == []


def test_evaluation_outside_autocast_of_a_model_that_the_file_s_top_level_trains() -> None:
    text = """
def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            print((model(x) == y).float().mean())

for x in batches:
    with torch.autocast("cuda"):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
evaluate(model, batches)
"""
    assert codes(text) == ["PRE004"]


def test_a_model_is_cast_and_handed_to_the_function_that_makes_its_optimizer() -> None:
    text = """
import torch
def make(net):
    return torch.optim.AdamW(net.parameters(), eps=1e-4), None
model = torch.nn.Linear(2, 2).half()
optimizer, schedule = make(model)
scaler = torch.amp.GradScaler()
def train(loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    found = [f.code.code for f in check_source(SourceFile("t.py", text))]
    assert found == ["AMP022"]
    assert check_source(SourceFile("t.py", text.replace(".half()", ""))) == []


def test_a_state_that_is_loaded_into_a_scaler_that_does_not_scale() -> None:
    text = """
import torch
scaler = torch.amp.GradScaler()
restored = torch.amp.GradScaler()
restored.load_state_dict(checkpoint["scaler"])
with torch.autocast("cuda"):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""
    assert [f.code.code for f in check_source(SourceFile("t.py", text))] == ["AMP021"]
    assert check_source(SourceFile("t.py", text.replace("restored", "scaler"))) == []


HELD = """
from contextlib import suppress

def evaluate(model, batches, context=suppress):
    model.eval()
    for x in batches:
        with {evaluated}:
            out = model(x)

def train(model, scaler, optimizer, batches, region=suppress):
    for x in batches:
        with region():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

chosen = suppress
if torch.cuda.is_available():
    chosen = {chosen}
train(model, scaler, optimizer, batches, region=chosen)
evaluate(model, batches)
"""


@pytest.mark.parametrize(
    ("chosen", "evaluated", "found"),
    [
        ("torch.cuda.amp.autocast", "torch.no_grad()", ["PRE004"]),
        ("functools.partial(torch.autocast, 'cuda')", "torch.no_grad()", ["PRE004"]),
        ("torch.no_grad", "torch.no_grad()", []),  # no value of the name is autocast
        ("torch.cuda.amp.autocast", "context()", []),  # whatever the caller gives
        ("torch.cuda.amp.autocast", "chosen()", []),
    ],
)
def test_evaluation_outside_an_autocast_that_a_name_holds(
    chosen: str, evaluated: str, found: list[str]
) -> None:
    text = HELD.format(chosen=chosen, evaluated=evaluated)
    assert [c for c in codes("import functools\n" + text) if c == "PRE004"] == found


@pytest.mark.parametrize(
    ("parts", "found"),
    [("[self.encoder, self.head]", ["PRE004"]), ("[self.loader]", []), ("parts()", [])],
)
def test_evaluation_outside_autocast_of_models_in_a_list(parts: str, found: list[str]) -> None:
    text = f"""
class Runner:
    def __init__(self):
        self.parts = {parts}

    def train(self, batches):
        for x in batches:
            with torch.autocast("cuda"):
                loss = self.head.model(self.encoder.model(x)).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def evaluate(self, batches):
        for part in self.parts:
            part.model.eval()
        for x in batches:
            with torch.no_grad():
                out = self.encoder.model(x)
"""
    assert codes(text) == found


def test_a_scaler_behind_a_conditional_expression_is_no_defect() -> None:
    """Its sides are expressions, where those of a branch are lists of statements."""
    text = """
    def train(model, optimizer, x, fp16):
        scaler = torch.amp.GradScaler("cuda") if fp16 else None
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    assert codes(text) == []
