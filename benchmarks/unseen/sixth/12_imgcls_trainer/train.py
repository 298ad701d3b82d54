import os
import yaml
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from callbacks import EMA, GradClip, JsonLog
from trainer import Trainer

ROOT = os.path.dirname(os.path.abspath(__file__))


def build_model(k):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, k))


def build_data(n, k):
    protos = torch.randn(k, 1, 16, 16)
    y = torch.randint(0, k, (n,))
    return TensorDataset(protos[y] + 1.2 * torch.randn(n, 1, 16, 16), y)


def main():
    with open(os.path.join(ROOT, "exp.yaml")) as f:
        c = yaml.safe_load(f)
    torch.manual_seed(c["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(c["classes"])
    opt = torch.optim.SGD(model.parameters(), lr=c["lr"], momentum=0.9, weight_decay=1e-4)
    cbs = [GradClip(c["clip"]), EMA(), JsonLog(os.path.join(ROOT, "runs", "log.jsonl"))]
    dl = DataLoader(build_data(c["n"], c["classes"]), batch_size=c["bs"], shuffle=True, drop_last=True)
    Trainer(model, opt, device, c["amp"], cbs).fit(dl, c["epochs"])


if __name__ == "__main__":
    main()
