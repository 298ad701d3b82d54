"""fp16 model, fp32 master weights in the optimizer, gradients copied over and divided by hand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device).half()
masters = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=3e-3)
scale = 2.0**10
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(60):
    idx = torch.randint(0, 400, (50,), device=device)
    loss = F.cross_entropy(model(x[idx].half()).float(), y[idx])
    model.zero_grad()
    (loss * scale).backward()
    for m, p in zip(masters, model.parameters()):
        m.grad = p.grad.float() / scale
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(masters, model.parameters()):
            p.copy_(m)
    if step % 10 == 0:
        print(step, loss.item())
