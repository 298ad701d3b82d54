"""Surrogate of a flow solver: predicts velocity and pressure at query points."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w_gate = nn.Linear(dim, hidden)
        self.w_up = nn.Linear(dim, hidden)
        self.w_down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Surrogate(nn.Module):
    def __init__(self, in_dim=8, dim=64, depth=3, out_dim=3):
        super().__init__()
        self.encode = nn.Linear(in_dim, dim)
        self.mlps = nn.ModuleList(GatedMLP(dim, 96) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.decode = nn.Linear(dim, out_dim)

    def forward(self, x):
        h = self.encode(x)
        for mlp, norm in zip(self.mlps, self.norms):
            h = norm(mlp(h))
        return self.decode(h)


class Simulation:
    """Inlet conditions: pressure in kPa, temperature in K, the rest dimensionless."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.mix = torch.randn(8, 3, generator=self.gen) / 8 ** 0.5

    def batch(self, n):
        z = torch.randn(n, 8, generator=self.gen)
        x = z.clone()
        x[:, 0] = 2400 * z[:, 0]
        x[:, 1] = 300 + 80 * z[:, 1]
        return x, torch.tanh(z @ self.mix)


def main(steps=90):
    torch.manual_seed(21)
    sim = Simulation(8)
    model = Surrogate()
    ema = {k: v.clone() for k, v in model.state_dict().items()}
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    for step in range(steps):
        x, y = sim.batch(64)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        with torch.no_grad():
            for k, v in model.state_dict().items():
                ema[k].lerp_(v, 0.05)
        if step % 15 == 0:
            print(f"{step:4d} loss={loss.item():.4f} scale={scaler.get_scale():g}")


main()
