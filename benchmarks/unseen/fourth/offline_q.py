"""Offline Q-learning on a corridor with slippery floor; slow-moving target network."""
import argparse
import copy

import torch
from torch import nn


class Corridor:
    """N cells, two moves, reward at the right end. Slips reverse the move."""

    def __init__(self, n=12, slip=0.1, gamma=0.9):
        self.n, self.slip, self.gamma = n, slip, gamma

    def features(self, s):
        grid = torch.arange(self.n, dtype=torch.float32)
        return torch.exp(-0.5 * (s[:, None].float() - grid) ** 2)

    def step(self, s, a, g):
        slip = torch.rand(s.shape, generator=g) < self.slip
        move = (2 * a - 1) * torch.where(slip, -1, 1)
        nxt = (s + move).clamp(0, self.n - 1)
        return nxt, (nxt == self.n - 1).float()

    def optimal(self):
        q = torch.zeros(self.n, 2)
        s = torch.arange(self.n)
        up, down = (s + 1).clamp(max=self.n - 1), (s - 1).clamp(min=0)
        r = (s == self.n - 1).float()
        for _ in range(300):
            v = q.max(-1)[0]
            right, left = r[up] + self.gamma * v[up], r[down] + self.gamma * v[down]
            q = torch.stack([(1 - self.slip) * left + self.slip * right,
                             (1 - self.slip) * right + self.slip * left], -1)
        return q


class Replay:
    def __init__(self, env, size, g):
        self.g = g
        self.s = torch.randint(env.n, (size,), generator=g)
        self.a = torch.randint(2, (size,), generator=g)
        self.nxt, self.r = env.step(self.s, self.a, g)

    def sample(self, batch):
        i = torch.randint(len(self.s), (batch,), generator=self.g)
        return self.s[i], self.a[i], self.r[i], self.nxt[i]


class QNet(nn.Module):
    def __init__(self, n_in, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Linear(width, 1)
        self.adv = nn.Linear(width, 2)

    def forward(self, x):
        h = self.body(x)
        adv = self.adv(h)
        return self.value(h) + adv - adv.mean(-1, keepdim=True)


class SlowCopy:
    def __init__(self, net, tau, dtype):
        self.net = copy.deepcopy(net).to(dtype).requires_grad_(False)
        self.tau, self.dtype = tau, dtype

    @torch.no_grad()
    def track(self, net):
        for t, p in zip(self.net.parameters(), net.parameters()):
            t.lerp_(p.to(self.dtype), self.tau)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x.to(self.dtype)).float()


class Agent:
    def __init__(self, env, args):
        self.env, self.args = env, args
        self.online = QNet(env.n)
        self.target = SlowCopy(self.online, args.tau, torch.bfloat16 if args.amp else torch.float32)
        self.opt = torch.optim.Adam(self.online.parameters(), lr=args.lr)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.amp)

    def bootstrap(self, r, nxt):
        x = self.env.features(nxt)
        with torch.no_grad(), self.amp():
            best = self.online(x).float().argmax(-1, keepdim=True)
        return r + self.env.gamma * self.target(x).gather(1, best).squeeze(1)

    def update(self, batch):
        s, a, r, nxt = batch
        goal = self.bootstrap(r, nxt)
        with self.amp():
            q = self.online(self.env.features(s)).gather(1, a[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q.float(), goal)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 5.0)
        self.opt.step()
        self.target.track(self.online)
        return loss.item()

    @torch.no_grad()
    def value_error(self, q_star):
        with self.amp():
            q = self.online(self.env.features(torch.arange(self.env.n)))
        return (q.float() - q_star).abs().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=1800)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--tau", type=float, default=0.01)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=2)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = Corridor()
    g = torch.Generator().manual_seed(args.seed)
    replay, agent, q_star = Replay(env, 4000, g), Agent(env, args), env.optimal()
    total = 0.0
    for i in range(args.steps):
        total += agent.update(replay.sample(args.batch))
        if (i + 1) % 200 == 0:
            print(f"update {i + 1:5d}  loss {total / 200:.5f}  value error {agent.value_error(q_star):.3f}"
                  f"  (mean value {q_star.mean():.2f})", flush=True)
            total = 0.0


if __name__ == "__main__":
    main()
