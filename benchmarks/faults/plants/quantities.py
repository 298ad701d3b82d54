"""Quantities that become half: which numbers, at which place of a program, in which way.

Each pair of a quantity and a way is a mechanism. A quantity says where its numbers lie and where the
same rounding is harmless: ids of shelves beside ids of articles, coordinates around their centre
beside those of the national grid, a format that has the range beside one that has not. A way
says how they become half: a cast, a constructor, an array, a file, a table, a module.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.planting import Draft, Mechanism, Roles, mechanism
from benchmarks.faults.plants.everywhere import _data_lines, _inputs
from benchmarks.faults.source import Edit

FP16, BF16 = "torch.float16", "torch.bfloat16"
BOTH = (FP16, BF16)


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers in a variable: its name, how to write lines behind it, and what stands around."""

    name: str
    write: Callable[[str, bool], Edit]  # lines, blamed
    dtypes: tuple[str, ...]
    whole: bool = False  # whole numbers that index or are counted
    before: str = ""
    after: str = ""


# harmful or harmless, and the formats that a way to become half has
Find = Callable[[Roles, random.Random, bool, tuple[str, ...]], Place | None]


# ---- ways to become half ---------------------------------------------------------------------------
# Lines with (text, blamed): § the variable, T the dtype, N the one of NumPy, B what it becomes again.


def _as_cast(rng: random.Random) -> list[tuple[str, bool]]:
    return [(rng.choice(["§ = §.to(T).B()", "§ = §.type(T).B()", "§ = §.to(dtype=T).B()"]), True)]


def _as_constructor(rng: random.Random) -> list[tuple[str, bool]]:
    made = ["§ = torch.tensor(§.tolist(), dtype=T).B()", "§ = torch.as_tensor(§, dtype=T).B()"]
    return [(rng.choice(made), True)]


def _as_array(rng: random.Random) -> list[tuple[str, bool]]:
    return [
        (rng.choice(["§_np = §.numpy().astype(np.float16)", "§_np = np.asarray(§, dtype=np.float16)"]), True),
        ("§ = torch.from_numpy(§_np).B()", True),
    ]  # fmt: skip


def _as_file(rng: random.Random) -> list[tuple[str, bool]]:
    if rng.random() < 0.5:
        return [
            ('torch.save({"§": §.to(T)}, "§.pt")', True),
            ('§ = torch.load("§.pt")["§"].B()', True),
        ]
    return [('torch.save(§.to(T), "§.pt")', True), ('§ = torch.load("§.pt").B()', True)]


def _as_table(rng: random.Random) -> list[tuple[str, bool]]:
    fill = rng.choice(["§_table.copy_(§)", "§_table[:] = §"])
    return [
        ("§_table = torch.empty(§.shape, dtype=T)", True),
        (fill, True),
        ("§ = §_table.B()", False),
    ]


def _as_module(rng: random.Random) -> list[tuple[str, bool]]:
    return [
        ("§_store = torch.nn.Module()", False),
        ('§_store.register_buffer("rows", §.float())', False),
        ("§_store.to(T)", True),
        ("§ = §_store.rows.B()", False),
    ]


WAYS: dict[str, Callable[[random.Random], list[tuple[str, bool]]]] = {
    "cast": _as_cast,
    "constructor": _as_constructor,
    "array": _as_array,
    "file": _as_file,
    "table": _as_table,
    "module": _as_module,
}


# ---- quantities ------------------------------------------------------------------------------------


def _named(
    harmful: dict[str, tuple[str, ...]],
    harmless: dict[str, tuple[str, ...]],
    *,
    whole: bool = False,
    looped: bool = False,
) -> Find:
    """Variables of these names, each with the formats in which rounding harms, or does not.
    ``looped``: where they are assigned within a loop over batches."""

    def find(s: Roles, rng: random.Random, harm: bool, formats: tuple[str, ...]) -> Place | None:
        wanted = harmful if harm else harmless
        found = []
        for name, all_dtypes in wanted.items():
            dtypes = tuple(d for d in all_dtypes if d in formats)
            at = [
                a
                for a in s.all(ast.Assign)
                if any(_is(name, t) for t in a.targets)  # type: ignore[attr-defined]
                and (not looped or s.loops(a) or s.class_of(a))
            ]
            if at and dtypes:
                found.append((name, at[-1], dtypes))
        if not found:
            return None
        name, assign, dtypes = rng.choice(found)
        assert isinstance(assign, ast.Assign)
        return Place(
            name, lambda lines, blamed: s.after(assign, lines, blamed=blamed), dtypes, whole
        )

    return find


def _is(name: str, target: ast.expr) -> bool:
    """Whether a variable is assigned, alone or as one of several."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return any(isinstance(p, ast.Name) and p.id == name for p in parts)


def _offset_readings(
    s: Roles, rng: random.Random, harm: bool, formats: tuple[str, ...]
) -> Place | None:
    """Inputs of any model, as raw readings around an offset that is taken away afterwards."""
    places = _inputs(s)
    if not places:
        return None
    name, statement, _ = rng.choice(places)
    at = _data_lines(s, statement)
    offset = rng.choice([3000.0, 9000.0] if harm else [0.25, 0.5])
    return Place(
        f"{name}_raw",
        lambda lines, blamed: s.before(at, lines, blamed=blamed),
        formats if harm else (FP16,),
        before=f"{name}_raw = {name} + {offset}  # as the sensor counts",
        after=f"{name} = {name}_raw - {offset}",
    )


def _offset_labels(
    s: Roles, rng: random.Random, harm: bool, formats: tuple[str, ...]
) -> Place | None:
    """Labels of any classifier, numbered among those of a larger collection."""
    found = []
    for _, assign in s.losses():
        for call in s.calls("cross_entropy"):
            label = call.args[1] if len(call.args) > 1 else None
            if assign in s.above(call) and isinstance(label, ast.Name) and s.loops(assign):
                found.append((label.id, _data_lines(s, assign)))
    if not found:
        return None
    name, at = rng.choice(found)
    offset = rng.choice([4096, 6144] if harm else [32, 64])
    return Place(
        f"{name}_global",
        lambda lines, blamed: s.before(at, lines, blamed=blamed),
        (BF16,) if harm else formats,  # fp16 would name classes that are not there
        whole=True,
        before=f"{name}_global = {name} + {offset}  # the first {offset} are other collections'",
        after=f"{name} = {name}_global - {offset}",
    )


QUANTITIES: dict[str, tuple[str, str, Find, tuple[str, ...]]] = {  # role, place, where, causes
    "row_ids": ("ids", "preparation", _named(
        {"article_ids": BOTH, "user_ids": BOTH}, {"shelf_ids": BOTH, "post_ids": BOTH}, whole=True
    ), ()),
    "batch_ids": ("ids", "loader", _named(
        {"raw": BOTH}, {"seen": BOTH, "shelves": BOTH}, whole=True, looped=True
    ), ()),
    "batch_labels": ("labels", "loader", _named(
        {"labels": BOTH}, {"kind": BOTH}, whole=True, looped=True
    ), ()),
    "class_labels": ("labels", "loader", _offset_labels, ()),
    "stamps": ("timestamps", "preparation", _named(
        {"timestamps": BOTH}, {"weekday": BOTH}
    ), ()),
    "test_stamps": ("timestamps", "evaluation", _named(
        {"test_stamps": BOTH}, {"test_weekday": BOTH}
    ), ()),
    "raw_targets": ("targets", "preparation", _named(
        {"pressure": (BF16,)}, {"anomaly": (FP16,), "liked": BOTH}
    ), ()),
    "map_coordinates": ("coordinates", "preparation", _named(
        {"scan_xyz": BOTH}, {"cloud": BOTH}
    ), ()),
    "sample_coordinates": ("coordinates", "loader", _named(
        {"points": BOTH}, {"local": BOTH}, looped=True
    ), ()),
    "small_units": ("inputs", "preparation", _named(
        {"concentration": (FP16,)}, {"concentration": (BF16,), "age": BOTH}
    ), ()),
    "small_units_of_a_batch": ("inputs", "loader", _named(
        {"sample": (FP16,)}, {"sample": (BF16,)}, looped=True
    ), ()),
    "small_units_of_a_test": ("inputs", "evaluation", _named(
        {"test": (FP16,)}, {"test": (BF16,)}
    ), ()),
    "readings": ("inputs", "loader", _offset_readings, ()),
    "spreads": ("normalisation statistics", "preparation", _named(
        {"spread": (FP16,)}, {"spread": (BF16,), "frequency": BOTH}
    ), ()),
    "draw_weights": ("sampling weights", "preparation", _named(
        {"sample_weights": (FP16,)}, {"sample_weights": (BF16,), "share": BOTH}
    ), ()),
    "window_starts": ("positions", "loader", _named(
        {"start_sites": BOTH}, {"strand": BOTH}, whole=True, looped=True
    ), ()),
    "table_positions": ("positions", "forward", _named(
        {"positions": BOTH}, {"offsets": BOTH}, whole=True
    ), ("low_precision_constants",)),
}  # fmt: skip


COUNTED = ("ids", "labels", "positions", "timestamps", "counts")  # whole numbers have a rule
OF_NUMBERS = ("low_precision_constants", "rounded_whole_numbers")  # right at the line
# NumPy has no bf16, and no program writes a file for each sample.
LEFT_OUT = {
    ("class_labels", "array"),
    ("raw_targets", "array"),
    ("small_units_of_a_batch", "array"),
    ("small_units_of_a_test", "array"),
    ("sample_coordinates", "file"),
}


def _draft(s: Roles, rng: random.Random, harm: bool, find: Find, way: str) -> Draft | None:
    place = find(s, rng, harm, (FP16,) if way == "array" else BOTH)
    if place is None:
        return None
    dtype = rng.choice(place.dtypes)
    back = "long" if place.whole else "float"

    def written(line: str, blamed: bool) -> Edit:
        line = line.replace("§", place.name).replace("(T)", f"({dtype})")
        return place.write(line.replace("=T", f"={dtype}").replace(".B()", f".{back}()"), blamed)

    around = [[place.write(text, False)] if text else [] for text in (place.before, place.after)]
    top = [s.top("import numpy as np")] if way == "array" and "import numpy" not in s.text else []
    site = [written(line, blamed) for line, blamed in WAYS[way](rng)]
    first, last = around
    return Draft(
        [*top, *first, *site, *last],
        [*first, *last],
        params={"of": place.name, "dtype": dtype},
    )


def _register() -> None:
    for quantity, (role, at, find, causes) in QUANTITIES.items():
        for way in WAYS:
            if (quantity, way) in LEFT_OUT:
                continue
            mechanism(
                f"{quantity}_{way}",
                Mechanism(way, role, at, role in COUNTED, at_line=OF_NUMBERS),
                lambda s, rng, harm, find=find, way=way: _draft(s, rng, harm, find, way),
                causes,
            )


_register()
