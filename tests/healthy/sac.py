"""SAC: two critics, an actor and a temperature, four optimizers and one scaler."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def mlp(i, o):
    return nn.Sequential(
        nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o)
    ).to(device)


actor, q1, q2 = mlp(8, 4), mlp(10, 1), mlp(10, 1)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
log_alpha = torch.zeros((), device=device, requires_grad=True)
opt_actor = torch.optim.Adam(actor.parameters(), lr=3e-4)
opt_critic = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=3e-4)
opt_alpha = torch.optim.Adam([log_alpha], lr=3e-4)
scaler = torch.amp.GradScaler(device)


def act(s):
    mean, log_std = actor(s).float().chunk(2, -1)
    dist = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    u = dist.rsample()
    a = u.tanh()
    logp = (dist.log_prob(u) - 2 * (0.6931 - u - F.softplus(-2 * u))).sum(-1, keepdim=True)
    return a, logp


for step in range(40):
    s, s2 = torch.randn(64, 8, device=device), torch.randn(64, 8, device=device)
    a = torch.rand(64, 2, device=device) * 2 - 1
    r = -(a - s[:, :2].tanh()).square().sum(-1, keepdim=True)
    with torch.autocast(device, dtype=torch.float16):
        with torch.no_grad():
            a2, logp2 = act(s2)
            q = torch.min(t1(torch.cat([s2, a2], 1)), t2(torch.cat([s2, a2], 1)))
            y = r + 0.9 * (q.float() - log_alpha.exp() * logp2)
        sa = torch.cat([s, a], 1)
        critic_loss = F.mse_loss(q1(sa).float(), y) + F.mse_loss(q2(sa).float(), y)
    opt_critic.zero_grad()
    scaler.scale(critic_loss).backward()
    scaler.step(opt_critic)
    with torch.autocast(device, dtype=torch.float16):
        a_new, logp = act(s)
        sa = torch.cat([s, a_new], 1)
        actor_loss = (log_alpha.exp().detach() * logp - torch.min(q1(sa), q2(sa)).float()).mean()
    opt_actor.zero_grad()
    scaler.scale(actor_loss).backward()
    scaler.step(opt_actor)
    alpha_loss = -(log_alpha * (logp.detach() - 2)).mean()
    opt_alpha.zero_grad()
    alpha_loss.backward()  # fp32 throughout: no scaler is needed
    opt_alpha.step()
    scaler.update()
    with torch.no_grad():
        for net, tgt in ((q1, t1), (q2, t2)):
            for p, t in zip(net.parameters(), tgt.parameters()):
                t.lerp_(p, 0.005)
    if step % 10 == 0:
        print(step, critic_loss.item(), actor_loss.item(), log_alpha.item())
