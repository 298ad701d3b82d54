import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, obs=6, actions=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, actions))

    def forward(self, x):
        return torch.distributions.Categorical(logits=self.net(x).float())


class Value(nn.Module):
    def __init__(self, obs=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1).float()


class Market:
    """One-step decisions; the reward is the profit in cents."""

    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(6, 4, generator=self.g)

    def observe(self, n):
        return torch.randn(n, 6, generator=self.g)

    def reward(self, s, a):
        gain = (s @ self.w).gather(1, a.unsqueeze(1)).squeeze(1)
        return 1e6 * (gain + 0.2 * torch.randn(len(a), generator=self.g))


def main(steps=400):
    torch.manual_seed(0)
    env, actor, critic = Market(), Policy(), Value()
    opt_a = torch.optim.SGD(actor.parameters(), lr=0.01, momentum=0.9)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for it in range(steps):
        s = env.observe(256)
        with torch.autocast("cpu", dtype=torch.float16):
            pi, v = actor(s), critic(s)
        a = pi.sample()
        r = env.reward(s, a)
        adv = r - 1e6 * v.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        actor_loss = -(pi.log_prob(a) * adv).mean() - 0.01 * pi.entropy().mean()
        critic_loss = F.mse_loss(1e6 * v, r)
        opt_a.zero_grad()
        opt_c.zero_grad()
        scaler.scale(actor_loss).backward()
        scaler.scale(critic_loss).backward()
        scaler.step(opt_a)
        scaler.step(opt_c)
        scaler.update()
        if it % 50 == 49:
            print(f"it {it + 1} regret {(env.reward(s, (s @ env.w).argmax(1)) - r).mean().item() / 1e6:.3f} critic {critic_loss.item():.3e} scale {scaler.get_scale():.3g}")


if __name__ == "__main__":
    main()
