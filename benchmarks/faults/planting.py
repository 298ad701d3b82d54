"""What a planted fault is, the list of all of them, and how one is put into a script.

A fault is a function of a script's roles and a random generator. It looks for a place in the syntax
tree, draws parameters, and returns a ``Draft`` of edits, or None where the script has no such place.
Look-alikes and forms are written the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.faults.source import Edit, Script, dotted

OPTIMIZERS = (".Adam", ".AdamW", ".SGD", ".RMSprop", ".Adagrad", ".NAdam", ".RAdam")
FAMILIES = (
    "protocol", "scale", "range", "derivatives", "state", "everywhere", "quantities", "sites",
)  # fmt: skip


ROUNDING = "harmful_rounding"  # the cause of a site whose rounding harms, where no other fits


@dataclass(slots=True)
class Draft:
    """Edits that make the faulty script, and the repaired one; none: the script as it was."""

    faulty: list[Edit]
    repaired: list[Edit] = field(default_factory=list)
    module: tuple[str, str] | None = None  # class, attribute below it: where the fault shows
    accept: tuple[str, ...] = ()  # causes that are as right as the fault's own
    params: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A site of half precision: how numbers become half, which numbers, and where in a program."""

    site: str  # cast, constructor, array, file, table, module, state, accumulator, hook, function
    role: str  # what becomes half: ids, labels, timestamps, moments, gradients, metric, ...
    place: str  # preparation, loader, forward, backward, optimizer, evaluation, resume
    has_rule: bool = False  # whether a rule of its own may name it, besides harmful_rounding
    at_line: tuple[str, ...] = ()  # causes that are right if they are found at its line


@dataclass(frozen=True, slots=True)
class Kind:
    """One transformation. ``fp32``: "trains" when the faulty script must train in fp32, "fails"
    when it must be damaged there too, "any" where that says nothing about the cause."""

    name: str
    cause: str  # no_fault: a look-alike
    fp32: str
    draft: Callable[[Roles, random.Random], Draft | None]
    mechanism: Mechanism | None = None


@dataclass(frozen=True, slots=True)
class Planted:
    """A faulty script with its repair and its key. Of a look-alike, ``repaired`` is the base."""

    kind: str
    cause: str
    accept: tuple[str, ...]
    fp32: str
    faulty: str
    repaired: str
    lines: tuple[int, ...]
    module: tuple[str, str] | None
    params: dict[str, object]
    mechanism: Mechanism | None = None


FAULTS: dict[str, Kind] = {}
LOOKALIKES: dict[str, Kind] = {}
MECHANISMS: dict[str, Kind] = {}
TWINS: dict[str, Kind] = {}
FORMS: dict[str, Kind] = {}
Drafter = Callable[["Roles", random.Random], Draft | None]
SiteDrafter = Callable[["Roles", random.Random, bool], Draft | None]


def fault(cause: str, fp32: str = "any") -> Callable[[Drafter], Drafter]:
    """Registers a fault under its function's name."""

    def register(draft: Drafter) -> Drafter:
        FAULTS[draft.__name__] = Kind(draft.__name__, cause, fp32, draft)
        return draft

    return register


def lookalike(draft: Drafter) -> Drafter:
    """Registers a harmless transformation."""
    LOOKALIKES[draft.__name__] = Kind(draft.__name__, "no_fault", "any", draft)
    return draft


def mechanism(name: str, what: Mechanism, draft: SiteDrafter, accept: tuple[str, ...] = ()) -> None:
    """Registers a site twice: where its rounding harms, and as its healthy twin, where it does not.
    ``draft`` is told which; ``accept``: causes that say the same as ``harmful_rounding`` there."""

    def harmful(s: Roles, rng: random.Random) -> Draft | None:
        found = draft(s, rng, True)
        if found is not None:
            found.accept = (*accept, *found.accept)
        return found

    def harmless(s: Roles, rng: random.Random) -> Draft | None:
        found = draft(s, rng, False)
        return None if found is None else dataclasses.replace(found, accept=())

    MECHANISMS[name] = Kind(name, ROUNDING, "trains", harmful, what)
    twin = f"{name}_twin"
    TWINS[twin] = Kind(twin, "no_fault", "any", harmless, what)


def form(draft: Drafter) -> Drafter:
    """Registers another way of writing the same training."""
    FORMS[draft.__name__] = Kind(draft.__name__, "", "any", draft)
    return draft


def load() -> None:
    """Fill the lists."""
    for name in FAMILIES:
        importlib.import_module(f"benchmarks.faults.plants.{name}")
    importlib.import_module("benchmarks.faults.lookalikes")
    importlib.import_module("benchmarks.faults.forms")


def plant(kind: Kind, text: str, seed: int) -> Planted | None:
    """Put a fault or look-alike into a script; None where it has no place."""
    roles = roles_of(text)
    draft = kind.draft(roles, random.Random(seed))
    if draft is None:
        return None
    faulty, lines = roles.apply(draft.faulty)
    repaired, _ = roles.apply(draft.repaired)
    if faulty == repaired and kind.name != "as_written":
        return None
    accept = (kind.cause, *draft.accept)
    return Planted(
        kind.name,
        kind.cause,
        accept,
        kind.fp32,
        faulty,
        repaired,
        lines,
        draft.module,
        draft.params,
        kind.mechanism,
    )


def reform(kind: Kind, text: str, seed: int) -> str | None:
    """The script in another form."""
    roles = roles_of(text)
    draft = kind.draft(roles, random.Random(seed))
    return None if draft is None else roles.apply(draft.faulty)[0]


class Roles(Script):
    """A training script and who is who in it: scaler, optimizer, loss, layers."""

    @cached_property
    def scaler_makers(self) -> list[ast.Call]:
        return self.calls("GradScaler")

    @cached_property
    def optimizer_makers(self) -> list[ast.Call]:
        return self.calls(*OPTIMIZERS)

    @cached_property
    def is_bf16(self) -> bool:
        """Whether its half format is bf16, which has the range of fp32."""
        return any(
            (isinstance(n, ast.Attribute) and n.attr == "bfloat16")
            or (isinstance(n, ast.Constant) and str(n.value).startswith("bf16"))
            or (isinstance(n, ast.keyword) and n.arg == "bf16")
            for n in ast.walk(self.tree)
        )

    @cached_property
    def _scalers(self) -> set[str]:
        """Last parts of the names that scalers are assigned to."""
        found = {
            dotted(t).split(".")[-1]
            for call in self.scaler_makers
            for t in getattr(self.statement(call), "targets", [])
        }
        return found | {"scaler", "grad_scaler"}

    def of_scaler(self, method: str) -> list[ast.Call]:
        """Calls of a scaler's method."""
        return [
            c
            for c in self.calls("." + method)
            if isinstance(c.func, ast.Attribute)
            and dotted(c.func.value).split(".")[-1] in self._scalers
        ]

    def owner(self, call: ast.Call) -> str:
        """ "self.scaler" of self.scaler.step(opt)."""
        assert isinstance(call.func, ast.Attribute)
        return self.segment(call.func.value)

    @cached_property
    def backwards(self) -> list[tuple[ast.Call, ast.expr]]:
        """``scaler.scale(loss).backward()`` calls, each with the loss."""
        found = []
        for call in self.calls(".backward"):
            assert isinstance(call.func, ast.Attribute)
            inner = call.func.value
            if isinstance(inner, ast.Call) and inner in self.of_scaler("scale"):
                found.append((call, inner.args[0]))
        return found

    @cached_property
    def loss_ends(self) -> list[tuple[ast.AST, ast.expr]]:
        """Where a loss is handed over, with the loss: ``backwards``, ``accelerator.backward(loss)``
        and the end of a trainer's ``compute_loss`` or ``training_step``."""
        given = [
            (c, c.args[0])
            for c in self.calls(".backward", ".manual_backward")
            if len(c.args) == 1 and isinstance(c.args[0], ast.Name)
        ]
        returned = []
        for node in self.all(ast.Return):
            function = self.function(node)
            if function and function.name in ("compute_loss", "training_step"):
                names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == "loss"]
                returned += [(node, n) for n in names[:1]]
        return [*self.backwards, *given, *returned]

    @cached_property
    def clips(self) -> list[ast.Call]:
        """Calls that clip gradients: with None as their limit they only measure."""
        return [
            call
            for call in self.calls("clip_grad_norm_", "clip_grad_value_")
            if not any(isinstance(a, ast.Constant) and a.value is None for a in call.args[1:2])
        ]

    def steps(self) -> list[ast.Call]:
        """``scaler.step(optimizer)`` calls."""
        return [c for c in self.of_scaler("step") if c.args]

    def steps_in(self, function: ast.FunctionDef | None) -> list[ast.Call]:
        """``scaler.step(optimizer)`` calls of this function."""
        return [c for c in self.of_scaler("step") if c.args and self.function(c) is function]

    def trained(self, optimizer_maker: ast.Call) -> str | None:
        """ "model" of Adam(model.parameters())."""
        if not optimizer_maker.args:
            return None
        first = optimizer_maker.args[0]
        text = dotted(first)
        return text.removesuffix(".parameters()") if text.endswith(".parameters()") else None

    def model_makers(self) -> list[ast.Assign]:
        """Assignments that make a model which an optimizer trains."""
        names = {
            name.split(".")[-1] for call in self.optimizer_makers if (name := self.trained(call))
        }
        return [
            a
            for name in sorted(names)
            for a in self.assigned(name)
            if isinstance(a.value, ast.Call) and self.module_class(a) is None
        ]

    def layers(self, *kinds: str) -> list[tuple[str, str, ast.Assign, list[ast.Call]]]:
        """Layers of modules: class, attribute, where it is made, where it is called."""
        found = []
        for node in self.all(ast.Assign):
            assert isinstance(node, ast.Assign)
            name = dotted(node.targets[0])
            owner = self.module_class(node)
            made = isinstance(node.value, ast.Call) and dotted(node.value.func).split(".")[-1]
            if owner and made in kinds and name.count(".") == 1 and name.startswith("self."):
                uses = [c for c in self.calls(name) if self.module_class(c) == owner]
                if uses:
                    found.append((owner, name[5:], node, uses))
        return found

    def hidden(self) -> list[tuple[str, ast.Assign, str]]:
        """Assignments of a hidden activation in a forward: name, statement, class."""
        found = []
        for node in self.all(ast.Assign):
            assert isinstance(node, ast.Assign)
            function, owner = self.function(node), self.module_class(node)
            if not (owner and function and function.name == "forward"):
                continue
            if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
                continue
            if isinstance(node.value, ast.Call | ast.BinOp) and _is_activation(node.value):
                found.append((node.targets[0].id, node, owner))
        return found

    def losses(self) -> list[tuple[str, ast.Assign]]:
        """The assignment of each loss that is trained on: its name, the last assignment before."""
        found = []
        for end, loss in self.loss_ends:
            if not isinstance(loss, ast.Name):
                continue
            before = [
                a
                for a in self.assigned(loss.id)
                if a.lineno < loss.lineno and self.function(a) is self.function(end)
            ]
            if before:
                found.append((loss.id, before[-1]))
        return found


def _is_activation(value: ast.expr) -> bool:
    """Whether an expression looks like a float tensor of one example a row."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add) and (
            _is_activation(value.left) or _is_activation(value.right)
        )
    if not isinstance(value, ast.Call):
        return False
    name = dotted(value.func)
    last = name.split(".")[-1]
    if last in ("relu", "gelu", "silu", "tanh", "elu", "leaky_relu", "mean", "softplus"):
        return True
    return name.startswith("self.") and name.count(".") == 1 and last not in ("reset", "sample")


roles_of = functools.lru_cache(maxsize=64)(Roles)  # nothing changes one
