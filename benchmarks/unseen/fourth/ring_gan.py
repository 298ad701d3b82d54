"""WGAN with gradient penalty on a ring of Gaussians, fp16 autocast, one scaler per player."""
import argparse

import torch
from torch import nn

from _gan import Critic, Generator, Ring, energy_distance


class Player:
    """A network with its optimizer and scaler."""

    def __init__(self, net, lr, fp16):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.9))
        self.scaler = torch.amp.GradScaler("cpu", enabled=fp16, init_scale=2.0 ** 12)

    def minimise(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.scaler.step(self.opt)
        self.scaler.update()


class Game:
    def __init__(self, args):
        self.args = args
        self.data = Ring(seed=args.seed)
        self.gen = Player(Generator(), args.lr, args.fp16)
        self.critic = Player(Critic(), 2 * args.lr, args.fp16)
        self.ema = None

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16)

    def smoothness(self, real, fake):
        mix = torch.rand(len(real), 1)
        x = (mix * real + (1 - mix) * fake).requires_grad_(True)
        with self.amp():
            out = self.critic.net(x)
        total = self.critic.scaler.scale(out.float().sum())
        slope, = torch.autograd.grad(total, x, create_graph=True)
        norm = (slope.float().pow(2).sum(-1) + 1e-12).sqrt()
        return (norm - 1).pow(2).mean()

    def critic_step(self):
        real = self.data.sample(self.args.batch)
        with torch.no_grad(), self.amp():
            fake = self.gen.net(self.args.batch)
        fake = fake.float()
        with self.amp():
            gap = self.critic.net(fake).float().mean() - self.critic.net(real).float().mean()
        drift = 1e-3 * gap.pow(2)
        self.critic.minimise(gap + drift + self.args.penalty * self.smoothness(real, fake))
        return -gap.item()

    def generator_step(self):
        with self.amp():
            loss = -self.critic.net(self.gen.net(self.args.batch)).float().mean()
        self.gen.minimise(loss)
        return loss.item()

    @torch.no_grad()
    def quality(self):
        with self.amp():
            fake = self.gen.net(512).float()
        return energy_distance(fake, self.data.sample(512))

    def play(self):
        wasserstein = g_loss = 0.0
        for i in range(self.args.rounds):
            inner = self.args.critic_first if i < 10 else self.args.critic_steps
            for _ in range(inner):
                w = self.critic_step()
            wasserstein += w
            g_loss += self.generator_step()
            if (i + 1) % self.args.log == 0:
                print(f"round {i + 1:4d}  critic loss {-wasserstein / self.args.log:.4f}  generator loss "
                      f"{g_loss / self.args.log:.4f}  energy distance {self.quality():.4f}", flush=True)
                wasserstein = g_loss = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=240)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--critic-steps", type=int, default=3)
    p.add_argument("--critic-first", type=int, default=6)
    p.add_argument("--penalty", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--log", type=int, default=20)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=8)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    Game(args).play()


if __name__ == "__main__":
    main()
