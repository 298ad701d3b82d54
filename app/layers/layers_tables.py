"""Tables of the Layers page. Names from the run are plain text in their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from ampscope.analysis.casts import CastSite
from ampscope.analysis.dtypes import ModuleDtypes, compute_dtype, depth_of
from ampscope.analysis.fp32_ops import Fp32Op
from ampscope.records import OpRecord
from app import chart
from app.palette import OTHER_DTYPE, dtype_color
from app.runs.module_names import in_tree, name_of, open_module
from app.text import plural

TABLE_PX = 420
NAMED_MODULES = 3  # so many are named in a cell; the CSV has them all
_DTYPE_COLUMNS = {
    "Weights": "weights",
    "Activation": "activations",
    "Output gradient": "grad_outputs",
    "Weight gradient": "weight_grads",
    "Computed in": "computed_in",
}


def found(rows: Sequence[ModuleDtypes], text: str) -> list[ModuleDtypes]:
    """Rows whose path or type holds ``text``, whatever the case."""
    wanted = text.strip().lower()
    return [r for r in rows if wanted in name_of(r.path).lower() or wanted in r.type.lower()]


def module_frame(rows: Sequence[ModuleDtypes], *, as_tree: bool) -> pd.DataFrame:
    """One line a module; a tree shows last parts indented, a search result whole paths."""
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


def module_table(rows: Sequence[ModuleDtypes], *, as_tree: bool, key: str) -> None:
    """The tree; a click on a row opens that module below."""
    table = module_frame(rows, as_tree=as_tree)

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
            **{title: _chips(title, rows, field) for title, field in _DTYPE_COLUMNS.items()},
            "MFLOP": st.column_config.NumberColumn(format="%.3f", help="Million operations a step"),
            "In half": st.column_config.NumberColumn(
                format="%.1f %%", help="Share of this module's FLOPs; empty where it has none"
            ),
            "Path": st.column_config.TextColumn(width=300),
        },
    )
    chart.download(lambda: module_frame(rows, as_tree=False), "modules", key=key)


def ops_table(ops: Sequence[OpRecord], list_of: Callable[[str], str | None], *, key: str) -> None:
    """Ops of one module."""
    ordered = sorted(ops, key=lambda o: (o.phase != "forward", o.phase, -o.flops, -o.count))
    table = pd.DataFrame(
        {
            "Phase": [o.phase for o in ordered],
            "Op": [o.op for o in ordered],
            "Computed in": [[compute_dtype(o.inputs) or "none"] for o in ordered],
            "Inputs": [o.inputs or "none" for o in ordered],
            "Outputs": [o.outputs or "none" for o in ordered],
            "Calls": [o.count for o in ordered],
            "MFLOP": [o.flops / 1e6 for o in ordered],
            "Cast": [o.is_cast for o in ordered],
            "Autocast list": [list_of(o.op) or "" for o in ordered],
        }
    )
    dtypes = sorted({d for cell in table["Computed in"] for d in cell})
    _show(table, "ops", key, {"Computed in": _chip_column("Computed in", dtypes)})


def cast_table(sites: Sequence[CastSite], names: dict[int, str], *, key: str) -> None:
    """Where casts happen."""
    table = pd.DataFrame(
        {
            "Module": [names.get(s.module, "outside the model") for s in sites],
            "Phase": [s.phase for s in sites],
            "From": [[s.source] for s in sites],
            "To": [[s.target] for s in sites],
            "Casts a step": [s.count for s in sites],
        }
    )
    dtypes = sorted({d for s in sites for d in (s.source, s.target)})
    _show(table, "casts", key, {t: _chip_column(t, dtypes) for t in ("From", "To")})


def fp32_table(
    ops: Sequence[Fp32Op], names: dict[int, str], reasons: dict[str, str], *, key: str
) -> None:
    """Ops that computed in fp32, and why."""

    def table(limit: int | None) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "Op": [o.op for o in ops],
                "Why": [reasons[o.reason] for o in ops],
                "Autocast list": [o.autocast_list or "" for o in ops],
                "Calls a step": [o.count for o in ops],
                "Modules": [len(o.modules) for o in ops],
                "Which": [_named([names.get(m, "?") for m in o.modules], limit) for o in ops],
            }
        )

    st.dataframe(table(NAMED_MODULES), key=key, hide_index=True)
    chart.download(lambda: table(None), "fp32-ops", key=key)


def depth_for(rows: Sequence[ModuleDtypes], limit: int) -> int:
    """Largest depth that unfolds at most ``limit`` rows, at least 1."""
    depths = sorted(r.depth for r in rows)
    deepest = depths[-1] if depths else 0
    return deepest if len(depths) <= limit else max(1, depths[limit] - 1)


def max_depth(rows: Sequence[ModuleDtypes]) -> int:
    """Depth of the deepest module."""
    return max((depth_of(r.path) for r in rows), default=0)


def _show(table: pd.DataFrame, name: str, key: str, columns: dict[str, ColumnConfig]) -> None:
    height = min(TABLE_PX, 38 + 35 * max(1, len(table)))
    st.dataframe(table, key=key, hide_index=True, height=height, column_config=columns)
    chart.download(lambda: table, name, key=key)


def _chips(title: str, rows: Sequence[ModuleDtypes], field: str) -> ColumnConfig:
    return _chip_column(title, sorted({d for r in rows for d in getattr(r, field)}))


def _chip_column(title: str, dtypes: Sequence[str]) -> ColumnConfig:
    """Dtypes as labels in the dtypes' own colours."""
    colors = [dtype_color(d) if d else OTHER_DTYPE for d in dtypes]
    return st.column_config.MultiselectColumn(title, options=list(dtypes), color=colors)


def _named(names: Sequence[str], limit: int | None) -> str:
    shown = names[:limit]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {plural(more, 'other')}" if more else "")
