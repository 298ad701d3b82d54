"""Small GAN with a gradient penalty, two optimizers and one scaler."""
import torch
import torch.nn as nn


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, b))


class GAN:
    def __init__(self):
        self.G, self.D = mlp(4, 2), mlp(2, 1)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def penalty(self, real, fake):
        mix = torch.rand(len(real), 1)
        point = (mix * real + (1 - mix) * fake).requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.float16):
            score = self.D(point)
        grad, = torch.autograd.grad(self.scaler.scale(score.float().sum()), point, create_graph=True)
        grad = grad / self.scaler.get_scale()
        return ((grad.norm(dim=1) - 1) ** 2).mean()

    def critic_step(self, real):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            fake = self.G(torch.randn(len(real), 4)).float()
        self.opt_d.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.D(fake).float().mean() - self.D(real).float().mean()
        gp = self.penalty(real, fake)
        self.scaler.scale(loss + 10 * gp).backward()
        self.scaler.step(self.opt_d)
        self.scaler.update()
        return loss.item(), gp.item()

    def generator_step(self, n):
        self.opt_g.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = -self.D(self.G(torch.randn(n, 4))).float().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_g)
        self.scaler.update()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(58)
    gan = GAN()
    for step in range(150):
        real = torch.randn(48, 2) * torch.tensor([0.3, 0.1]) + torch.tensor([1.0, -0.5])
        d, gp = gan.critic_step(real)
        if step % 3 == 2:
            g = gan.generator_step(48)
        if step % 30 == 29:
            print(f"{step + 1} critic {d:.3f} gp {gp:.3f} gen {g:.3f} scale {gan.scaler.get_scale():g}")
