"""GAN on a ring of Gaussians, one scaler per player, gradient regularisation on real data."""
import torch
from torch import nn
import torch.nn.functional as F


def mlp(i, o, act):
    return nn.Sequential(nn.Linear(i, 64), act, nn.Linear(64, 64), act, nn.Linear(64, o))


class Game:
    def __init__(self, z=4):
        self.z = z
        self.G, self.D = mlp(z, 2, nn.ReLU()), mlp(2, 1, nn.LeakyReLU(0.2))
        self.og = torch.optim.Adam(self.G.parameters(), lr=2e-3, betas=(0.0, 0.9))
        self.od = torch.optim.Adam(self.D.parameters(), lr=2e-3, betas=(0.0, 0.9))
        self.sg, self.sd = (torch.amp.GradScaler("cpu", init_scale=2.0 ** 14) for _ in range(2))

    def real(self, n=64):
        a = torch.randint(0, 8, (n,)) * torch.pi / 4
        return torch.stack([a.cos(), a.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16)

    def r1(self, x):
        x = x.clone().requires_grad_()
        with self.amp():
            out = self.D(x).float().sum()
        g, = torch.autograd.grad(self.sd.scale(out), x, create_graph=True)
        g = g / self.sd.get_scale()
        return g.square().sum(1).mean()

    def play_d(self):
        x = self.real()
        with self.amp(), torch.no_grad():
            fake = self.G(torch.randn(64, self.z))
        with self.amp():
            loss = F.softplus(-self.D(x).float()).mean() + F.softplus(self.D(fake).float()).mean()
        total = loss + 0.1 * self.r1(x)
        self.od.zero_grad()
        self.sd.scale(total).backward()
        self.sd.step(self.od)
        self.sd.update()
        return loss.item()

    def play_g(self):
        for p in self.D.parameters():
            p.requires_grad_(False)
        with self.amp():
            loss = F.softplus(-self.D(self.G(torch.randn(64, self.z))).float()).mean()
        self.og.zero_grad()
        self.sg.scale(loss).backward()
        self.sg.step(self.og)
        self.sg.update()
        for p in self.D.parameters():
            p.requires_grad_(True)
        return loss.item()

    @torch.no_grad()
    def distance(self):
        s = self.G(torch.randn(512, self.z))
        return (s.norm(dim=1) - 2).abs().mean().item()


if __name__ == "__main__":
    torch.manual_seed(8)
    game = Game()
    for t in range(360):
        d, g = game.play_d(), game.play_g()
        if t % 30 == 0 or t == 359:
            print(f"round {t:3d} D {d:.3f} G {g:.3f} off-ring {game.distance():.3f}")
