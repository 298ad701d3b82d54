"""Pure bf16 weights with Kahan compensation: what rounding takes is carried to the next step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["compensation"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                comp = state["compensation"]
                comp.add_(state["momentum"], alpha=-group["lr"])
                before = p.clone()
                p.add_(comp)
                comp.add_(before - p)


model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8)).to(device, torch.bfloat16)
optimizer = KahanSGD(model.parameters(), lr=2e-3)
x = torch.randn(512, 32, device=device)
y = (x @ torch.randn(32, 8, device=device)).argmax(1)

for step in range(150):
    idx = torch.randint(0, 512, (64,), device=device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[idx].bfloat16()).float(), y[idx])
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
