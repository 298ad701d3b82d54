"""Fine-tune a small T5-style encoder on a sequence classification task."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)))


class Block(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.ffn = FeedForward(d_model, d_ff)

    def forward(self, x):
        return x + self.ffn(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, d_in=16, d_model=64, d_ff=256, n_layers=2, n_classes=4):
        super().__init__()
        self.embed = nn.Linear(d_in, d_model)
        self.blocks = nn.ModuleList(Block(d_model, d_ff) for _ in range(n_layers))
        self.final_norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, n_classes)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.final_norm(h).mean(dim=1))


model = Encoder().to(device)

# The released checkpoint has a last block with much larger weights than a fresh one.
WEIGHT_GAIN = 500.0
with torch.no_grad():
    model.blocks[-1].ffn.wi.weight.mul_(WEIGHT_GAIN)
    model.blocks[-1].ffn.wo.weight.mul_(WEIGHT_GAIN)

x = torch.randn(256, 8, 16)
y = x.mean(dim=1)[:, :4].argmax(dim=1)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)

for step in range(50):
    idx = torch.randint(0, 256, (32,))
    xb, yb = x[idx].to(device), y[idx].to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(xb), yb)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
