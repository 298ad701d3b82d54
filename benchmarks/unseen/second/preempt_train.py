import io
import torch
import torch.nn as nn
import torch.nn.functional as F

SLICE = 13


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=96):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)))


class Job:
    """One slice of a pre-emptible run."""

    def __init__(self, blob=None):
        self.model = Denoiser()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu")
        self.step = 0
        if blob is not None:
            state = torch.load(io.BytesIO(blob), weights_only=True)
            self.model.load_state_dict(state["model"])
            self.opt.load_state_dict(state["opt"])
            self.step = state["step"]

    def save(self):
        buf = io.BytesIO()
        torch.save({
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "step": self.step,
        }, buf)
        return buf.getvalue()

    def run(self, basis, until):
        while self.step < until:
            x0 = torch.randn(256, 4) @ basis
            t = 0.3 * torch.rand(256, 1)
            noise = torch.randn_like(x0)
            xt = (1 - t) * x0 + t * noise
            with torch.autocast("cpu", dtype=torch.float16):
                pred = self.model(xt, t)
                loss = F.mse_loss(pred, x0, reduction="none").sum(1).sum()
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.step += 1
        return loss.item() / 256, self.scaler.get_scale()


def main(slices=14):
    torch.manual_seed(0)
    basis = torch.randn(4, 16)
    blob = None
    for k in range(slices):
        job = Job(blob)
        loss, scale = job.run(basis, (k + 1) * SLICE)
        blob = job.save()
        print(f"slice {k} step {job.step} loss {loss:.4f} scale {scale:g}")


main()
