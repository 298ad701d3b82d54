"""Warm-up schedule that only advances when the optimizer really stepped."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(303)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Autoencoder(nn.Module):
    def __init__(self, n=40, code=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n, 64), nn.Tanh(), nn.Linear(64, code))
        self.dec = nn.Sequential(nn.Linear(code, 64), nn.Tanh(), nn.Linear(64, n))

    def forward(self, x):
        return self.dec(self.enc(x))


model = Autoencoder().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 30))
scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 26)
basis = torch.randn(6, 40, device=device)
losses = []
for step in range(130):
    x = torch.randn(64, 6, device=device) @ basis
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.mse_loss(model(x), x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= scale:
        warmup.step()
    losses.append(loss.item())
    if step % 25 == 24:
        print(f"{step + 1} mean loss {sum(losses[-25:]) / 25:.4f} lr {warmup.get_last_lr()[0]:.5f} scale {scaler.get_scale():g}")
