"""A rehearsal of scripts that take the device that is there: CUDA's default dtype, where meant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.script_runner import OnDemand, Ran, Runner, quick, spec, write_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

HEAD = """
import argparse, functools, warnings
import torch
warnings.simplefilter("ignore")
torch.manual_seed(0)
m = torch.nn.Linear(4, 2)
x = torch.randn(8, 4)
"""
ASK = "torch.cuda.is_available()"
LINE = f'device = torch.device("cuda" if {ASK} else "cpu")\n'
SHOW = "print(m(x).dtype)\n"
CHOSEN = {
    "scaler_off": (
        LINE + "s = torch.amp.GradScaler(device.type, enabled=device.type == 'cuda')\n"
        f"with torch.autocast(device.type): {SHOW}"
    ),
    "scaler_none": (
        LINE + f"s = torch.amp.GradScaler() if {ASK} else None\n"
        f"with torch.autocast(device.type): {SHOW}"
    ),
    "type": LINE + "with torch.autocast(device.type): " + SHOW,
    "keyword": LINE + "with torch.amp.autocast(device_type=device.type): " + SHOW,
    "flag": f'use = {ASK}\nname = "cuda" if use else "cpu"\nwith torch.autocast(name): {SHOW}',
    "branch": f'd = "cpu"\nif {ASK}:\n    d = "cuda"\nwith torch.autocast(d): {SHOW}',
    "guard": f'd = "cuda"\nif not {ASK}:\n    d = "cpu"\nwith torch.autocast(d): {SHOW}',
    "count": 'd = ["cpu", "cuda"][torch.cuda.device_count() > 0]\nwith torch.autocast(d): ' + SHOW,
    "function": (
        f'def pick():\n    if {ASK}: return "cuda"\n    return "cpu"\n'
        f"def train(where):\n    with torch.autocast(where): {SHOW}train(pick())\n"
    ),
    "option": (
        "p = argparse.ArgumentParser()\n"
        f'p.add_argument("--my-device", default="cuda" if {ASK} else "cpu")\n'
        f"a = p.parse_args()\nwith torch.autocast(a.my_device): {SHOW}"
    ),
    "tensor": (
        LINE + "m, x = m.to(device), x.to(device)\n"
        f"with torch.autocast(x.device.type): {SHOW}"
    ),
    "attribute": (
        f'class T:\n    def __init__(self, where): self.where = where\n'
        f"    def run(self):\n        with torch.autocast(self.where): {SHOW}"
        f'T("cuda" if {ASK} else "cpu").run()\n'
    ),
    "partial": LINE + f"amp = functools.partial(torch.autocast, device_type=device.type)\n"
    f"with amp(): {SHOW}",
    "decorator": LINE + f"@torch.autocast(device.type)\ndef f(): {SHOW}f()\n",
    "asked_dtype": (
        LINE + "t = torch.get_autocast_dtype(device.type)\n"
        f"with torch.autocast(device.type, dtype=t): {SHOW}"
    ),
    "scaler": (
        LINE + "s = torch.amp.GradScaler(device.type)\n"
        f"with torch.autocast(device.type): {SHOW}"
    ),
    "named_elsewhere": (
        't = torch.get_autocast_dtype("cuda")\n'
        f'with torch.autocast("cuda", t): {SHOW}'
    ),
}  # fmt: skip
STAYS = {
    "literal": ("with torch.autocast('cpu'): " + SHOW, "autocast at literal.py:8"),
    "seeds": (
        f"if {ASK}: torch.cuda.manual_seed_all(0)\ndevice = 'cpu'\n"
        f"with torch.autocast(device): {SHOW}",
        "autocast at seeds.py:10",
    ),
    "beside": (LINE + f"with torch.autocast('cpu', enabled=True): {SHOW}", "beside.py:9"),
    "workers": (
        f"class C:\n    def __init__(s, device, pin): s.device = device\nc = C('cpu', {ASK})\n"
        f"with torch.autocast(c.device): {SHOW}",
        "workers.py:11",
    ),
    "explicit": (LINE + f"with torch.autocast(device.type, torch.bfloat16): {SHOW}", ""),
    "old_cpu": (LINE + f"with torch.cpu.amp.autocast(): {SHOW}", ""),
    "set": (
        "torch.set_autocast_dtype('cuda', torch.bfloat16)\n"
        f"with torch.autocast('cuda'): {SHOW}",
        "",
    ),
    "set_old": (
        "torch.set_autocast_gpu_dtype(torch.bfloat16)\n"
        f"with torch.cuda.amp.autocast(dtype=None): {SHOW}",
        "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    folder = tmp_path_factory.mktemp("choice")
    texts = CHOSEN | {name: text for name, (text, _) in STAYS.items()}
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        runner = Runner(runs)
        paths = {n: write_script(folder, f"{n}.py", HEAD + text) for n, text in texts.items()}
        made = OnDemand(lambda name: runner(paths[name], policy="cuda"))
        made["native"] = runner(paths["type"])
        for name in ("asked_dtype", "type", "scaler_off", "literal"):
            made[f"compiled {name}"] = runner(paths[name], control="compiled", policy="cuda")
        yield made


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "name", quick(CHOSEN, "type", "branch", "option", "attribute", "asked_dtype", "named_elsewhere")
)
def test_a_device_that_was_chosen_runs_in_the_dtype_of_cuda(
    name: str, ended: dict[str, Ran]
) -> None:
    ran = ended[name]
    assert ran.out == b"torch.float16\n", ran.err.decode()
    if name not in ("asked_dtype", "named_elsewhere"):
        assert "autocast on CUDA" in " ".join(ran.outcome.notes)  # it finds a device, and takes it


@pytest.mark.parametrize("name", quick(STAYS, "literal", "seeds", "explicit", "set"))
def test_where_the_script_names_the_cpu_bf16_stays(name: str, ended: dict[str, Ran]) -> None:
    ran, said = ended[name], STAYS[name][1]
    assert ran.out == b"torch.bfloat16\n", ran.err.decode()
    notes = " ".join(ran.outcome.notes)
    assert said in notes
    assert ("stayed in bfloat16, the CPU's default" in notes) == bool(said)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("type", b"float16"), ("asked_dtype", b"float16"), ("scaler_off", b"bfloat16"),
     ("literal", b"bfloat16")],
)  # fmt: skip
def test_compiled_without_a_stand_in_the_dtype_is_the_same(
    name: str, dtype: bytes, ended: dict[str, Ran]
) -> None:
    """But where the script's scaler is off for lack of a device."""
    ran = ended[f"compiled {name}"]
    assert ran.out == b"torch." + dtype + b"\n", ran.err.decode()


def test_without_the_policy_nothing_changes(ended: dict[str, Ran]) -> None:
    assert ended["native"].out == b"torch.bfloat16\n"
    assert ended["native"].outcome.notes == ()
