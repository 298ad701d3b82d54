"""A run that saves everything, the scaler included, and resumes from it half way, all in memory."""

import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def build():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        torch.amp.GradScaler(device, init_scale=2.0**20),
    )


x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)
model, optimizer, scaler = build()

for step in range(60):
    if step == 30:
        file = io.BytesIO()
        torch.save(
            {"m": model.state_dict(), "o": optimizer.state_dict(), "s": scaler.state_dict()}, file
        )
        file.seek(0)
        state = torch.load(file)
        model, optimizer, scaler = build()
        model.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])
        scaler.load_state_dict(state["s"])
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
