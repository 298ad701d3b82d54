"""Scripts that take their settings from elsewhere are diagnosed as the plain one is, and leave the
user's files as they were: YAML, environment variables, OmegaConf, Hydra, a checkpoint to start
from, DataLoader workers, TensorBoard, accelerate's notebook launcher."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.helpers.script_diagnoses import diagnosed, told

pytestmark = pytest.mark.slow

TRAIN = """\
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x, gain):
        h = self.up(torch.relu(self.inp(x)) * gain)
        return self.out(nn.functional.layer_norm(h.float(), (32,)))


def loader(workers=0):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(384, 16, generator=g), torch.randint(0, 4, (384,), generator=g)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, 32, num_workers=workers)


def made():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.up.weight.mul_(300)
    return net


def train(gain, lr=0.05, out="out", net=None, workers=0, told=lambda step, loss: None):
    net = net or made()
    opt = torch.optim.SGD(net.parameters(), lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (x, y) in enumerate(loader(workers)):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(net(x, gain), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        told(step, loss.item())
    os.makedirs(out, exist_ok=True)
    torch.save({"net": net.state_dict(), "gain": gain}, out + "/last.pt")
"""
SCRIPTS = {
    "plain": "train(300.0)\n",
    "yaml": (
        "import argparse, yaml\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--config')\n"
        "with open(parser.parse_args().config) as file:\n    settings = yaml.safe_load(file)\n"
        "train(**settings)\n"
        "with open(settings['out'] + '/used.yaml', 'w') as file:\n    yaml.dump(settings, file)\n"
    ),
    "environment": "train(float(os.environ['GAIN']), out=os.environ['OUT'])\n",
    "omegaconf": (
        "from omegaconf import OmegaConf\n"
        "made_of = OmegaConf.merge(OmegaConf.load('config.yaml'), OmegaConf.from_cli())\n"
        "train(**made_of)\nOmegaConf.save(made_of, made_of.out + '/used.yaml')\n"
    ),
    "hydra": (
        "import hydra\n\n\n@hydra.main(version_base=None, config_path='.', config_name='config')\n"
        "def main(settings):\n    train(**settings)\n\n\nmain()\n"
    ),
    "checkpoint": (
        "before = torch.load('out/last.pt')\nnet = Net()\nnet.load_state_dict(before['net'])\n"
        "train(before['gain'], net=net)\n"
    ),
    "workers": "train(300.0, workers=2)\n",
    "tensorboard": (
        "from torch.utils.tensorboard import SummaryWriter\n"
        "with SummaryWriter('runs/one') as writer:\n"
        "    train(300.0, told=lambda step, loss: writer.add_scalar('loss', loss, step))\n"
    ),
    "notebook_launcher": (
        "from accelerate import notebook_launcher\n\n"
        "if __name__ == '__main__':\n    notebook_launcher(train, (300.0,), num_processes=1)\n"
    ),
    "notebook_launcher_2": (
        "from accelerate import notebook_launcher\n\n\ndef ranks():\n"
        "    rank = os.environ['LOCAL_RANK']\n    train(300.0, out='out' + rank)\n\n\n"
        "if __name__ == '__main__':\n    notebook_launcher(ranks, (), num_processes=2)\n"
    ),
}  # fmt: skip
NEEDS = {
    "yaml": "yaml", "omegaconf": "omegaconf", "hydra": "hydra", "tensorboard": "tensorboard",
    "notebook_launcher": "accelerate", "notebook_launcher_2": "accelerate",
}  # fmt: skip
ARGUMENTS = {
    "yaml": ("--config", "config.yaml"),
    "omegaconf": ("gain=300.0",),
    "hydra": ("lr=0.05",),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_diagnosed_wherever_its_settings_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    folder = tmp_path / "project"
    (folder / "out").mkdir(parents=True)
    (folder / "config.yaml").write_text("gain: 300.0\nlr: 0.05\nout: out\n")
    (folder / "out" / "last.pt").write_bytes(checkpoint())
    path = folder / "train.py"
    path.write_text(f"{TRAIN}\n\n{SCRIPTS[name]}")
    before = files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GAIN", "300")
    monkeypatch.setenv("OUT", "out")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    report = diagnosed(path, tmp_path / "runs.db", args=ARGUMENTS.get(name, ()))
    assert told(report) == ("activation_overflow", "up", True), report.notes
    assert files(folder) == before


def checkpoint() -> bytes:
    """What the plain script had when it began, as it saves it."""
    known: dict[str, object] = {}
    exec(compile(TRAIN, "train.py", "exec"), known)
    made = known["made"]
    assert callable(made)
    file = io.BytesIO()
    torch.save({"net": made().state_dict(), "gain": 300.0}, file)
    return file.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its contents; what Python compiles is no one's."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }
