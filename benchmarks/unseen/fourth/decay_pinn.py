"""Physics-informed network for a damped oscillator: fit to measurements, then refine on the equation."""
import argparse

import torch
from torch import nn
from torch.func import functional_call, jvp

from _lean import LeanAdam


class Field(nn.Module):
    def __init__(self, width=48, depth=3, waves=6):
        super().__init__()
        self.register_buffer("freq", torch.linspace(0.5, 3.0, waves))
        self.inp = nn.Linear(2 * waves, width)
        self.mid = nn.ModuleList([nn.Linear(width, width) for _ in range(depth - 1)])
        self.out = nn.Linear(width, 2)

    def forward(self, t):
        a = t * self.freq
        h = torch.tanh(self.inp(torch.cat([torch.sin(a), torch.cos(a)], -1)))
        for layer in self.mid:
            h = h + torch.tanh(layer(h))
        return self.out(h)


class Oscillator:
    """x' = v, v' = -w^2 x - c v on [0, span]"""

    def __init__(self, omega=1.5, damp=0.3, span=5.0):
        self.omega, self.damp, self.span = omega, damp, span

    def exact(self, t):
        w = (self.omega ** 2 - self.damp ** 2 / 4) ** 0.5
        x = torch.exp(-self.damp * t / 2) * torch.cos(w * t)
        v = -torch.exp(-self.damp * t / 2) * (self.damp / 2 * torch.cos(w * t) + w * torch.sin(w * t))
        return torch.cat([x, v], -1)

    def residual(self, y, dy):
        x, v = y[:, :1], y[:, 1:]
        return torch.cat([dy[:, :1] - v, dy[:, 1:] + self.omega ** 2 * x + self.damp * v], -1)


class Solver:
    def __init__(self, args):
        self.args = args
        self.ode = Oscillator()
        self.net = Field()
        self.gen = torch.Generator().manual_seed(args.seed)
        self.t_data = self.ode.span * torch.rand(12, 1, generator=self.gen)
        self.y_data = self.ode.exact(self.t_data) + 0.1 * torch.randn(12, 2, generator=self.gen)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16, init_scale=2.0 ** 10)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16)

    def measured(self):
        with self.amp():
            pred = self.net(self.t_data)
        return nn.functional.mse_loss(pred.float(), self.y_data)

    def physics(self):
        t = self.ode.span * torch.rand(self.args.points, 1, generator=self.gen)
        params = dict(self.net.named_parameters())
        with self.amp():
            y, dy = jvp(lambda u: functional_call(self.net, params, (u,)), (t,), (torch.ones_like(t),))
        start = self.net(torch.zeros(1, 1)) - self.ode.exact(torch.zeros(1, 1))
        return self.ode.residual(y.float(), dy.float()).pow(2).mean() + start.pow(2).sum()

    @torch.no_grad()
    def error(self):
        t = torch.linspace(0, self.ode.span, 101)[:, None]
        with self.amp():
            return (self.net(t).float() - self.ode.exact(t)).pow(2).mean().sqrt().item()

    def descend(self, name, steps, opt, objective):
        sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.1 ** (1 / steps))
        total = 0.0
        for i in range(steps):
            loss = objective()
            opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.args.clip)
            self.scaler.step(opt)
            self.scaler.update()
            sched.step()
            total += loss.item()
            if (i + 1) % 50 == 0:
                print(f"{name} {i + 1:4d}  loss {total / 50:.5f}  rms error {self.error():.4f}", flush=True)
                total = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fit-steps", type=int, default=150)
    p.add_argument("--refine-steps", type=int, default=300)
    p.add_argument("--points", type=int, default=64)
    p.add_argument("--data-weight", type=float, default=1e-3)
    p.add_argument("--physics-weight", type=float, default=1e-2)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=6)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    s = Solver(args)
    s.descend("fit   ", args.fit_steps, torch.optim.Adam(s.net.parameters(), lr=args.lr), s.measured)
    opt = LeanAdam(s.net.parameters(), lr=args.lr / 2)
    s.descend("refine", args.refine_steps, opt,
              lambda: args.data_weight * s.measured() + args.physics_weight * s.physics())


if __name__ == "__main__":
    main()
