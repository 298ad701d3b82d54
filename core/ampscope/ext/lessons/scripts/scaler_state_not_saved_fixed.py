"""The checkpoint holds the scaler's state too."""

import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

mixing = torch.randn(20, 10)


def new_training():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, torch.amp.GradScaler(device)


def train(model, optimizer, scaler, steps):
    for step in range(steps):
        x = torch.randn(256, 20)
        y = 4.0 * torch.tanh(x @ mixing)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item() / 256:.4f}, scale {scaler.get_scale():g}")


model, optimizer, scaler = new_training()
train(model, optimizer, scaler, 40)
file = io.BytesIO()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(state | {"scaler": scaler.state_dict()}, file)

print("resumed")
file.seek(0)
saved = torch.load(file)
model, optimizer, scaler = new_training()
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scaler.load_state_dict(saved["scaler"])
train(model, optimizer, scaler, 40)
