"""LoRA: a frozen half-precision base, fp32 adapters, B zero at the start."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class LoRALinear(nn.Module):
    def __init__(self, i, o, rank=4, alpha=8):
        super().__init__()
        self.base = nn.Linear(i, o).to(torch.bfloat16)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, i) / i**0.5)
        self.b = nn.Parameter(torch.zeros(o, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return (
            self.base(x.to(torch.bfloat16)) + F.linear(F.linear(x, self.a), self.b) * self.scaling
        )


model = nn.Sequential(
    LoRALinear(32, 64), nn.GELU(), LoRALinear(64, 64), nn.GELU(), LoRALinear(64, 10)
)
model = model.to(device)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-3)
x = torch.randn(400, 32, device=device)
y = (x @ torch.randn(32, 10, device=device)).argmax(1)

for step in range(60):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
