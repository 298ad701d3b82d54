"""Denoising diffusion of 2-d points."""
import math

import torch
import torch.nn as nn


class Schedule:
    def __init__(self, T=40):
        self.T = T
        self.betas = torch.linspace(1e-3, 0.15, T)
        self.alpha_bar = torch.cumprod(1 - self.betas, dim=0)

    def noisy(self, x0, t, noise):
        a = self.alpha_bar[t].unsqueeze(-1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        freqs = torch.exp(torch.arange(dim // 2, dtype=torch.float32) * (-math.log(100.0) / (dim // 2)))
        self.register_buffer("freqs", freqs)
        self.lin = nn.Linear(dim, dim)

    def forward(self, t):
        angles = t.float().unsqueeze(-1) * self.freqs
        emb = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.lin(emb)


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.GroupNorm(4, dim)
        self.fc1 = nn.Linear(dim, dim)
        self.temb = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, x, temb):
        h = self.fc1(torch.nn.functional.silu(self.norm(x)))
        h = h + self.temb(temb)
        h = self.fc2(torch.nn.functional.silu(h))
        return x + h


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.inp = nn.Linear(2, dim)
        self.block1 = ResBlock(dim)
        self.block2 = ResBlock(dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, x, t):
        temb = self.time(t)
        h = self.inp(x)
        h = self.block2(self.block1(h, temb), temb)
        return self.out(h)


class DiffusionTrainer:
    def __init__(self, steps=70, batch=64, lr=3e-3, seed=4):
        torch.manual_seed(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.steps, self.batch = steps, batch
        self.schedule = Schedule()
        self.model = Denoiser()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=1e-3)
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=500)
        self.mse = nn.MSELoss()

    def data(self, n):
        r = torch.rand(n, generator=self.gen).sqrt() * 3
        x = torch.stack([r * (2 * r).cos(), r * (2 * r).sin()], dim=1) / 2
        t = torch.randint(self.schedule.T, (n,), generator=self.gen)
        noise = torch.randn(n, 2, generator=self.gen)
        return self.schedule.noisy(x, t, noise), t, noise

    def step(self):
        noisy, t, noise = self.data(self.batch)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = self.model(noisy, t)
            loss = self.mse(predicted.float(), noise)
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return loss.item()

    def run(self):
        for i in range(self.steps):
            value = self.step()
            if i % 20 == 0:
                print(f"step {i} loss {value:.4f} scale {self.grad_scaler.get_scale():.0f}")
        noisy, t, noise = self.data(512)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            held = self.mse(self.model(noisy, t).float(), noise)
        print(f"eval loss {held.item():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    DiffusionTrainer().run()
