"""PPO on a small contextual task: several epochs a rollout, clipped ratios, entropy bonus."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h), self.v(h).squeeze(-1)


net = ActorCritic().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-5)
scaler = torch.amp.GradScaler(device)
true = torch.randn(10, 4, device=device)

for rollout in range(8):
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        s = torch.randn(256, 10, device=device)
        logits, v = net(s)
    dist = torch.distributions.Categorical(logits=logits.float())
    a = dist.sample()
    old = dist.log_prob(a)
    ret = (s @ true).gather(1, a[:, None]).squeeze(1)
    adv = ret - v.float()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for epoch in range(2):
        for idx in torch.randperm(256, device=device).split(64):
            with torch.autocast(device, dtype=torch.float16):
                logits, v = net(s[idx])
            dist = torch.distributions.Categorical(logits=logits.float())
            ratio = (dist.log_prob(a[idx]) - old[idx]).exp()
            policy = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
            value = F.mse_loss(v.float(), ret[idx])
            loss = policy + 0.5 * value - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    print(rollout, ret.mean().item(), loss.item())
