"""Second stage of a run: loads stage one (with its scaler) and goes on near its floor."""
import io
import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.a, self.b = nn.Linear(d, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).squeeze(-1)


class Stage:
    def __init__(self, lr, blob=None):
        self.net = Regressor()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=60)
        self.done = 0
        if blob is not None:
            ck = torch.load(io.BytesIO(blob))
            for k in ("net", "opt", "scaler"):
                getattr(self, k).load_state_dict(ck[k])
            self.done = ck["done"]
            for g in self.opt.param_groups:
                g["lr"] = lr

    def run(self, steps):
        log = []
        for _ in range(steps):
            x = torch.randn(64, 10)
            y = torch.sin(x @ W) + 0.3 * torch.randn(64)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.net(x), y)
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.done += 1
            log.append(loss.item())
            if self.done % 40 == 0:
                print(f"step {self.done} loss {sum(log) / len(log):.4f} scale {self.scaler.get_scale():.0f}")
                log.clear()
        return self

    def pack(self):
        f = io.BytesIO()
        torch.save({k: getattr(self, k).state_dict() for k in ("net", "opt", "scaler")} | {"done": self.done}, f)
        return f.getvalue()


if __name__ == "__main__":
    torch.manual_seed(83)
    W = torch.randn(10) * 0.4
    blob = Stage(lr=1e-2).run(200).pack()
    print("resuming")
    Stage(lr=1e-4, blob=blob).run(200)
