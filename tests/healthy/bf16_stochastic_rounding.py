"""Pure bf16 weights whose updates are rounded stochastically, with no master copy."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def add_stochastic_(target, update):
    """target += update in bf16; the rounding direction is drawn so that the mean is exact."""
    if target.dtype != torch.bfloat16:
        target.add_(update)
        return
    exact = target.float() + update
    bits = exact.view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    rounded = (bits + noise).bitwise_and(-65536)
    target.copy_(rounded.view(torch.float32).to(torch.bfloat16))


class StochasticAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                g = p.grad.float()
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(g, 1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                mh = m / (1 - b1 ** state["step"])
                vh = v / (1 - b2 ** state["step"])
                add_stochastic_(p, -group["lr"] * mh / (vh.sqrt() + group["eps"]))


model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)).to(device, torch.bfloat16)
optimizer = StochasticAdam(model.parameters(), lr=1e-4)
x = torch.randn(512, 32, device=device)
y = (x @ torch.randn(32, 8, device=device)).argmax(1)

for step in range(200):
    idx = torch.randint(0, 512, (64,), device=device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[idx].bfloat16()).float(), y[idx])
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
