"""Neural ODE on spirals: RK4 with checkpointed segments, hand-rolled fp16 loop with a constant multiplier."""
import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Swish(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class Dynamics(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)
        nn.init.zeros_(self.c.weight)
        nn.init.zeros_(self.c.bias)

    def forward(self, y):
        h = Swish.apply(self.a(y))
        h = h + Swish.apply(self.b(h))
        return self.c(h)


class Solver(nn.Module):
    def __init__(self, field, dt=0.15):
        super().__init__()
        self.field, self.dt = field, dt

    def step(self, y):
        dt = self.dt
        k1 = self.field(y)
        k2 = self.field(y + dt / 2 * k1)
        k3 = self.field(y + dt / 2 * k2)
        k4 = self.field(y + dt * k3)
        return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def segment(self, y):
        return self.step(self.step(y))

    def forward(self, y, segments):
        path = []
        for _ in range(segments):
            y = checkpoint(self.segment, y, use_reentrant=False)
            path.append(y)
        return torch.stack(path, 1)


class Spirals:
    def __init__(self, dt, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.flow = torch.linalg.matrix_exp(torch.tensor([[-0.15, -1.2], [1.2, -0.15]]) * 2 * dt)

    def batch(self, n, segments):
        y = 1.5 * torch.randn(n, 2, generator=self.g)
        path = [y]
        for _ in range(segments):
            path.append(path[-1] @ self.flow.T)
        return y, torch.stack(path[1:], 1)


class HalfLoop:
    """Multiplies the loss, divides the gradients, drops a step whose gradients are not finite."""

    def __init__(self, params, opt, factor, clip):
        self.params, self.opt, self.factor, self.clip = list(params), opt, factor, clip
        self.dropped = 0

    def __call__(self, loss):
        self.opt.zero_grad(set_to_none=True)
        (loss * self.factor).backward()
        grads = [p.grad for p in self.params if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(self.params, self.clip * self.factor)
        torch._foreach_mul_(grads, 1.0 / self.factor)
        if torch.isfinite(norm):
            self.opt.step()
        else:
            self.dropped += 1


def fit(args):
    solver = Solver(Dynamics())
    data = Spirals(solver.dt, args.seed)
    opt = torch.optim.SGD(solver.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    loop = HalfLoop(solver.parameters(), opt, 1024.0 if args.fp16 else 1.0, args.clip)
    total = 0.0
    for i in range(args.steps):
        segments = 1 if i < args.steps // 3 else 2
        y, path = data.batch(args.batch, segments)
        with torch.autocast("cpu", dtype=torch.float16, enabled=args.fp16):
            pred = solver(y, segments)
        loss = nn.functional.mse_loss(pred.float(), path) + 0.2 * (pred.float() - path).abs().mean()
        loop(loss)
        sched.step()
        total += loss.item()
        if (i + 1) % 20 == 0:
            print(f"step {i + 1:4d}  loss {total / 20:.5f}  dropped {loop.dropped}", flush=True)
            total = 0.0


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=180)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=9)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(1)
    fit(a)
