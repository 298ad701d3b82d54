"""Every view has an address: a page, and its choices (`/loss_scale?run=…&step=…&module=…&role=…`).

:data:`ENTRIES` is the one table of the pages. A widget made here starts from the URL and writes
back to it. Streamlit drops the URL's parameters when a person walks to another page, so the session
remembers the last choice of each name, and the same run, step and module are still chosen there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypedDict, TypeVar, Unpack

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope import extensions
from ampscope.measurements import KINDS
from app.text import code, cut, escape

T = TypeVar("T", bound=Hashable)
PAGES_FOLDER = Path(__file__).resolve().parent.parent / "pages"
_MEMORY = "link:"  # session keys of remembered choices
_DRAWN = "drawn:"  # session keys of what a widget was last drawn with


@dataclass(frozen=True, slots=True)
class Entry:
    """One page. ``name`` is its address, and its file's in ``pages/`` where nothing else draws
    it."""

    name: str
    title: str
    icon: str
    section: str
    in_sidebar: bool = True
    draw: Callable[[], None] | None = None
    for_teacher: bool = False  # in the sidebar of a class's teacher alone

    @property
    def file(self) -> Path:
        """Of a page that has one."""
        return PAGES_FOLDER / f"{self.name}.py"

    def page(self, *, is_hidden: bool = False) -> st.Page:
        """What Streamlit navigates, links and switches to."""
        return st.Page(
            self.draw or self.file,
            title=self.title,
            icon=self.icon,
            url_path=self.name,
            default=self.name == "home",
            visibility="hidden" if is_hidden else "visible",
        )


def _entry(name: str, title: str, icon: str, section: str = "", within: str = "") -> Entry:
    """``within``: what leads to a page that is not in the sidebar."""
    return Entry(name, title, f":material/{icon}:", section or within, not within)


def _of_extension(page: extensions.Page) -> Entry:
    icon = f":material/{page.icon}:"
    draw = functools.partial(_draw, page.draw) if page.draw else None
    return Entry(page.name, page.title, icon, page.within, page.in_sidebar, draw, page.for_teacher)


def _extensions_of(*sections: str) -> list[Entry]:
    return [entry for entry in EXTENSION_ENTRIES.values() if entry.section in sections]


def _draw(where: str) -> None:
    extensions.load(where)()


# By the page's name; those of extensions that are there.
EXTENSION_PAGES = {page.name: page for page in extensions.pages()}
EXTENSION_ENTRIES = {name: _of_extension(page) for name, page in EXTENSION_PAGES.items()}
# In the order of the navigation, which is that of need: what is wrong, what was run, what this
# machine does, how it works, what to look up. Those that other pages link to have names.
ENTRIES = (
    HOME := _entry("home", "Home", "home", "Trainings"),
    DIAGNOSIS := _entry("diagnosis", "Diagnosis", "troubleshoot", "Trainings"),
    RUNS := _entry("runs", "Runs", "list", "Trainings"),
    NEW_PROBE := _entry("new_probe", "New probe", "add_circle", "Trainings"),
    TRAINING := _entry("training", "Training", "monitoring", within="Trainings"),
    LAYERS := _entry("layers", "Layers", "account_tree", within="Trainings"),
    GRADIENTS := _entry("gradients", "Gradients", "blur_on", within="Trainings"),
    LOSS_SCALE := _entry("loss_scale", "Loss scale", "show_chart", within="Trainings"),
    TELEMETRY := _entry("telemetry", "Telemetry", "speed", within="Trainings"),
    SOURCE := _entry("source", "Source", "code", within="Trainings"),
    *_extensions_of("Trainings", "This machine"),
    HARDWARE := _entry("hardware", "Hardware", "memory", "This machine"),
    CORES := _entry("tensor_cores", "Tensor Cores", "grid_on", within="This machine"),
    *(entry for entry in _extensions_of("Learn") if not entry.for_teacher),
    ZOO := _entry("zoo", "Zoo", "pets", "Learn"),
    *(entry for entry in _extensions_of("Learn") if entry.for_teacher),
    OP_LISTS := _entry("op_lists", "Op lists", "list_alt", "Reference"),
    *_extensions_of("Reference"),
)
# By RunSpec.kind; lessons, which have pages of their own, are not among them.
MEASUREMENT_PAGES = {
    kind.name: entry for kind in KINDS.values() for entry in ENTRIES if entry.name == kind.page
}


def link(entry: Entry, label: str = "", icon: str = "", **query: str) -> None:
    """A link to a page, under its title and icon without others; ``query`` is of its address."""
    st.page_link(entry.page(), label=label or entry.title, icon=icon or entry.icon,
                 query_params=query)  # fmt: skip


def show_section(section: str) -> None:
    """Links to all pages of a section, of which the sidebar has one or two."""
    with st.container(horizontal=True, gap="small", key="section-tabs"):
        for entry in ENTRIES:
            if entry.section == section:
                link(entry)


def wanted(name: str) -> str:
    """What the URL asks for, else the session's last choice, else an empty text."""
    if name in st.query_params:
        return str(st.query_params[name])
    return str(st.session_state.get(_MEMORY + name, ""))


def wanted_number(name: str) -> int | None:
    """A whole number below 10^18 that the URL asks for; None where it asks for anything else."""
    text = wanted(name)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def keep(name: str, value: object) -> None:
    """Put a choice into the URL and remember it; None takes it out of both."""
    if value is None:
        st.query_params.pop(name, None)
        st.session_state.pop(_MEMORY + name, None)
        return
    text = str(value)
    st.session_state[_MEMORY + name] = text
    if st.query_params.get(name) != text:
        st.query_params[name] = text


def chosen(name: str, options: Sequence[T], default: T) -> T:
    """The option whose text the URL (or the session) names, else ``default``."""
    text = wanted(name)
    return next((option for option in options if str(option) == text), default)


def is_missing(name: str, options: Sequence[Hashable]) -> bool:
    """Whether the URL itself asks for something, and that is not on offer."""
    return bool(st.query_params.get(name)) and wanted(name) not in map(str, options)


class Choice(TypedDict, Generic[T], total=False):
    """How a widget offers its options."""

    default: T | None
    format_func: Callable[[T], str]
    help: str | None
    place: DeltaGenerator | None
    width: int  # pixels; as wide as there is room without


def select(
    label: str,
    name: str,
    options: Sequence[T],
    *,
    writes_default: bool = True,
    **how: Unpack[Choice[T]],
) -> T:
    """A select box (with search) bound to the URL's ``name``. ``options`` must not be empty.

    Each writing is a step in the browser's history: without ``writes_default`` a page that was
    only looked at is left by one press of Back.
    """
    return _bound("selectbox", label, name, options, writes_default=writes_default, **how)


def pick(label: str, name: str, options: Sequence[T], **how: Unpack[Choice[T]]) -> T:
    """One of a few, side by side, bound to the URL's ``name``."""
    return _bound("segmented_control", label, name, options, **how)


def slide(label: str, name: str, options: Sequence[T], **how: Unpack[Choice[T]]) -> T:
    """A slider over ``options``, bound to the URL's ``name``; a single option is shown as text."""
    kind = "select_slider" if len(options) > 1 else "text"
    return _bound(kind, label, name, options, **how)


def find(name: str, placeholder: str) -> str:
    """What to look for, typed and bound to the URL's ``name``; empty for all."""
    key = widget_key(name, wanted(name))
    st.text_input("Find", wanted(name), key=key, placeholder=placeholder, on_change=_remember_text,
                  args=(name, key))  # fmt: skip
    return wanted(name)


def _bound(
    kind: str,
    label: str,
    name: str,
    options: Sequence[T],
    *,
    default: T | None = None,
    format_func: Callable[[T], str] = str,
    help: str | None = None,
    place: DeltaGenerator | None = None,
    width: int | None = None,
    writes_default: bool = True,
) -> T:
    """Streamlit's widget ``kind``, drawn.

    The URL and the session's memory decide, never the widget's own state: that is lost or stale
    when a person walks from page to page.
    """
    value = chosen(name, options, options[0] if default is None else default)
    # The browser names an option of a select box by its label, and others by their place.
    key = widget_key(name, value, () if kind == "selectbox" else options)
    if (writes_default or wanted(name)) and not is_missing(name, options):
        keep(name, value)
    shown = place or st
    _say_missing(label, name, options, format_func(value), place)
    if kind == "text":
        shown.text(f"{label}: {format_func(value)}")
        return value
    getattr(shown, kind)(
        label,
        options,
        key=key,
        format_func=_labels(options, format_func),
        help=help,
        on_change=_remember,
        args=(name, key),
        **({} if width is None else {"width": width}),
        **{_FIRST_SHOWN[kind]: options.index(value) if kind == "selectbox" else value},
    )
    return value


# Which argument of a widget says what it shows when the browser first draws it.
_FIRST_SHOWN = {"selectbox": "index", "segmented_control": "default", "select_slider": "value"}


def _say_missing(
    label: str,
    name: str,
    options: Sequence[Hashable],
    shown: str,
    place: DeltaGenerator | None,
) -> None:
    """An address that asks for what is not there must not look like one that was followed. It
    stays in the address bar, and the line with it, until the user chooses."""
    if is_missing(name, options):
        asked = code(cut(wanted(name)))
        (place or st).markdown(
            f":material/link_off: {escape(label)} {asked}, which the address asks for, is not "
            f"there; {escape(shown)} is shown."
        )


def widget_key(name: str, value: object, options: Sequence[Hashable] = ()) -> str:
    """Key of the widget ``name``, which is about to be drawn with ``value`` as the value that it
    first shows.

    A key stands for one widget of the browser for as long as a person alone moves it. Where
    ``value`` came from elsewhere (the address, a button, a run that has grown), or options in
    front of the last ones have changed, the key is a new one, and so is the widget. Nothing is
    written into a widget that the browser has: a run of the script that another one overtakes
    never reaches the browser, which would go on showing the old value, or the lowest, and send it
    as if a person had chosen it.
    """
    drawn: tuple[int, object, Sequence[Hashable]] | None = st.session_state.get(_DRAWN + name)
    number = 0
    if drawn is not None:
        number, last_value, last_options = drawn
        shown = st.session_state.get(_numbered(name, number), last_value)
        number += shown != value or tuple(options[: len(last_options)]) != last_options
    st.session_state[_DRAWN + name] = number, value, tuple(options)
    return _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    return f"widget:{name}" + f":{number}" * bool(number)


def is_moved(name: str, key: str) -> bool:
    """Whether a person moved the widget, asked when it reports a change: the browser also reports
    what a new widget first shows, if the run of the script that drew it was overtaken."""
    number, value, _ = st.session_state.get(_DRAWN + name, (0, None, ()))
    return key == _numbered(name, number) and st.session_state[key] != value


def _remember(name: str, key: str) -> None:
    """A click on the chosen one of a few takes the choice away, which is not wanted: it stays."""
    value = st.session_state[key]
    if value is not None and is_moved(name, key):
        keep(name, value)


def _remember_text(name: str, key: str) -> None:
    if is_moved(name, key):
        keep(name, st.session_state[key].strip() or None)


def _labels(options: Sequence[T], format_func: Callable[[T], str]) -> Callable[[T], str]:
    """``format_func`` made unique: the browser sends an option's label back, not its place."""
    labels = {option: format_func(option) for option in options}
    counts = Counter(labels.values())
    return lambda option: (
        labels[option] if counts[labels[option]] == 1 else f"{labels[option]} ({option})"
    )
