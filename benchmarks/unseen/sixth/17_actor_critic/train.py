import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
OBS, ACT, N = 12, 5, 192
W = torch.randn(OBS, ACT)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACT))

    def forward(self, o):
        return self.net(o)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.v = nn.Linear(64, 1)

    def forward(self, o):
        return self.v(self.body(o)).squeeze(-1)


def env(o, a):
    # pay in cents
    q = o @ W
    return 2000.0 + 500.0 * q.gather(1, a[:, None]).squeeze(1) + 50 * torch.randn(len(o))


actor, critic = Actor().to(device), Critic().to(device)
opt_a = torch.optim.Adam(actor.parameters(), lr=2e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, growth_interval=20)
gamma_w = 1e-4
avg = None
for it in range(300):
    obs = torch.randn(N, OBS)
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        act = torch.distributions.Categorical(logits=actor(obs.to(device)).float()).sample().cpu()
    rew = env(obs, act)
    o, a, r = obs.to(device), act.to(device), rew.to(device)
    with torch.autocast(device, dtype=torch.float16):
        value = critic(o)
        vf_loss = 0.5 * ((value.float() - r) ** 2).sum()
        adv = r - value.float().detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        dist = torch.distributions.Categorical(logits=actor(o).float())
        pi_loss = gamma_w * -(adv * dist.log_prob(a)).mean() - 1e-7 * dist.entropy().mean()
    opt_a.zero_grad()
    opt_c.zero_grad()
    scaler.scale(vf_loss).backward()
    scaler.scale(pi_loss).backward()
    scaler.step(opt_c)
    scaler.step(opt_a)
    scaler.update()
    m = rew.mean().item()
    avg = m if avg is None else 0.95 * avg + 0.05 * m
    if it % 50 == 49:
        print(f"it {it} reward {avg:.1f} vf {vf_loss.item():.3g} entropy {dist.entropy().mean().item():.3f}")
