"""The sections of docs/cost.md on costs, printed from the kept measurements.

python benchmarks/print_cost.py
python benchmarks/print_cost.py --write  # puts them into docs/cost.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "cost.md"
GOAL_WORDS = {"fault": "6 in the median", "healthy": "3 each"}
WATCH = {
    "watch, default schedule": "`ampscope.watch`, default schedule",
    "watch, histograms at every tenth step": "`ampscope.watch(every=10)`, histograms at every "
    "tenth step",
    "watch, everything at every step": "`ampscope.watch(every=1)`, everything at every step",
    "watch, schedule asleep": "`ampscope.watch(every=0)`, hooks present, schedule asleep",
}
PROBE = {
    "every layer, every step": "activations, output and weight gradients at every step",
    "every layer, one step in ten": "the same at one step in ten",
    "hooks idle": "hooks idle",
    "op trace": "op trace, every step",
    "fp32 shadow, its own step": "fp32 shadow, the step that has one",
}
PEERS = {
    "watch, default schedule": "`ampscope.watch`, default schedule, of that day",
    "watch, everything at every step": "`ampscope.watch(every=1)`, everything at every step",
    "plain torch.bincount": "torch.bincount of the same exponents, nothing kept",
    "torch detect_anomaly": "torch's detect_anomaly",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
    "wandb.watch": "wandb.watch, gradients, every step",
    "TensorBoard gradients": "TensorBoard, histograms of gradients, every step",
}


def kept(name: str) -> Any:
    """A kept result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def diagnoses() -> str:
    """What diagnosing costs: everything between the marks named diagnose."""
    found = kept("diagnose_cost")
    lines = [
        "Processor time of `ampscope diagnose`, all its processes together, divided by that of the "
        "plain script",
        f"({found['machine']}; {link('diagnose_cost')}):",
        "",
        "| scripts | how many | median | largest | within the goal | goal | runs in the median |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, of in found["summary"].items():
        lines.append(
            f"| {kind} | {of['scripts']} | {of['median']:.1f} | {of['largest']:.1f} | "
            f"{of['within_goal']} | {GOAL_WORDS[kind]} | {of['median_runs']:g} |"
        )
    lines += [
        "",
        "| script | verdict | runs | plain, s | diagnosed, s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["scripts"]:
        cells = (row["script"], row["said"], len(row["runs"]), row["plain_s"], row["diagnose_s"])
        lines.append(f"| {' | '.join(map(str, cells))} | {row['ratio']:.1f} |")
    return "\n".join(lines)


def section() -> str:
    """What recording costs: everything between the marks named costs."""
    trainings = [kept("overhead_alone_cpu"), kept("overhead_alone_fp32_cpu")]
    first, peers = trainings[0], kept("overhead_cpu")
    models = [
        {**model, "model": f"{model['model']}, {training['training'].partition(',')[0]}"}
        for training in trainings
        for model in training["models"]
    ]
    return "\n".join(
        [
            "Time of a training step with `ampscope.watch` divided by that of the bare step",
            f"of the same process, interleaved, on {machine(first)}, {dates(trainings)};",
            f"medians of {first['rounds']} rounds, quartiles in {link('overhead_alone_cpu')} and",
            f"{link('overhead_alone_fp32_cpu')}. In bold: what misses its goal.",
            "",
            *table(models, WATCH),
            "",
            f"Beside other tools, in bf16, measured in one process ({dates([peers])}, "
            f"{link('overhead_cpu')}):",
            "",
            *table(peers["models"], PEERS),
            "",
            f"A probe's instruments, each alone ({link('overhead_probe_cpu')}):",
            "",
            *table(kept("overhead_probe_cpu")["models"], PROBE),
            "",
            *facts(),
        ]
    )


def dates(results: list[dict[str, Any]]) -> str:
    """On which days these were measured."""
    return " and ".join(sorted({result["setting"]["date"][:10] for result in results}))


def table(models: list[dict[str, Any]], rows: dict[str, str]) -> list[str]:
    """Contestants down, models across; goals last, and in bold what misses its own."""
    heads = [f"{m['model'].replace(':', ' ')} ({bare_ms(m)} ms)" for m in models]
    lines = ["| what records | " + " | ".join(heads) + " | goal |"]
    lines.append("|---" * (len(models) + 2) + "|")
    for name, words in rows.items():
        if any(name not in m["contestants"] for m in models):
            continue
        cells, goals = [], set()
        for model in models:
            ratio = f"{model['contestants'][name]['ratio'][1]:.2f}"
            goal = model["goals"].get(name)
            cells.append(ratio if goal is None or goal["met"] else f"**{ratio}**")
            goals.update([] if goal is None else [f"{goal['goal']:.2f}"])
        lines.append(f"| {words} | " + " | ".join([*cells, ", ".join(sorted(goals))]) + " |")
    return lines


def facts() -> list[str]:
    """Store, memory and pages, one line each."""
    rate, kills, memory = kept("store_rate"), kept("kill_store"), kept("watch_memory")
    pages, kernel = kept("long_run"), kept("page_time")
    watch = rate["written_watch"]
    long = pages["runs"][-1]
    slowest = max(times["first"][0] for times in long["pages_s"].values())
    half = memory["readings"]
    first, last = half[len(half) // 4]["cpu_s"], half[-1]["cpu_s"]
    return [
        f"- store: {watch['bytes_per_histogram']:.0f} bytes a histogram, "
        f"{watch['histograms_per_s']:,} histograms a second (goals 100 and 20,000; "
        f"{link('store_rate')})",
        f"- {kills['kills']} kills at random moments: {kills['flushed_steps']:,} flushed steps, "
        f"{kills['lost_flushed_steps']} lost; {kills['stores_that_did_not_open']} stores did not "
        f"open ({link('kill_store')})",
        f"- {memory['readings'][-1]['steps']:,} watched steps: Python's memory grows by "
        f"{memory['python_growth_bytes_a_step']:.1f} bytes per step, the process's by "
        f"{memory['resident_growth_bytes_a_step']:.1f} (tracemalloc's own included); 5 % of them "
        f"take {first:.1f} s of processor time early and {last:.1f} s at the end "
        f"({link('watch_memory')})",
        f"- a run of {long['steps']:,} steps opens in {slowest:.2f} s, whichever the page "
        f"(goal 1 s; {link('long_run')})",
        f"- a probe of 500 modules, 1,000 steps and five roles takes {kernel['store_mib']:.0f} MiB "
        f"of store ({link('page_time')})",
    ]


def link(name: str) -> str:
    return f"[{name}.json](../benchmarks/results/{name}.json)"


def machine(result: dict[str, Any]) -> str:
    found = result["setting"]
    return f"{found['processor']}, {found['cores']} cores, torch {found['versions']['torch']}"


def bare_ms(model: dict[str, Any]) -> str:
    return f"{model['contestants']['bare step']['ms'][1]:.0f}"


def replaced(text: str) -> str:
    """The page with the sections as they are now."""
    for name, made in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made()}\n{end}{rest.partition(end)[2]}"
    return text


SECTIONS = {"costs": section, "diagnose": diagnoses}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        print("\n\n".join(made() for made in SECTIONS.values()))
