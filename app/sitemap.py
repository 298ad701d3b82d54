"""The pages, their sections and addresses: one table, in the order of the navigation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampscope.lessons.catalog import LESSONS

PAGES_FOLDER = Path(__file__).resolve().parent.parent / "pages"


@dataclass(frozen=True, slots=True)
class Entry:
    """One page; its address is the file's name (``/loss_scale?run=…``)."""

    file: Path
    title: str
    icon: str
    section: str


# Of the lessons; one without an icon has no page.
LESSON_ICONS = {
    "numbers": "pin",
    "gradients": "bar_chart",
    "underflow": "vertical_align_bottom",
    "scaler": "trending_up",
    "ops": "rule",
    "half": "content_cut",
    "master": "save",
    "bf16": "balance",
    "inf_to_nan": "link",
    "accumulate": "functions",
    "memory": "memory_alt",
    "speed": "bolt",
    "mistakes": "bug_report",
    "cost": "payments",
}


def _entry(name: str, title: str, icon: str, section: str) -> Entry:
    return Entry(PAGES_FOLDER / f"{name}.py", title, f":material/{icon}:", section)


HOME = _entry("home", "Home", "home", "Probes")
NEW_PROBE = _entry("new_probe", "New probe", "add_circle", "Probes")
LEARN = _entry("learn", "Learn", "school", "Learn")
# By number; a lesson's file is named by number and id, so that addresses sort as lessons do.
LESSON_ENTRIES = {
    one.number: _entry(
        f"learn_{one.number:02d}_{one.id}", f"{one.number} {one.title}", icon, "Learn"
    )
    for one in LESSONS.values()
    if (icon := LESSON_ICONS.get(one.id))
}
CLASSROOM = _entry("classroom", "Class", "groups", "Learn")
DIAGNOSIS = _entry("diagnosis", "Diagnosis", "troubleshoot", "Scripts")
ZOO = _entry("zoo", "Zoo", "pets", "Scripts")
TRAINING = _entry("training", "Training", "monitoring", "One run")
LAYERS = _entry("layers", "Layers", "account_tree", "One run")
GRADIENTS = _entry("gradients", "Gradients", "blur_on", "One run")
LOSS_SCALE = _entry("loss_scale", "Loss scale", "show_chart", "One run")
TELEMETRY = _entry("telemetry", "Telemetry", "speed", "One run")
HARDWARE = _entry("hardware", "Hardware", "memory", "This machine")
OP_LISTS = _entry("op_lists", "Op lists", "list_alt", "Reference")
FRAMEWORKS = _entry("frameworks", "Frameworks", "hub", "Reference")
COMPARE = _entry("compare", "Compare", "compare_arrows", "This machine")
BATCH_SIZE = _entry("batch_size", "Batch size", "stacked_bar_chart", "This machine")
CORES = _entry("tensor_cores", "Tensor Cores", "grid_on", "This machine")

ENTRIES = (
    HOME,
    NEW_PROBE,
    LEARN,
    *LESSON_ENTRIES.values(),
    CLASSROOM,
    DIAGNOSIS,
    ZOO,
    TRAINING,
    LAYERS,
    GRADIENTS,
    LOSS_SCALE,
    TELEMETRY,
    HARDWARE,
    CORES,
    COMPARE,
    BATCH_SIZE,
    OP_LISTS,
    FRAMEWORKS,
)
RUN_PAGES = (LAYERS, GRADIENTS, LOSS_SCALE, TELEMETRY)  # what a recorded run can be looked at with
WATCHED_PAGES = (TRAINING, GRADIENTS, LOSS_SCALE, LAYERS, TELEMETRY)  # and a watched training
MEASUREMENT_PAGES = {"bench": HARDWARE, "cores": CORES, "compare": COMPARE, "batch": BATCH_SIZE}
