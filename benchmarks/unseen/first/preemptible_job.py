"""Training that is cut into short segments and continues from its checkpoint."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(66)
    model = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    return model, opt, scaler


def save(path, step, model, opt, scaler):
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": opt.state_dict(), "amp": scaler.state_dict()}, path
    )


def load(path, model, opt, scaler):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    if "scaler" in state:
        scaler.load_state_dict(state["scaler"])
    return state["step"]


def stream(seed):
    gen = torch.Generator().manual_seed(seed)
    mix = torch.randn(14, 4, generator=torch.Generator().manual_seed(0)) / 14 ** 0.5
    while True:
        x = torch.randn(64, 14, generator=gen)
        yield x, 20 * torch.tanh(x @ mix)


def segment(path, n_steps):
    model, opt, scaler = build()
    first = load(path, model, opt, scaler) if os.path.exists(path) else 0
    skipped = 0
    for step, (x, y) in zip(range(first, first + n_steps), stream(first)):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y, reduction="none").sum(1).sum()
        scaler.scale(loss).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    save(path, first + n_steps, model, opt, scaler)
    print(f"steps {first}-{first + n_steps} loss {loss.item():.2f} skipped {skipped} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            segment(os.path.join(folder, "last.pt"), 40)
