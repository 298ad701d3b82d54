"""The dashboard in Chromium with the real engine: demo, cancelling, deleting, hostile names."""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from ampscope.records import RunSpec, State
from ampscope.store.reader import Reader
from ampscope.zoo.answers import script_path
from tests.helpers import stores
from tests.helpers.browser import open_popover, settle

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
RUN_MS = 300_000  # three probes one after another on a loaded machine; an idle one takes 20 s
Dashboard = Callable[..., str]


def test_the_demo_runs_on_an_empty_store_and_opens_its_result(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    page.goto(dashboard(store))
    settle(page)
    page.get_by_role("button", name="Run the demo").click()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(3)
    expect(page.get_by_text(re.compile(r"of 20 steps")).first).to_be_visible(timeout=RUN_MS)
    page.wait_for_url(re.compile(r"/gradients\?.*run="), timeout=RUN_MS)
    settle(page)
    expect(page.get_by_role("heading", name="Gradients", exact=True)).to_be_visible()
    with Reader(store) as reader:
        runs = reader.runs()
        assert [run.state for run in runs] == [State.FINISHED] * 3
        shown = next(run for run in runs if run.spec.precision == "fp16-noscaler")
        assert f"run={shown.id}" in page.url
        lost = {run.spec.precision: sum(s.lost for s in reader.shadows(run.id)) for run in runs}
    assert lost["fp16-noscaler"] > 10 * lost["fp16"]


def test_a_real_failure_is_diagnosed_from_the_first_page_to_its_verified_fix(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    """The way of a first-time user: one button, the verdict on its card, the fix behind it."""
    page = browser_page
    page.goto(dashboard(tmp_path / "runs.db"))
    settle(page)
    assert page.get_by_test_id("stSidebarNavLink").count() <= 12
    page.get_by_role("button", name="Diagnose a real failure").click()
    expect(page.get_by_text("Fix (verified).")).to_be_visible(timeout=RUN_MS)
    expect(
        page.get_by_text(re.compile(r"An activation overflowed \(AMP001\), in mid.conv2"))
    ).to_be_visible()
    page.get_by_role("link", name="Open the diagnosis").click()
    page.wait_for_url(re.compile(r"/diagnosis\?.*run="))
    settle(page)
    told = "the script was run with mid.conv2 in fp32, and the symptom was gone"
    expect(page.get_by_text(told)).to_be_visible()


# A user's own failing script: fp16, with a module of its own whose product overflows.
SENSORS = '''\
"""Predict a load from eight vibration sensors, in fp16."""

import argparse

import torch
from torch import nn


class EnergyGate(nn.Module):
    """Weighs each feature by its share of the energy."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, signal):
        mixed = self.mix(signal)
        energy = mixed * mixed
        return mixed * (energy / (1.0 + energy.mean(-1, keepdim=True)))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encode = nn.Linear(8, width)
        self.gate = EnergyGate(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, signal):
        return self.head(self.norm(self.gate(self.encode(signal)))).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    torch.manual_seed(7)
    volts = torch.randn(256, 8) * 1200.0
    load = volts[:, 0] / 1200.0 + 0.5 * (volts[:, 1] / 1200.0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(steps):
        batch = torch.randint(0, 256, (32,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(volts[batch]).float() - load[batch]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item())


main()
'''


@pytest.mark.slow
def test_a_first_time_user_finds_the_fix_of_a_script_of_their_own(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    """From `streamlit run app/main.py` to the verified fix, by what the pages say alone."""
    store, folder, page = tmp_path / "runs.db", tmp_path / "my project", browser_page
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "fit_sensors.py").write_text(SENSORS)
    (folder / "setup.py").write_text("raise SystemExit('not a training')\n")
    os.utime(folder / "setup.py", (0, 0))  # what was changed last comes first

    page.goto(dashboard(store))
    settle(page)
    page.get_by_role("link", name="Diagnose a script").click()
    page.wait_for_url(re.compile("/diagnosis"))
    settle(page)
    expect(page.get_by_text("To choose scripts here, start the dashboard with")).to_be_visible()
    command = page.get_by_text(re.compile("^ampscope dashboard --scripts DIR")).inner_text()
    program, name, *options = shlex.split(command)
    assert (program, name) == ("ampscope", "dashboard")
    told = dict(zip(options[::2], options[1::2], strict=True))
    assert told == {"--scripts": "DIR", "--store": str(store)}

    page.goto(dashboard(Path(told["--store"]), "--scripts", str(folder)))
    settle(page)
    page.get_by_role("link", name="Diagnose a script").click()
    chosen = page.get_by_role("combobox", name="Script")
    expect(chosen).to_have_value("src/fit_sensors.py")
    page.get_by_role("textbox", name="Arguments").fill("--steps 30")
    page.get_by_role("button", name="Diagnose", exact=True).click()
    told_so = page.get_by_text("the script was run with gate in fp32, and the symptom was gone")
    expect(told_so).to_be_visible(timeout=RUN_MS)
    found = "An element-wise op overflowed (AMP005), in gate, first at step 0."
    expect(page.get_by_text(found).first).to_be_visible()
    code = page.get_by_test_id("stCode")
    expect(code.filter(has_text="energy = mixed * mixed").first).to_be_visible()
    patch = code.filter(has_text="for name in ['gate']:")
    expect(patch.first).to_be_visible()

    # The line, in the source that the run recorded; and the answer on Home.
    page.get_by_role("link", name=re.compile("fit_sensors.py:.*18 in the source")).click()
    page.wait_for_url(re.compile("/source"))
    settle(page)
    expect(page.get_by_text("energy = mixed * mixed").first).to_be_visible()
    page.get_by_role("link", name="Home").first.click()
    settle(page)
    expect(page.get_by_text("Fix (verified).")).to_be_visible()
    with Reader(store) as reader:
        assert {run.spec.args for run in reader.runs()} == {("--steps", "30")}


@pytest.mark.slow
def test_a_failing_script_is_diagnosed_without_a_terminal(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    """Chosen below the operator's folder, with its arguments and the environment that it needs, to
    the verified fix."""
    folder, page = tmp_path / "mine", browser_page
    folder.mkdir()
    environment = tmp_path / "nightly"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()
    paths = {ours["purelib"], ours["platlib"]}
    (site / "torch.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    script = (
        script_path("c04_vae_decoder.py")
        .read_text()
        .replace(
            "import argparse\n",
            f"import argparse\nimport sys\n\nassert sys.prefix == {str(environment)!r}\n",
        )
    )
    assert "assert sys.prefix" in script
    (folder / "my_decoder.py").write_text(script)
    options = ("--scripts", str(folder), "--python", f"nightly={environment}")
    page.goto(dashboard(tmp_path / "runs.db", *options))
    settle(page)
    page.get_by_role("link", name="Diagnose a script").click()
    page.get_by_role("textbox", name="Arguments").fill("--epochs 4")
    page.get_by_role("combobox", name="Python").click()
    page.get_by_role("option", name="nightly").click()
    page.get_by_role("button", name="Diagnose", exact=True).click()
    told = "the script was run with mid.conv2 in fp32, and the symptom was gone"
    expect(page.get_by_text(told)).to_be_visible(timeout=RUN_MS)
    with Reader(tmp_path / "runs.db") as reader:
        assert {run.spec.args for run in reader.runs()} == {("--epochs", "4")}


def test_a_probe_is_cancelled_and_keeps_what_it_recorded(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    page.goto(f"{dashboard(store)}/new_probe")
    settle(page)
    page.get_by_label("Steps", exact=True).fill("100000")
    page.get_by_label("Steps", exact=True).press("Tab")
    page.get_by_role("button", name="Start the probe").click()
    progress = page.get_by_text(re.compile(r"[1-9]\d* of 100,000 steps"))
    expect(progress).to_be_visible(timeout=RUN_MS)
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("This run was cancelled.")).to_be_visible(timeout=RUN_MS)
    with Reader(store) as reader:
        (run,) = reader.runs()
        assert run.state is State.CANCELLED
        assert 0 < run.steps_done < 100_000
        assert len(reader.steps(run.id)) == run.steps_done
    page.get_by_role("link", name="Open").click()
    expect(page.get_by_role("heading", name="Layers", exact=True)).to_be_visible()


def test_a_failed_probe_is_one_sentence_with_its_traceback_folded(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    folder, page = tmp_path / "mine", browser_page
    folder.mkdir()
    (folder / "broken.py").write_text("def build(seed):\n    raise ValueError('<b>no data</b>')\n")
    page.goto(f"{dashboard(tmp_path / 'runs.db', '--workloads', str(folder))}/new_probe")
    settle(page)
    page.get_by_role("combobox").first.click()
    page.get_by_role("option", name="broken.py").click()
    page.get_by_role("button", name="Start the probe").click()
    expect(page.get_by_text("This run failed.")).to_be_visible(timeout=RUN_MS)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("<b>no data</b>")
    expect(alert).not_to_contain_text("Traceback")
    trace = page.get_by_text("Traceback (most recent call last)").first
    expect(trace).to_be_hidden()
    page.get_by_text("The run's own traceback").click()
    expect(trace).to_be_visible()


def test_names_from_a_run_are_text_on_every_page(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    run = stores.hostile(store)
    url = dashboard(store)
    for path in ("", f"layers?run={run}", f"gradients?run={run}", f"loss_scale?run={run}"):
        page.goto(f"{url}/{path}")
        settle(page)
        expect(page.get_by_text("<script>window.hacked").first).to_be_visible()
        assert page.evaluate("window.hacked") is None, path
        assert page.locator("[data-testid=stMain] img[src='x']").count() == 0, path


def test_a_run_is_deleted_after_a_confirmation(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    kept = stores.finished(store, RunSpec(workload="gpt", label="kept", steps=3))
    stores.finished(store, RunSpec(workload="gpt", label="gone", steps=3))
    page.goto(f"{dashboard(store)}/runs")
    settle(page)
    choice = page.get_by_role("combobox", name="Runs to delete")
    open_popover(page, "Delete runs", choice)
    choice.click()
    page.get_by_role("option", name=re.compile("^gone")).click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Delete 1 run").click()
    expect(page.get_by_text("gone", exact=True)).to_have_count(0)
    with Reader(store) as reader:
        assert [run.id for run in reader.runs()] == [kept]


def test_the_chosen_run_follows_from_page_to_page_and_stays_in_the_address(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    older = stores.finished(store, RunSpec(workload="gpt", label="older", steps=6))
    stores.finished(store, RunSpec(workload="gpt", label="newer", steps=6))
    page.goto(f"{dashboard(store)}/layers?run={older}")
    settle(page)
    expect(page.get_by_text("older", exact=True)).to_be_visible()
    page.get_by_role("link", name="Loss scale").click()
    page.wait_for_url(re.compile(rf"/loss_scale\?.*run={older}"))
    expect(page.get_by_text("older", exact=True)).to_be_visible()
    picker = page.get_by_test_id("stSidebar").get_by_role("combobox", name="Run")
    expect(picker).to_have_value(re.compile("^older"))


def test_a_run_page_follows_a_run_that_is_under_way(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    from ampscope.store.writer import RunWriter
    from tests.helpers.synthetic_run import add_step, module_paths

    store, page = tmp_path / "runs.db", browser_page
    run = stores.running(store, RunSpec(workload="gpt", steps=12), steps=6)
    page.goto(f"{dashboard(store)}/loss_scale?run={run}")
    settle(page)
    expect(page.get_by_text("Running: 6 of 12 steps.")).to_be_visible()
    writer = RunWriter(store, run)
    add_step(writer, module_paths(), 6)
    writer.flush()
    expect(page.get_by_text("Running: 7 of 12 steps.")).to_be_visible()
    writer.finish(State.FINISHED)
    writer.close()
    expect(page.get_by_text("Running:")).to_have_count(0)
