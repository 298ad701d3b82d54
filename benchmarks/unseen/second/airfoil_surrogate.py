import torch
import torch.nn as nn
import torch.nn.functional as F

REF_PRESSURE = 101325.0


class Surrogate(nn.Module):
    def __init__(self, n_params=4, n_points=40, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_params, width), nn.Tanh(),
            nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, n_points))

    def forward(self, p):
        return REF_PRESSURE * self.net(p).float()


def panel_solver(params, n_points=40):
    s = torch.linspace(0, 3.1416, n_points)
    aoa, camber, thick, mach = params.unbind(1)
    cp = 1 - (1 + thick).unsqueeze(1) * torch.sin(s + 0.3 * aoa.unsqueeze(1)) ** 2
    cp = cp + 0.4 * camber.unsqueeze(1) * torch.cos(2 * s)
    q = 0.35 * (1 + 0.3 * mach).unsqueeze(1)
    return REF_PRESSURE * (1 + q * cp)


def relative_error(model, g):
    with torch.no_grad():
        p = torch.rand(256, 4, generator=g) * 2 - 1
        return ((model(p) - panel_solver(p)).norm() / panel_solver(p).norm()).item()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    model = Surrogate()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(60):
        p = torch.rand(128, 4, generator=g) * 2 - 1
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(p)
        loss = F.mse_loss(pred, panel_solver(p), reduction="none").sum(1).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 9:
            print(f"step {step + 1:4d} loss {loss.item():.4e} rel.err {relative_error(model, g):.4f}")


if __name__ == "__main__":
    main()
