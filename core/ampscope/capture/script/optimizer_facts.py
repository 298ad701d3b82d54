"""What an optimizer holds: options such as the learning rate, state, dtypes, non-finite entries."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.tensors import (
    HALF,
    are_finite,
    fetch,
    holds_numbers,
    plain,
    readable,
    version,
)
from ampscope.capture.user_objects import groups_of, state_of
from ampscope.numerics.formats import FORMATS, dtype_name

MOMENTS = 64  # of a parameter's second moments, sampled
SECOND = ("exp_avg_sq", "square_avg", "sum")  # Adam's, RMSprop's and Adadelta's, Adagrad's
MIN_HELD = 16  # sampled numbers; by chance one of fp32 lies on the grid of fp16 in 1 of 8,192
MOST_LOOKS = 64  # at one optimizer's written state: some code writes it at every step


def lr_of(optimizer: Optimizer) -> float:
    """Learning rate of its first group; NaN when it has none (None in Transformers' Adafactor)."""
    rate = option_of(optimizer, "lr")
    return math.nan if rate is None else rate


def option_of(optimizer: Optimizer, name: str) -> float | None:
    """An option of its first group as a number; None where it has none, or several (the two
    ``eps`` of Adafactor)."""
    groups = groups_of(optimizer)
    value = groups[0].get(name) if groups else None
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None


def state_facts(optimizer: Optimizer, last: dict[int, Tensor]) -> dict[str, Any]:
    """Dtypes, non-finite entries, and vanished second moments of the optimizer's state, as fields
    of ``OptimizerStep``. ``last`` keeps samples of second moments by id of the parameter, from one
    step to the next."""
    tensors: list[Tensor] = []
    alive: list[Tensor] = []  # numbers of elements, where the state is
    dead: list[Tensor] = []
    samples: list[tuple[Tensor, dict[str, Any], Tensor, Tensor | None]] = []
    held = state_of(optimizer)
    for parameter, state in held:
        tensors += [v for v in state.values() if isinstance(v, Tensor) and _is_of_interest(v)]
        first, second = state.get("exp_avg"), state.get("exp_avg_sq", state.get("square_avg"))
        pair = [m for m in (first, second) if isinstance(m, Tensor) and _is_of_interest(m)]
        if len(pair) == 2:
            moving = plain(pair[0]) != 0
            alive.append(moving.sum())
            dead.append((moving & (plain(pair[1]) == 0)).sum())
        if isinstance(second, Tensor) and second.dtype in HALF and _is_of_interest(second):
            gradient = _gradient_like(parameter, second)
            fed = None if gradient is None else evenly(gradient, MOMENTS)
            samples.append((parameter, state, evenly(plain(second), MOMENTS), fed))
    fell, compared, due, done = _fallen(optimizer, samples, last)
    counted = [int(number) for number in fetch([*alive, *dead])]
    alive_count, dead_count = sum(counted[: len(alive)]), sum(counted[len(alive) :])
    return {
        "state_dtypes": dtypes(tensors),
        "state_nonfinite": nonfinite_count(tensors),
        "state_zero_share": dead_count / alive_count if alive_count else None,
        "state_fell_share": fell / compared if compared else None,
        "state_fall_due": due if compared else None,
        "state_fall_done": done if compared else None,
        "state_decay": next((_decay(optimizer, s) for _, s in held), None),
    }


class WrittenState:
    """What an optimizer's state holds at a step before which something else has written it: a
    checkpoint that was loaded, a copy that came back. Known by the addresses and version counters
    that the optimizer's last step left, so a step before which nothing happened reads no number."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[tuple[int, int, int], ...]] = {}  # by optimizer
        self._looks: Counter[str] = Counter()

    def before_step(self, optimizer: Optimizer, name: str) -> dict[str, Any]:
        """Fields of ``OptimizerStep``; empty where the state is as the last step left it, and
        where there is none yet."""
        held = state_of(optimizer)
        marks = _marks(held)
        if not marks or marks == self._left.get(name) or self._looks[name] >= MOST_LOOKS:
            return {}
        self._looks[name] += 1
        return _written(held)

    def after_step(self, optimizer: Optimizer, name: str) -> None:
        """The state that the step leaves is the optimizer's own."""
        self._left[name] = _marks(state_of(optimizer))


def _marks(held: list[tuple[Tensor, dict[str, Any]]]) -> tuple[tuple[int, int, int], ...]:
    tensors = (v for _, state in held for v in state.values() if isinstance(v, Tensor))
    return tuple((id(v), version(v), v.data_ptr()) for v in tensors if _is_of_interest(v))


def _written(held: list[tuple[Tensor, dict[str, Any]]]) -> dict[str, Any]:
    """Second moments that are zero although they cannot be: their first moment is not or, without
    one, the gradient. And the half format that holds all sampled numbers of a kind of state."""
    alive: list[Tensor] = []
    dead: list[Tensor] = []
    kinds: dict[str, list[Tensor]] = {}
    for parameter, state in held:
        wide = {
            key: plain(v)
            for key, v in state.items()
            if isinstance(v, Tensor) and v.dtype is torch.float32 and _is_of_interest(v)
        }
        for key, values in wide.items():
            kinds.setdefault(key, []).append(evenly(values, MOMENTS))
        second = next((wide[key] for key in SECOND if key in wide), None)
        if second is not None:
            beside = wide.get("exp_avg", _gradient_like(parameter, second))
            if beside is not None and beside.shape == second.shape:
                moving = beside != 0
                alive.append(moving.sum())
                dead.append((moving & (second == 0)).sum())
    counted = [int(number) for number in fetch([*alive, *dead])]
    alive_count, dead_count = sum(counted[: len(alive)]), sum(counted[len(alive) :])
    sampled = (torch.cat(on_host(parts)).float() for parts in kinds.values())
    finite = (values[torch.isfinite(values) & (values != 0)] for values in sampled)
    formats = {half_format_of(n) for n in finite if torch.unique(n).numel() >= MIN_HELD}
    return {
        "written_in": "+".join(sorted(formats - {""})),
        "written_zero_share": dead_count / alive_count if alive_count else None,
    }


def half_format_of(numbers: Tensor) -> str:
    """The half format that holds all of these fp32 numbers exactly, the coarser one first; "" where
    none does."""
    coarsest = (torch.bfloat16, torch.float16)  # fp16 holds nearly all that bf16 does
    fits = (d for d in coarsest if torch.equal(numbers.to(d).float(), numbers))
    return dtype_name(found) if (found := next(fits, None)) else ""


def _is_of_interest(state: Tensor) -> bool:
    """Not a step counter, nor a packed state in a subclass of its own."""
    return state.dim() > 0 and state.is_floating_point() and holds_numbers(state)


def _gradient_like(parameter: Tensor, moment: Tensor) -> Tensor | None:
    """The gradient that fed the moment at this step; None where it cannot be read any more."""
    values = None if parameter.grad is None else readable(parameter.grad)
    return values if values is not None and values.shape == moment.shape else None


def _fallen(
    optimizer: Optimizer,
    samples: list[tuple[Tensor, dict[str, Any], Tensor, Tensor | None]],
    last: dict[int, Tensor],
) -> tuple[int, int, float, float]:
    """How many sampled second moments fell since the step before, of how many; and the spacings of
    :func:`_falls`. ``samples`` are (parameter, its state, moments, gradients that fed them)."""
    fell = compared = 0
    due = done = 0.0
    moments = on_host([moment for _, _, moment, _ in samples])
    gradients = iter(on_host([fed for *_, fed in samples if fed is not None]))
    for (parameter, state, moment, fed), wide in zip(samples, moments, strict=True):
        now = wide.to(moment.dtype)
        gradient = None if fed is None else next(gradients)
        before = last.get(id(parameter))
        if before is not None and before.shape == now.shape:
            fell += int((now < before).sum())
            compared += int((before > 0).sum())
            if gradient is not None:
                falls = _falls(before, now, gradient, _decay(optimizer, state))
                due, done = due + falls[0], done + falls[1]
        last[id(parameter)] = now
    return fell, compared, due, done


def _falls(
    before: Tensor, now: Tensor, gradient: Tensor, decay: float | None
) -> tuple[float, float]:
    """By how many spacings of their format the moments that v * decay + (1 - decay) * g^2 makes
    smaller should have fallen, and by how many they fell.

    Rounding to nearest makes nothing of a fall below half a spacing, at every step again.
    Stochastic rounding gives the same sum in the mean.
    """
    if decay is None:
        return 0.0, 0.0
    number_format = FORMATS[dtype_name(before.dtype)]
    old, new, fed = before.double(), now.double(), gradient.double() ** 2
    lost = (1 - decay) * (old - fed)
    is_due = (old > 0) & (lost > 0) & torch.isfinite(fed)
    exponent = (torch.frexp(old).exponent - 1).clamp(min=number_format.min_normal_exponent)
    spacing = torch.ldexp(torch.ones_like(old), exponent - number_format.mantissa_bits)
    due, done = lost / spacing, (old - new) / spacing
    return float(due[is_due].sum()), float(done[is_due].sum())


def _decay(optimizer: Optimizer, state: dict[str, Any]) -> float | None:
    """What the second moment keeps of itself at a step: Adam's beta2, RMSprop's alpha, Adadelta's
    rho. None where the optimizer's options do not say."""
    group = next(iter(groups_of(optimizer)), {})
    betas = group.get("betas")
    if "square_avg" in state:
        found = group.get("alpha", group.get("rho"))
    else:
        found = betas[1] if isinstance(betas, tuple | list) and len(betas) > 1 else None
    is_share = isinstance(found, float) and 0 < found < 1
    return found if is_share else None


def dtypes(tensors: list[Tensor]) -> str:
    """Names of the dtypes in use, "fp16+fp32"."""
    return "+".join(sorted({dtype_name(t.dtype) for t in tensors}))


def nonfinite_count(tensors: list[Tensor]) -> int:
    """NaN and infinite entries of all tensors."""
    bad = (t for t, finite in zip(tensors, are_finite(tensors), strict=True) if not finite)
    return int(sum(fetch([(~torch.isfinite(plain(t))).sum() for t in bad])))


def on_host(parts: list[Tensor]) -> list[Tensor]:
    """Copies in fp64 of one-dimensional tensors, in the memory of the CPU; one wait for each device
    that they are on."""
    found = list(parts)
    for device in {part.device for part in parts}:
        places = [place for place, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[place].double() for place in places]).cpu()
        sizes = [parts[place].numel() for place in places]
        for place, copy in zip(places, torch.split(joined, sizes), strict=True):
            found[place] = copy
    return found


def evenly(values: Tensor, count: int) -> Tensor:
    """Up to ``count`` of the values, evenly spaced in memory order."""
    return values.flatten()[:: max(1, values.numel() // count)][:count]
