"""The page Layers: dtypes, casts and ops of one step, module by module, and the kernels of compiled
code. Names from the run are plain text in the cells of its tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from ampscope.analysis import op_precision
from ampscope.analysis.module_line import module_line
from ampscope.control import COMPILED
from ampscope.observations import Kernel
from ampscope.policy.autocast_lists import CPU_LISTS, LISTED_OP_OF_KERNEL, list_of
from ampscope.policy.op_lists import list_words
from ampscope.records import Frame, Machine, ModuleRecord, OpRecord, Role, RunInfo, StepRecord
from ampscope.story.palette import OTHER_DTYPE, dtype_color
from app import chart, links, permissions, states, store
from app.chart import KeyFigure
from app.figures import modules as flops_figure
from app.runs import diagnoses
from app.runs.module_names import (
    in_tree,
    name_of,
    names_by_index,
    open_module,
    pick_module,
    short_names,
)
from app.text import count, cut, escape, percent, plural, share

TICK_LENGTH = 26  # characters beside the plot, as on Gradients
SHOWN_MODULES = 15  # bars of the FLOP chart
MOST_STEPS = 20_000  # whose op sets are distinguished: 0.1 s of reading
UNFOLDED = 200  # a larger tree starts folded to at most so many rows
ALL_PHASES = "all"
PHASES = (ALL_PHASES, "forward", "backward", "step")
_DTYPE_ROLES = (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
TABLE_PX = 420
NAMED_MODULES = 3  # so many are named in a cell; the CSV has them all
OF_OPS = ("Computed in", "Ops", "Casts", "MFLOP", "In half")  # columns of traced ops
_DTYPE_COLUMNS = {
    "Weights": "weights",
    "Activation": "activations",
    "Output gradient": "grad_outputs",
    "Weight gradient": "weight_grads",
    "Computed in": "computed_in",
}
REASONS = {
    "fp32_list": "autocast's fp32 list: it overflows or loses accuracy in half",
    "promoted": "autocast's promote list: it takes the widest dtype of its inputs",
    "not_cast": "autocast would run it in half, but autocast was off there",
    "follows": "in no list: it follows its inputs, and they were fp32",
}
# The same lists in a run that did not use autocast at all.
REASONS_WITHOUT_AUTOCAST = {
    "fp32_list": "no autocast in this run; with it, the fp32 list keeps this op in fp32",
    "promoted": "no autocast in this run; with it, the promote list decides by its inputs",
    "not_cast": "no autocast in this run; with it, this op runs in half",
    "follows": "in no list: it follows its inputs, and they were fp32",
}
HALF_MODES = ("fp16", "bf16")
WITHOUT_AUTOCAST = ("fp32", "tf32", "pure")  # beginnings of precision modes


def choose_ops(run: RunInfo) -> Layers:
    """The phase and, where steps differ, the set of ops to look at."""
    if run.spec.kind == "watch":  # no op of it is traced, in any phase
        return read(run, None, ALL_PHASES)
    sets = op_sets(store.steps(run, points=MOST_STEPS))
    if not sets and run.spec.parent:  # a control: no op of it is traced either
        return read(run, None, ALL_PHASES)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        phase = links.pick("Phase", "phase", PHASES)
        chosen = next(iter(sets), None)
        if len(sets) > 1:
            by_id = {s.id: s for s in sets}
            id_ = links.select("Ops of", "ops", list(by_id), format_func=lambda i: by_id[i].label)
            chosen = by_id[id_]
    return read(run, chosen, phase)


def op_sets(steps: Sequence[StepRecord]) -> list[OpSet]:
    """Distinct op sets, the one of most steps first; empty when nothing was traced."""
    found: dict[int, list[int]] = {}
    for step in steps:
        if step.op_set is not None:
            found.setdefault(step.op_set, []).append(step.step)
    sets = [OpSet(id_, tuple(numbers)) for id_, numbers in found.items()]
    return sorted(sets, key=lambda s: -len(s.steps))


@dataclass(frozen=True, slots=True)
class OpSet:
    """Steps that ran the same ops, as one choice of the page."""

    id: int
    steps: tuple[int, ...]

    @property
    def label(self) -> str:
        """``steps 0 to 49`` or ``step 4, 9 to 12 and 31 more``: how a person names them."""
        runs = []
        for _, group in groupby(enumerate(self.steps), key=lambda pair: pair[1] - pair[0]):
            first, *rest = (step for _, step in group)
            runs.append(f"{first} to {rest[-1]}" if rest else str(first))
        shown = ", ".join(runs[:3])
        more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        return f"step{'' if len(self.steps) == 1 else 's'} {shown}{more}"


def read(run: RunInfo, chosen: OpSet | None, phase: str) -> Layers:
    """Everything the page shows, from the ops of ``chosen`` and the frames nearest to it."""
    modules = store.modules(run)
    every: list[OpRecord] = []
    with states.contained():
        every = store.ops(run, chosen.id) if chosen else []
    ops = [op for op in every if phase in (ALL_PHASES, op.phase)]
    step, frames = _frames(run, chosen.steps[-1] if chosen else None)
    rows = op_precision.dtypes_by_module(modules, ops, frames)
    return Layers(tuple(modules), tuple(every), tuple(ops), tuple(rows), step)


@dataclass(frozen=True, slots=True)
class Layers:
    """One run's modules and ops in the chosen phases; ``all_ops`` is every phase's."""

    modules: tuple[ModuleRecord, ...]
    all_ops: tuple[OpRecord, ...]
    ops: tuple[OpRecord, ...]
    rows: tuple[op_precision.ModuleDtypes, ...]
    step: int | None  # whose histograms gave the dtypes of values, None when there are none


def _frames(run: RunInfo, step: int | None) -> tuple[int | None, dict[Role, Frame]]:
    """Frames of the roles that carry dtypes, at the last recorded step up to ``step``."""
    used, frames = None, {}
    for role in _DTYPE_ROLES:
        with states.contained():
            recorded = store.frame_steps(run, role)
            if not recorded:
                continue
            at = max((s for s in recorded if step is None or s <= step), default=recorded[0])
            frame = store.frame(run, role, at)
            if frame is not None:
                used, frames[role] = at, frame
    return used, frames


def show_stored_dtypes(run: RunInfo, layers: Layers) -> None:
    """The sentence and the tree of a run whose ops are not traced."""
    leaves = sum(m.is_leaf for m in layers.modules)
    chart.sentence(
        f"{plural(leaves, 'module')} with values of their own; which precision each op computed in "
        "is not known, the dtypes of what went in and out are."
    )
    states.no_ops(run)
    show_tree(layers)


def show_overview(run: RunInfo, layers: Layers) -> None:
    """The sentence and the key figures."""
    flops = op_precision.flop_share(layers.ops)
    kinds = op_precision.modules_by_precision(layers.all_ops)
    casts = sum(site.count for site in op_precision.cast_sites(layers.ops))
    half_run = any(mode in run.spec.precision for mode in HALF_MODES)
    chart.sentence(answer(flops, kinds, casts, half_run))
    parameters = op_precision.parameters_by_dtype(layers.modules)
    total = sum(n for _, n in parameters)
    shown = "none" if flops.half_share is None else percent(flops.half_share)
    chart.key_figures(
        [
            KeyFigure(
                "FLOPs in half", shown, f"{share(flops.half, flops.total)} of counted operations"
            ),
            KeyFigure("Casts per step", count(casts), "Dtype conversions in the chosen phase"),
            KeyFigure(
                "Modules in fp32",
                f"{len(kinds.fp32):,} of {kinds.total:,}",
                "Modules whose own forward ops all computed in fp32, of those that computed",
            ),
            KeyFigure(
                "Parameters",
                _largest(parameters, total),
                "; ".join(f"{dtype}: {share(n, total)}" for dtype, n in parameters),
            ),
        ]
    )


def answer(
    flops: op_precision.FlopShare,
    kinds: op_precision.ModulesByPrecision,
    cast_count: int,
    is_half_run: bool,
) -> str:
    """The page's sentence."""
    if kinds.total == 0 and flops.total == 0:
        return "No op of these phases was traced, so only stored dtypes are known."
    if kinds.half == kinds.both == () and flops.half == 0:
        where = "although half precision was asked for" if is_half_run else "as asked"
        return f"Everything ran in fp32, {where}: {plural(cast_count, 'cast')} per step."
    parts = []
    if flops.half_share is not None:
        halves = "+".join(d for d, _ in flops.by_dtype if op_precision.is_half(d)) or "half"
        parts.append(f"{percent(flops.half_share)} of the FLOPs ran in {halves}")
    if kinds.total:
        modules = plural(kinds.total, "computing module")
        both = f", {len(kinds.both):,} did both" if kinds.both else ""
        parts.append(f"{len(kinds.fp32):,} of {modules} stayed in fp32{both}")
    parts.append(f"{plural(cast_count, 'cast')} per step")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _largest(parameters: list[tuple[str, int]], total: int) -> str:
    if not parameters:
        return "none"
    dtype, n = parameters[0]
    return dtype if n == total else f"{dtype} {percent(n / total)}"


def show_flops(layers: Layers) -> None:
    """The chart: where the FLOPs are, and in which dtype."""
    names = names_by_index(layers.modules)
    shares = [
        (names.get(m, "outside the model"), s) for m, s in op_precision.flops_by_module(layers.ops)
    ]
    chart.see(flops_seen(shares, SHOWN_MODULES))
    if not shares:
        return
    top = shares[:SHOWN_MODULES]
    figure = flops_figure.flops_by_module(
        [s for _, s in top], short_names([n for n, _ in top], TICK_LENGTH), [n for n, _ in top]
    )

    def table() -> pd.DataFrame:
        return pd.DataFrame(
            [(n, d, flops) for n, s in shares for d, flops in s.by_dtype],
            columns=["module", "dtype", "flops"],
        )

    chart.show(figure, "flops", table, key="layers-flops")


def flops_seen(shares: Sequence[tuple[str, op_precision.FlopShare]], shown: int) -> str:
    """Above the chart of FLOPs."""
    total = sum(s.total for _, s in shares)
    if not shares:
        return "No op with a FLOP formula (matmul, convolution, attention) ran."
    name, largest = shares[0]
    wide = [(n, s) for n, s in shares if s.total > s.half]
    most = percent(largest.total / total)
    unit, word = (1e9, "billion") if total >= 1e9 else (1e6, "million")
    text = f"{cut(name)} does most: {most} of {total / unit:,.1f} {word} operations."
    if wide and len(wide) < len(shares):
        slow = sum(s.total - s.half for _, s in wide)
        text += f" Not in half: {percent(slow / total)}, most of it in {cut(wide[0][0])}."
    if len(shares) > shown:
        text += f" The {shown} largest of {len(shares)} modules are shown."
    return text


def show_tree(layers: Layers) -> None:
    """All modules, searched or folded."""
    st.subheader("Modules", anchor=False)
    deepest = max((r.depth for r in layers.rows), default=0)
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        text = links.find("find", "part of a path or a type")
    depths = list(range(1, deepest + 1)) or [0]
    start = depth_for(layers.rows, UNFOLDED)
    depth = links.slide("Unfold to depth", "depth", depths, default=start, place=right)
    rows = matching_modules(layers.rows, text) if text else op_precision.fold(layers.rows, depth)
    opens = bool(layers.all_ops)  # the section below is of its ops
    chart.see(tree_seen(len(rows), len(layers.rows), text, opens=opens))
    left_out = () if opens else OF_OPS  # no op was traced: a zero would say that none ran
    module_table(rows, as_tree=not text, key="layers-modules", left_out=left_out)
    if layers.step is not None:
        st.caption(f"Dtypes of values are those of step {layers.step}.")


def depth_for(rows: Sequence[op_precision.ModuleDtypes], limit: int) -> int:
    """Largest depth that unfolds at most ``limit`` rows, at least 1."""
    depths = sorted(r.depth for r in rows)
    deepest = depths[-1] if depths else 0
    return deepest if len(depths) <= limit else max(1, depths[limit] - 1)


def matching_modules(
    rows: Sequence[op_precision.ModuleDtypes], text: str
) -> list[op_precision.ModuleDtypes]:
    """Rows whose path or type holds ``text``, whatever the case."""
    wanted = text.strip().lower()
    return [r for r in rows if wanted in name_of(r.path).lower() or wanted in r.type.lower()]


def tree_seen(shown: int, whole: int, text: str, *, opens: bool) -> str:
    """Above the table of modules; ``opens``: the section below it shows the chosen one."""
    click = " Click a row to open it below." if opens else ""
    if text:
        return f"{shown:,} of {plural(whole, 'module')} hold “{text}” in their path or type."
    if shown == whole:
        return f"All {plural(whole, 'module')}.{click}"
    return (
        f"{shown:,} of {plural(whole, 'module')} are unfolded; what lies deeper is added up in the "
        f"last row above it.{click}"
    )


def module_table(
    rows: Sequence[op_precision.ModuleDtypes],
    *,
    as_tree: bool,
    key: str,
    left_out: Sequence[str] = (),
) -> None:
    """The tree; a click on a row opens that module below. ``left_out``: columns."""
    table = module_frame(rows, as_tree=as_tree).drop(columns=list(left_out))

    def open_clicked() -> None:
        clicked = st.session_state[key].selection.rows
        if clicked:
            open_module(rows[clicked[0]].path)

    st.dataframe(
        table,
        key=key,
        hide_index=True,
        height=min(TABLE_PX, 38 + 35 * max(1, len(rows))),
        on_select=open_clicked,
        selection_mode="single-row",
        column_config={
            "Module": st.column_config.TextColumn(pinned=True, width=230),
            **{
                title: _chip_column(title, sorted({d for r in rows for d in getattr(r, field)}))
                for title, field in _DTYPE_COLUMNS.items()
            },
            "MFLOP": st.column_config.NumberColumn(
                format="%.3f", help="Million operations per step"
            ),
            "In half": st.column_config.NumberColumn(
                format="%.1f %%", help="Share of this module's FLOPs; empty where it has none"
            ),
            "Path": st.column_config.TextColumn(width=300),
        },
    )
    chart.download(lambda: module_frame(rows, as_tree=False), "modules", key=key)


def module_frame(rows: Sequence[op_precision.ModuleDtypes], *, as_tree: bool) -> pd.DataFrame:
    """One line per module; a tree shows last parts indented, a search result whole paths."""
    return pd.DataFrame(
        {
            "Module": [in_tree(r.path, r.depth) if as_tree else name_of(r.path) for r in rows],
            "Type": [r.type + (f" (+{r.folded:,} below)" if r.folded else "") for r in rows],
            **{
                title: [list(getattr(r, field)) for r in rows]
                for title, field in _DTYPE_COLUMNS.items()
            },
            "Ops": [r.op_count for r in rows],
            "Casts": [r.cast_count for r in rows],
            "MFLOP": [r.flops / 1e6 for r in rows],
            "In half": [100 * r.half_flops / r.flops if r.flops else None for r in rows],
            "Parameters": [r.parameter_count for r in rows],
            "Path": [name_of(r.path) for r in rows],
        }
    )


def show_module(run: RunInfo, layers: Layers) -> None:
    """Ops of the chosen module."""
    st.subheader("One module", anchor=False)
    names = names_by_index(layers.modules)
    busiest = Counter(op.module for op in layers.ops if not op.is_cast).most_common(1)
    heaviest = [module for module, _ in op_precision.flops_by_module(layers.ops)] or [
        m for m, _ in busiest
    ]
    default = heaviest[0] if heaviest else None
    index = pick_module("Module", names, list(names), default)
    _link_to_source(run, layers.modules, index)
    ops = [op for op in layers.ops if op.module == index]
    if not ops:
        states.nothing_recorded(
            "This module ran no op of its own in the chosen phase.", "Its children may have."
        )
        return
    chart.see(f"{count(sum(o.count for o in ops))} calls per step of this module's own ops.")
    ops_table(ops, list_lookup(run.machine), key="layers-ops")


def _link_to_source(run: RunInfo, modules: Sequence[ModuleRecord], index: int) -> None:
    """To the lines of the module, where the run itself recorded them."""
    if run.spec.kind != "script" or not permissions.may_see_source(run):
        return
    case = diagnoses.case_of(run)
    if case is None:
        return
    types = {module.path: module.type for module in modules}
    path = next(module.path for module in modules if module.index == index)
    found = module_line(diagnoses.observed(case.head).sources, types, path)
    if found is not None:
        where = f"in the forward of {found.of}" if found.is_called else f"forward of {found.of}"
        label = escape(f"Source: {cut(found.line)}, {cut(where)}")
        links.link(links.SOURCE, label, run=run.id, line=found.line)


def ops_table(ops: Sequence[OpRecord], list_of: Callable[[str], str | None], *, key: str) -> None:
    """Ops of one module."""
    ordered = sorted(ops, key=lambda o: (o.phase != "forward", o.phase, -o.flops, -o.count))
    table = pd.DataFrame(
        {
            "Phase": [o.phase for o in ordered],
            "Op": [o.op for o in ordered],
            "Computed in": [[op_precision.compute_dtype(o.inputs) or "none"] for o in ordered],
            "Inputs": [o.inputs or "none" for o in ordered],
            "Outputs": [o.outputs or "none" for o in ordered],
            "Calls": [o.count for o in ordered],
            "MFLOP": [o.flops / 1e6 for o in ordered],
            "Cast": [o.is_cast for o in ordered],
            "Autocast list": [list_words(list_of(o.op)) for o in ordered],
        }
    )
    dtypes = sorted({d for cell in table["Computed in"] for d in cell})
    columns = {"Computed in": _chip_column("Computed in", dtypes)}
    chart.table(table, "ops", key=key, most_px=TABLE_PX, columns=columns)


def list_lookup(machine: Machine | None) -> Callable[[str], str | None]:
    """Which autocast list an op is in, under the rules that the run followed."""
    return _cpu_list_of if machine is not None and machine.policy == "native" else list_of


def _cpu_list_of(op: str) -> str | None:
    name = op.removeprefix("aten.")
    listed = LISTED_OP_OF_KERNEL.get(name, name).partition(".")[0]
    return next(
        (key for key, ops in CPU_LISTS.items() if any(o.partition(".")[0] == listed for o in ops)),
        None,
    )


def show_fp32(run: RunInfo, layers: Layers) -> None:
    """What stayed in fp32 in the forward pass, and why."""
    found = op_precision.fp32_ops(layers.all_ops, list_lookup(run.machine))
    precision = run.spec.precision
    with chart.details("What stayed in fp32, and why"):
        chart.see(fp32_seen(found, precision))
        if found:
            without = precision.startswith(WITHOUT_AUTOCAST)
            reasons = REASONS_WITHOUT_AUTOCAST if without else REASONS
            names = names_by_index(layers.modules)
            fp32_table(found, names, reasons, key="layers-fp32")


def fp32_seen(found: Sequence[op_precision.Fp32Op], precision: str) -> str:
    """Above the table of ops that computed in fp32."""
    if not found:
        return "No forward op computed in fp32."
    calls = sum(f.count for f in found)
    listed = sum(f.count for f in found if f.reason == "fp32_list")
    skipped = sum(f.count for f in found if f.reason == "not_cast")
    if precision.startswith(WITHOUT_AUTOCAST):
        return (
            f"{plural(calls, 'forward call')} in fp32, in a run without autocast; with it "
            f"{share(skipped, calls)} of them would run in half."
        )
    text = (
        f"{plural(calls, 'forward call')} in fp32: {share(listed, calls)}, because an autocast "
        "list asks for it."
    )
    if skipped:
        text += f" {plural(skipped, 'call')} would have run in half had autocast been on there."
    return text


def fp32_table(
    ops: Sequence[op_precision.Fp32Op], names: dict[int, str], reasons: dict[str, str], *, key: str
) -> None:
    """Ops that computed in fp32, and why."""

    def table(limit: int | None) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "Op": [o.op for o in ops],
                "Why": [reasons[o.reason] for o in ops],
                "Autocast list": [list_words(o.autocast_list) for o in ops],
                "Calls per step": [o.count for o in ops],
                "Modules": [len(o.modules) for o in ops],
                "Which": [_named([names.get(m, "?") for m in o.modules], limit) for o in ops],
            }
        )

    chart.table(table(NAMED_MODULES), "fp32-ops", key=key, whole=lambda: table(None))


def show_casts(layers: Layers) -> None:
    """Where dtypes change."""
    sites, names = op_precision.cast_sites(layers.ops), names_by_index(layers.modules)
    with chart.details("Casts: where, from what to what"):
        chart.see(casts_seen(sites, names))
        if sites:
            cast_table(sites, names, key="layers-casts")


def casts_seen(sites: Sequence[op_precision.CastSite], names: dict[int, str]) -> str:
    """Above the table of casts."""
    if not sites:
        return "No cast: every op got its inputs in the dtype that it ran in."
    kinds = op_precision.cast_kinds(sites)
    total = sum(s.count for s in sites)
    listed = ", ".join(f"{n:,} from {a} to {b}" for a, b, n in kinds[:3])
    where = cut(names.get(sites[0].module, "outside the model"))
    return (
        f"{plural(total, 'cast')} per step: {listed}. Most in one place: {count(sites[0].count)} "
        "in "
        f"{where} ({sites[0].phase})."
    )


def cast_table(sites: Sequence[op_precision.CastSite], names: dict[int, str], *, key: str) -> None:
    """Where casts happen."""
    table = pd.DataFrame(
        {
            "Module": [names.get(s.module, "outside the model") for s in sites],
            "Phase": [s.phase for s in sites],
            "From": [[s.source] for s in sites],
            "To": [[s.target] for s in sites],
            "Casts per step": [s.count for s in sites],
        }
    )
    dtypes = sorted({d for s in sites for d in (s.source, s.target)})
    columns = {title: _chip_column(title, dtypes) for title in ("From", "To")}
    chart.table(table, "casts", key=key, most_px=TABLE_PX, columns=columns)


def kernels_of(run: RunInfo) -> list[Kernel]:
    """Kernels of compiled code: of a script's compiled run its own, of its other runs those of the
    run with torch.compile on; none where none were recorded."""
    if run.spec.kind != "script":
        return []
    if own := diagnoses.observed(run).kernels:
        return own
    case = diagnoses.case_of(run)
    compiled = None if case is None else case.run_of(COMPILED)
    return [] if compiled is None else diagnoses.observed(compiled).kernels


def show_kernels(kernels: Sequence[Kernel]) -> None:
    """Which ops went into which kernel, in which dtype it computed, what it did not round."""
    st.subheader("Kernels of compiled code", anchor=False)
    chart.see(kernels_seen(kernels))
    fused = st.toggle("Only kernels of several ops", value=True, key="layers-fused")
    kernel_table([k for k in kernels if len(k.ops) > 1 or not fused], key="layers-kernels")


def kernels_seen(kernels: Sequence[Kernel]) -> str:
    """Above the table of kernels."""
    fused = [k for k in kernels if len(k.ops) > 1]
    free = [k for k in fused if k.unrounded]
    results = sum(len(k.unrounded) for k in kernels)
    text = f"{plural(len(kernels), 'kernel')}, {len(fused):,} of several ops."
    if not free:
        return f"{text} None hands a result in half on without rounding it."
    return (
        f"{text} Results that eager code rounds to half and these kernels hand on in "
        f"{'+'.join(sorted({k.computed for k in free}))}: {results:,}, in "
        f"{plural(len(free), 'kernel')}. That is more exact, and not what eager code computes."
    )


def kernel_table(kernels: Sequence[Kernel], *, key: str) -> None:
    """A row for each kernel."""

    def table(limit: int | None) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "Kernel": [k.number for k in kernels],
                "Phase": [k.phase for k in kernels],
                "Ops": [_repeated(k.ops) for k in kernels],
                "Computed in": [[k.computed] for k in kernels],
                "Writes": [list(k.writes) for k in kernels],
                "Not rounded": [_named(k.unrounded, limit) or "nothing" for k in kernels],
                "Modules": [_named(k.modules, limit) for k in kernels],
                "Lines": [_named(k.lines, limit) for k in kernels],
            }
        )

    dtypes = sorted({d for k in kernels for d in (k.computed, *k.writes)})
    columns = {title: _chip_column(title, dtypes) for title in ("Computed in", "Writes")}
    shown, whole = table(NAMED_MODULES), lambda: table(None)
    chart.table(shown, "kernels", key=key, most_px=TABLE_PX, columns=columns, whole=whole)


def _repeated(ops: Sequence[str]) -> str:
    """``aten.mul × 3, aten.add``, in the order of first use."""
    counted = Counter(ops)
    return ", ".join(f"{op} × {n:,}" if n > 1 else op for op, n in counted.items())


def _chip_column(title: str, dtypes: Sequence[str]) -> ColumnConfig:
    """Dtypes as labels in the dtypes' own colours."""
    colors = [dtype_color(d) if d else OTHER_DTYPE for d in dtypes]
    return st.column_config.MultiselectColumn(title, options=list(dtypes), color=colors)


def _named(names: Sequence[str], limit: int | None) -> str:
    shown = names[:limit]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {plural(more, 'other')}" if more else "")
