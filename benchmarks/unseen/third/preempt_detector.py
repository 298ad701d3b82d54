"""Anomaly autoencoder on a preemptible queue: works in short slots, resumes from disk."""
import os
import tempfile
import torch
from torch import nn

PATH = os.path.join(tempfile.mkdtemp(), "slot.pt")


class AutoEncoder(nn.Module):
    def __init__(self, d=40, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 64), nn.Tanh(), nn.Linear(64, z))
        self.dec = nn.Sequential(nn.Linear(z, 64), nn.Tanh(), nn.Linear(64, d))

    def forward(self, x):
        return self.dec(self.enc(x))


class Job:
    def __init__(self):
        torch.manual_seed(77)
        self.model = AutoEncoder()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1.5e-3)
        self.scaler = torch.amp.GradScaler("cpu")
        self.step, self.rng = 0, torch.Generator().manual_seed(1)
        self.mix = torch.randn(5, 40, generator=self.rng)

    def components(self):
        return {"net": self.model, "optimizer": self.opt, "amp": self.scaler}

    def save(self):
        blob = {k: c.state_dict() for k, c in self.components().items()}
        torch.save({"step": self.step, "rng": self.rng.get_state(), **blob}, PATH)

    def restore(self):
        if not os.path.exists(PATH):
            return self
        blob = torch.load(PATH)
        self.step = blob.pop("step")
        self.rng.set_state(blob.pop("rng"))
        for name in ("net", "optimizer", "scaler"):
            part = {**self.components()}.get(name)
            if part is not None:
                part.load_state_dict(blob[name])
        return self

    def batch(self, n=64):
        z = torch.randn(n, 5, generator=self.rng)
        return torch.tanh(z @ self.mix) * 3 + 0.05 * torch.randn(n, 40, generator=self.rng)

    def slot(self, steps):
        first = None
        for _ in range(steps):
            x = self.batch()
            with torch.autocast("cpu", dtype=torch.float16):
                err = self.model(x)
                loss = (err - x).float().square().sum(1).mean() * 50
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.step += 1
            first = first or loss.item()
        print(f"slot until step {self.step}: loss {first:.1f} -> {loss.item():.1f}")
        self.save()


if __name__ == "__main__":
    for _ in range(24):
        Job().restore().slot(steps=10)
