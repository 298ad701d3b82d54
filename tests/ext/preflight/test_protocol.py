"""GradScaler's protocol: what is wrong is found, what is right or unknown is not.

Where PyTorch itself raises, PyTorch is the oracle: the program is run on a CPU, too.
"""

from __future__ import annotations

import textwrap

import pytest

from ampscope.ext.preflight.checks import check_source
from ampscope.ext.preflight.source import SourceFile

HEAD = """
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
"""


def program(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def loop(body: str) -> str:
    """A training loop around statements that start with a loss."""
    inside = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    start = "    loss = model(torch.ones(3, 4)).square().mean()\n    optimizer.zero_grad()\n"
    return f"{HEAD}\nfor step in range(4):\n{start}{inside}\n"


def codes(text: str) -> list[tuple[str, str]]:
    """Code and text of the line of each finding."""
    lines = text.split("\n")
    return [
        (f.code.code, lines[f.line - 1].strip()) for f in check_source(SourceFile("t.py", text))
    ]


RAISES = {
    "unscaled twice": (
        """
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        """,
        "scaler.unscale_(optimizer)",
    ),
    "unscaled after step": (
        """
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.unscale_(optimizer)
        scaler.update()
        """,
        "scaler.unscale_(optimizer)",
    ),
    "stepped twice": (
        """
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        """,
        "scaler.step(optimizer)",
    ),
    "update left out": (
        """
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        """,
        "scaler.step(optimizer)",
    ),
    "update before step": (
        """
        scaler.scale(loss).backward()
        scaler.update()
        scaler.step(optimizer)
        """,
        "scaler.update()",
    ),
    "unscaled in each micro-batch": (
        """
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if (step + 1) % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
        """,
        "scaler.unscale_(optimizer)",
    ),
}


@pytest.mark.parametrize("name", RAISES)
def test_what_pytorch_raises_on_is_found(name: str) -> None:
    body, line = RAISES[name]
    text = loop(body)
    with pytest.raises((RuntimeError, AssertionError)):
        exec(compile(text, "t.py", "exec"), {})
    assert codes(text) == [("AMP017", line)]


RIGHT = {
    "a_test_without_a_name": """
        if True:
            scaler.scale(loss).backward()
        if not (1 > 2 or
                ""):
            scaler.step(optimizer)
        scaler.update()
        """,
    "plain": """
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
    "clipped": """
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        """,
    "accumulated": """
        scaler.scale(loss / 2).backward()
        if (step + 1) % 2 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    "the norm alone": """
        scaler.scale(loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        """,
    "a limit that carries the scale": """
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        """,
    "divided by hand": """
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.div_(scaler.get_scale())
        optimizer.step()
        """,
    "a bad batch left out": """
        if not torch.isfinite(loss):
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
    "with and without": """
        use_amp = step > 1
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if use_amp:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if use_amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_trains_is_left_alone(name: str) -> None:
    text = loop(RIGHT[name])
    exec(compile(text, "t.py", "exec"), {})
    assert codes(text) == []


def test_a_clip_before_unscale_is_found_in_a_branch_of_its_own() -> None:
    text = loop(
        """
        scaler.scale(loss).backward()
        if step > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        """
    )
    assert codes(text) == [("AMP015", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")]


def test_a_clip_before_unscale_is_found_across_methods() -> None:
    text = program(
        """
        class Trainer:
            def __init__(self, optimizer):
                self.optimizer = optimizer
                self.scaler = torch.amp.GradScaler("cuda")

            def clip(self):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

            def train(self, loss):
                self.scaler.scale(loss).backward()
                self.clip()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """
    )
    assert codes(text) == [("AMP015", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")]
    unscaled = text.replace(
        "    torch.nn.utils", "    self.scaler.unscale_(self.optimizer)\n        torch.nn.utils"
    )
    assert codes(unscaled) == []


def test_a_method_that_is_not_in_the_file_may_have_unscaled() -> None:
    text = program(
        """
        class Trainer(Base):
            def train(self, loss):
                self.scaler.scale(loss).backward()
                self.before_clip()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """
    )
    assert codes(text) == []
    assert codes(text.replace("self.before_clip()", "pass")) != []


def test_a_scaler_that_may_be_none_is_followed_into_a_function() -> None:
    text = program(
        """
        def backward(loss, scaler):
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()

        def train(loss, optimizer, scaler):
            backward(loss, scaler)
            if scaler is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """
    )
    assert codes(text) == []


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        (
            "loss.backward()\nscaler.step(optimizer)\nscaler.update()",
            "AMP016",
            "loss.backward()",
        ),
        ("scaler.scale(loss).backward()\noptimizer.step()", "AMP016", "optimizer.step()"),
        (
            "scaler.scale(loss).backward()\nscaler.step(optimizer)\noptimizer.step()\n"
            "scaler.update()",
            "AMP016",
            "optimizer.step()",
        ),
    ],
)
def test_a_scaler_that_is_bypassed_is_found(body: str, code: str, line: str) -> None:
    assert codes(loop(body)) == [(code, line)]


def test_an_update_between_two_optimizers_is_found() -> None:
    text = program(
        """
        for real in range(3):
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)
            scaler.update()
            scaler.scale(loss_g).backward()
            scaler.step(opt_g)
            scaler.update()
        """
    )
    assert [code for code, _ in codes(text)] == ["AMP019"]
    once = text.replace("scaler.step(opt_d)\n    scaler.update()", "scaler.step(opt_d)")
    assert codes(once) == []


def test_accumulation_with_unscale_and_update_in_each_micro_batch_is_found() -> None:
    text = program(
        """
        for step in range(4):
            loss = model(torch.ones(3, 4)).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            if (step + 1) % 2 == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
        """
    )
    assert ("AMP018", "scaler.scale(loss).backward()") in codes(text)


def test_a_scaler_that_comes_from_elsewhere_is_known_by_its_use() -> None:
    text = program(
        """
        def train(loss, **given):
            grad_scaler = given.get("scaler")
            opt = given.get("optimizer")
            grad_scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(opt)
            grad_scaler.update()
        """
    )
    assert codes(text) == [("AMP015", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")]


def test_files_without_torch_are_not_read_as_pytorch() -> None:
    text = loop("loss.backward()\nscaler.step(optimizer)").replace("torch", "paddle")
    assert codes(text) == []


def test_a_loss_that_was_handed_in_is_followed() -> None:
    """What is given to scaler.scale carries no scale yet; sent backward itself, it is unscaled."""
    text = program(
        """
        def update(loss, scaler, optimizer):
            scaled = scaler.scale(loss)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        """
    )
    assert codes(text) == [("AMP016", "loss.backward()")]
    assert codes(text.replace("loss.backward()", "scaled.backward()")) == []


def test_a_gradient_that_is_scaled_by_hand_is_a_scaled_backward() -> None:
    text = loop(
        """
        gradient = torch.ones_like(loss)
        loss.backward(scaler.scale(gradient))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        """
    )
    assert [code for code, _ in codes(text)] == ["AMP015"]


def test_micro_batches_in_a_loop_of_their_own() -> None:
    text = loop(
        """
        for part in range(parts):
            scaler.scale(loss).backward()
        optimizer.step()
        """
    )
    assert ("AMP016", "optimizer.step()") in codes(text)


def test_an_exception_elsewhere_says_nothing_of_the_scaler() -> None:
    text = loop(
        """
        try:
            batch = next(batches)
        except StopIteration:
            batch = None
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        """
    )
    assert [code for code, _ in codes(text)] == ["AMP015"]


TRAINER = """
import torch
class Trainer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler()
    def train(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
"""


def test_a_scaler_that_is_never_updated() -> None:
    assert codes(TRAINER) == [("AMP017", "self.scaler.step(self.optimizer)")]
    assert codes(TRAINER + "        self.scaler.update()\n") == []
    assert codes(TRAINER + "        finish(self.scaler)\n") == []  # it may be updated there
    made = "self.scaler = torch.amp.GradScaler()"
    assert made in TRAINER
    stored = "scaler = torch.amp.GradScaler()\n        self.scaler = scaler"
    assert codes(TRAINER.replace(made, stored)) == [("AMP017", "self.scaler.step(self.optimizer)")]
    for shared in (
        stored + "\n        model.scaler = scaler",
        "self.scaler = given or torch.amp.GradScaler()",
        "self.scaler = torch.amp.GradScaler(enabled=False)",
    ):
        assert codes(TRAINER.replace(made, shared)) == [], shared


WRAPPER = """
import torch

class LossScaler:
    def __init__(self):
        try:
            self._scaler = torch.amp.GradScaler(device="cuda")
        except TypeError:
            self._scaler = torch.cuda.amp.GradScaler()
    def __call__(self, loss, optimizer, last=True):
        loss.backward()
        if last:
            self._scaler.step(optimizer)
            self._scaler.update()
"""


def test_a_scaler_that_never_scales() -> None:
    """What the loss is, a caller knows; that it was not scaled, the file says."""
    assert codes(WRAPPER) == [("AMP017", "self._scaler.step(optimizer)")]
    assert codes(WRAPPER.replace("loss.backward", "self._scaler.scale(loss).backward")) == []
    by_hand = WRAPPER.replace("loss.backward()", "(loss * self._scaler.get_scale()).backward()")
    assert codes(by_hand) == []
    for more in (
        "    def scaler(self):\n        return self._scaler\n",
        "    def save(self):\n        return float(self._scaler._scale)\n",
        "def train(wrapper, loss):\n    wrapper._scaler.scale(loss).backward()\n",
        "    def other(self, loss):\n        s = self._scaler if self.on else None\n",
    ):
        assert codes(WRAPPER + more) == [], more
    assert codes(WRAPPER.replace('device="cuda"', "enabled=False")) == []
    second = "    def critic(self, loss, other):\n        loss.backward()\n"
    second += "        other.step()\n        other.zero_grad()\n"
    assert codes(WRAPPER + second) == []  # which of the two backward calls is whose, is not known


def test_unscaled_again_behind_a_branch_that_has_unscaled() -> None:
    """Wrong wherever the branch was taken, whatever it asks; the other way round it is unknown."""
    body = """
    scaler.scale(loss).backward()
    if config.clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    """
    assert codes(loop(body)) == [("AMP017", "scaler.unscale_(optimizer)")]
    guarded = body.replace(
        "    scaler.unscale_(optimizer)\n    scaler.step",
        "    if config.log_norm:\n        scaler.unscale_(optimizer)\n    scaler.step",
    )
    assert guarded != body
    assert codes(loop(guarded)) == []
    left = """
    scaler.scale(loss).backward()
    if due(step):
        scaler.unscale_(optimizer)
    if due(step):
        scaler.step(optimizer)
        scaler.update()
        continue
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    """
    assert codes(loop(left)) == []


def test_what_has_param_groups_and_a_step_is_an_optimizer() -> None:
    body = """
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1
    scaler.scale(loss).backward()
    trainer.optimizer.step()
    """
    assert codes(loop(body)) == [("AMP016", "trainer.optimizer.step()")]
    assert codes(loop(body.replace("param_groups", "groups"))) == []


def test_paths_that_differ_in_nothing_to_come_are_followed_as_one() -> None:
    """Twenty independent switches are a million paths; the fault behind them is found."""
    switches = "".join(
        f"    if config.switch_{n}:\n        optimizer.zero_grad()\n" for n in range(20)
    )
    text = program(
        f"""
def train(config, loss):
{switches}    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
    )
    assert [code for code, _ in codes(text)] == ["AMP015"]


def test_a_test_that_is_asked_twice_goes_the_same_way_in_both_turns_of_a_loop() -> None:
    """The test's outcome is kept while the loop's second turn may ask for it."""
    text = program(
        """
class Trainer:
    def __init__(self, config):
        self.config, self.count = config, 0
        self.scaler = torch.amp.GradScaler()
    def train(self):
        for batch in self.batches:
            self.run()
    def run(self):
        loss = self.model(self.batch)
        if self.config.amp:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()
        self.count += 1
        if self.count >= self.config.every:
            if self.config.amp:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
"""
    )
    assert codes(text) == []


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        """
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        loss = scaler.scale(loss) if scaler else loss
        loss.backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        """,
        """
        scaled = scaler.scale(loss) if scaler is not None else loss
        print("x") if step else (scaled if scaler is not None else loss).backward()
        if step == 0 and scaler is not None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        """,
    ],
    ids=["receiver", "statement", "nested"],
)
def test_conditional_expressions_go_one_way(body: str, amp: bool) -> None:
    """A loop that PyTorch runs with a scaler and without one."""
    text = loop(body).replace(
        'scaler = torch.amp.GradScaler("cpu", init_scale=4.0)',
        f'amp = {amp}\nscaler = torch.amp.GradScaler("cpu", init_scale=4.0) if amp else None',
    )
    exec(compile(text, "t.py", "exec"), {})
    assert codes(text) == []
    assert codes(text.replace(f"amp = {amp}\n", "import sys\namp = len(sys.argv) > 1\n")) == []


def test_a_conditional_expression_that_is_wrong_is_found() -> None:
    text = loop(
        """
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        print(step) if step % 2 else optimizer.step()
        scaler.update()
        """
    )
    (found,) = check_source(SourceFile("t.py", text))
    assert (found.code.code, found.edits) == ("AMP016", ())  # the line does more than the fault


@pytest.mark.parametrize(
    "body",
    [
        "for wrapped in all_of_them:\n    scaler.unscale_(wrapped.optimizer)",
        "for o in all_of_them:\n    o = o.optimizer\n    scaler.unscale_(o)",
        "for o in all_of_them:\n    while hasattr(o, 'optimizer'):\n"
        "        o = o.optimizer\n    scaler.unscale_(o)",
    ],
    ids=["attribute", "assigned", "unwrapped"],
)
def test_each_pass_of_a_loop_has_an_optimizer_of_its_own(body: str) -> None:
    start = f"""{HEAD}
class Wrapper:
    def __init__(self, module):
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

all_of_them = [Wrapper(model), Wrapper(nn.Linear(1, 1))]
scaler.scale(model(torch.ones(3, 4)).mean()).backward()
"""
    exec(compile(start + body, "t.py", "exec"), {})
    assert codes(start + body) == []
