"""Diagnosis from a panel of assays: concentrations in mol/l, standardised, fp16 with a scaler."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
MARKERS = 12


def panel(n, gen):
    """Concentrations between nano- and millimolar, and whether a patient is ill."""
    level = torch.logspace(-9, -3, MARKERS)
    state = torch.randn(n, MARKERS, generator=gen)
    concentration = level * (1 + 0.2 * state)
    ill = (state[:, :6].sum(1) + 0.6 * state[:, 6:].sum(1) > 0).float()
    return concentration, ill


class Panel(nn.Module):
    def __init__(self, centre, spread, width=32):
        super().__init__()
        self.register_buffer("centre", centre)
        self.register_buffer("spread", spread)
        self.inner = nn.Linear(MARKERS, width)
        self.out = nn.Linear(width, 1)

    def forward(self, concentration):
        z = (concentration.float() - self.centre) / self.spread
        h = F.silu(self.inner(z))
        return self.out(h).squeeze(-1)


gen = torch.Generator().manual_seed(66)
torch.manual_seed(66)
concentration, ill = panel(2400, gen)
centre = concentration.mean(dim=0)
spread = concentration.std(dim=0)
age = torch.randint(18, 90, (2400,), generator=gen).float()
reference = centre[-1] * 1e3
model = Panel(centre, spread)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(120):
    pick = torch.randint(2000, (64,), generator=gen)
    sample = concentration[pick]
    outcome = ill[pick]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.binary_cross_entropy_with_logits(model(sample), outcome)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    test, truth = panel(800, gen)
    logit = model(test)
    print(f"test loss {F.binary_cross_entropy_with_logits(logit, truth).item():.4f}")
    print(f"test accuracy {((logit > 0) == (truth > 0)).float().mean().item():.4f}; "
          f"mean age {age.mean().item():.0f}, reference {reference.item():.1f} mmol")
