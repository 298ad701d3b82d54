"""Small trainings with objects that run code of their own wherever they are asked anything.

Each text defines ``model``, ``optimizer`` and ``inputs`` (a function of the step), and may define
``step(loss)``, in the place of the usual zero_grad, backward and step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_NET = "model = torch.nn.Sequential(torch.nn.Linear(4, 8), {}, torch.nn.Linear(8, 1))\n"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), 0.05)\n"

MODULES = {
    "== makes a module": """
class Odd(torch.nn.Module):
    def forward(self, x): return x.relu()
    def __hash__(self): return hash(id(self) + len(made))
    def __eq__(self, other):
        made.append(Odd())
        return made[-1]
made = []
""",
    "hash is random": """
import itertools
class Odd(torch.nn.ReLU):
    numbers = itertools.count()
    def __hash__(self): return next(self.numbers)
    def __eq__(self, other): return False
""",
    "len and bool raise": """
class Odd(torch.nn.ReLU):
    def __len__(self): raise RuntimeError("no length")
    def __bool__(self): raise RuntimeError("neither")
    def __iter__(self): raise RuntimeError("not these")
""",
    "every attribute": """
class Answer:
    def __getattr__(self, name): return Answer()
    def __call__(self, *args, **kwargs): return Answer()
    def __bool__(self): raise RuntimeError("neither")
class Odd(torch.nn.ReLU):
    def __getattr__(self, name):
        try: return super().__getattr__(name)
        except AttributeError: return Answer()
""",
    "another class midway": """
class Other(torch.nn.ReLU):
    def forward(self, x): return super().forward(x) * 1.0
class Odd(torch.nn.ReLU):
    def forward(self, x):
        self.__class__ = Other
        return super(Other, self).forward(x)
""",
    "lists raise": """
class Odd(torch.nn.ReLU):
    def children(self): raise RuntimeError("none")
    def named_buffers(self, *args, **kwargs): raise RuntimeError("none")
    def buffers(self, *args, **kwargs): raise RuntimeError("none")
    def named_children(self): raise RuntimeError("none")
    def modules(self): raise RuntimeError("none")
""",
    "slots": """
class Odd(torch.nn.ReLU):
    __slots__ = ("kept",)
    def forward(self, x):
        self.kept = x
        return super().forward(x)
""",
}
# Accelerate itself asks a module for its attributes and for the modules in it.
TAKEN_BY_ACCELERATE = sorted(MODULES.keys() - {"every attribute", "lists raise"})
TRAININGS = {name: text + _NET.format("Odd()") + _SGD for name, text in MODULES.items()}
TRAININGS["no hash"] = """
class Odd(torch.nn.Module):
    __hash__ = None
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(4, 1)
    def __eq__(self, other): raise RuntimeError("unequal to all")
    def forward(self, x): return self.inside(x)
model = Odd()
optimizer = torch.optim.SGD(model.inside.parameters(), 0.05)
"""
TRAININGS["lazy"] = (
    "model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.LazyLinear(1))\n"
    "class Late:\n"
    "    made = None\n"
    "    def zero_grad(self): pass\n"
    "    def step(self):\n"
    "        if self.made is None: self.made = torch.optim.SGD(model.parameters(), 0.05)\n"
    "        self.made.step(); self.made.zero_grad()\n"
    "optimizer = Late()\n"
)
TRAININGS["tensors"] = (
    _NET.format("torch.nn.ReLU()")
    + _SGD
    + """
class Odd(torch.Tensor):
    __hash__ = None
    def __eq__(self, other): raise RuntimeError("unequal to all")
    def __bool__(self): raise RuntimeError("neither")
    def __len__(self): raise RuntimeError("no length")
    def __iter__(self): raise RuntimeError("not these")
usual = inputs
def inputs(step): return usual(step).as_subclass(Odd)
"""
)
OPTIMIZERS = {
    "wrapper": """
class Noam:
    def __init__(self, inner): self.optimizer = inner
    @property
    def param_groups(self): return self.optimizer.param_groups
    def __bool__(self): raise RuntimeError("neither")
    def __eq__(self, other): raise RuntimeError("unequal to all")
    def zero_grad(self): self.optimizer.zero_grad()
    def step(self): self.optimizer.step()
optimizer = Noam(torch.optim.Adam(model.parameters(), 0.01))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
def step(loss):
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "none of torch's": """
class Own:
    def __init__(self, parameters): self.param_groups = [{"params": list(parameters)}]
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]: p -= 0.01 * p.grad
    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]: p.grad = None
optimizer = Own(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
def step(loss):
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "a dictionary of them": """
class Several(dict):
    def step(self):
        for one in self.values(): one.step()
    def zero_grad(self):
        for one in self.values(): one.zero_grad()
optimizer = Several(a=torch.optim.SGD(model[0].parameters(), 0.05),
                    b=torch.optim.Adam(model[2].parameters(), 0.01))
""",
    "a closure": """
optimizer = torch.optim.LBFGS(model.parameters(), 0.05, max_iter=3)
def step(loss):
    def closure():
        optimizer.zero_grad()
        again = loss_of(number)
        again.backward()
        return again
    optimizer.step(closure)
""",
    "a subclass without truth": """
class Odd(torch.optim.SGD):
    def __len__(self): return 0
    def __bool__(self): raise RuntimeError("neither")
    def __eq__(self, other): raise RuntimeError("unequal to all")
    __hash__ = None
optimizer = Odd(model.parameters(), 0.05)
""",
    "step is replaced": """
optimizer = torch.optim.SGD(model.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
inner = optimizer.step
optimizer.step = lambda *args, **kwargs: inner(*args, **kwargs)
def step(loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
""",
    "state that is none": """
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.state = [1, 2]
        self.param_groups[0]["lr"] = torch.tensor([0.05])
        self.param_groups[0]["eps"] = "small"
optimizer = Odd(model.parameters(), 0.05)
""",
    "a scaler that is a duck": """
optimizer = torch.optim.SGD(model.parameters(), 0.05)
class Duck:
    def scale(self, loss): return loss * 8.0
    def step(self, one):
        for group in one.param_groups:
            for p in group["params"]: p.grad /= 8.0
        one.step()
    def update(self): pass
scaler = Duck()
def step(loss):
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
    "a scaler whose scale is not told": """
optimizer = torch.optim.SGD(model.parameters(), 0.05)
class Silent(torch.amp.GradScaler):
    def get_scale(self): raise RuntimeError("not now")
scaler = Silent("cpu", init_scale=1024.0)
def step(loss):
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
""",
}
TRAININGS |= {
    f"optimizer: {name}": _NET.format("torch.nn.ReLU()") + text for name, text in OPTIMIZERS.items()
}

_BEFORE = """import hashlib, sys, torch
torch.manual_seed(0)
def inputs(step): return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
def step(loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
_AFTER = """
every = hashlib.sha256()
def tensors(module):
    for one in module._parameters.values(): yield one
    for child in module._modules.values(): yield from tensors(child)
def look():
    for one in tensors(model): every.update(one.detach().numpy().tobytes())
def loss_of(number):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(inputs(number))
    look()
    loss = out.float().square().mean()
    return loss * float("inf") if number == 4 and "diverge" in sys.argv else loss
if "watch" in sys.argv:
    import ampscope
    run = ampscope.watch(model, store=sys.argv[2], policy="ignore")
for number in range(6):
    step(loss_of(number))
look()
weights = every.hexdigest()  # of every step
print("weights", weights)
if "watch" in sys.argv: run.close()
"""


def odd(name: str) -> Any:
    """One module of the kind."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(MODULES[name], "script.py", "exec"), names)
    return names["Odd"]()


class Wrapper:
    """An optimizer that is none of torch's, and keeps one in its attribute ``place``."""

    __hash__ = None  # type: ignore[assignment]  # as some define it

    def __init__(self, inner: torch.optim.Optimizer, place: str) -> None:
        setattr(self, place, inner)
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state, self.zero_grad = inner.state, inner.zero_grad
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict
        self.inner_step = inner.step

    def step(self, closure: Any = None) -> Any:
        return self.inner_step(closure)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("unequal to all")

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def script(name: str) -> str:
    """A whole script. With the arguments ``watch STORE`` it watches itself; with ``diverge`` its
    loss is infinite at step 4."""
    return _BEFORE + TRAININGS[name] + _AFTER


def trained(name: str, *args: str) -> dict[str, Any]:
    """What the script's names stand for after it has run in this process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    given, sys.argv = sys.argv, ["script.py", *args]
    try:
        exec(compile(script(name), "script.py", "exec"), names)
    finally:
        sys.argv = given
    return names
