"""Actor-critic on a random walk with goal; separate optimizers, brisk scale growth."""
import torch
from torch import nn
from torch.distributions import Categorical

N, HORIZON, ENVS = 9, 16, 32


class Walk:
    def reset(self):
        self.pos = torch.full((ENVS,), N // 2)
        return self.obs()

    def obs(self):
        return nn.functional.one_hot(self.pos, N).float()

    def step(self, a):
        self.pos = (self.pos + a * 2 - 1).clamp(0, N - 1)
        return self.obs(), (self.pos == N - 1).float() - 0.02


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(N, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(N, 32), nn.ReLU(), nn.Linear(32, 1))


def rollout(env, agent):
    o, S, A, R = env.reset(), [], [], []
    with torch.no_grad():
        for _ in range(HORIZON):
            a = Categorical(logits=agent.actor(o)).sample()
            S.append(o)
            A.append(a)
            o, r = env.step(a)
            R.append(r)
    ret, out = torch.zeros(ENVS), []
    for r in reversed(R):
        ret = r + 0.95 * ret
        out.append(ret)
    return torch.cat(S), torch.cat(A), torch.cat(out[::-1]), torch.stack(R).sum(0).mean()


def main():
    torch.manual_seed(99)
    agent, env = Agent(), Walk()
    pi = torch.optim.Adam(agent.actor.parameters(), lr=3e-3)
    vf = torch.optim.Adam(agent.critic.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=20)
    for it in range(200):
        s, a, ret, score = rollout(env, agent)
        with torch.autocast("cpu", dtype=torch.float16):
            v = agent.critic(s).squeeze(-1).float()
            dist = Categorical(logits=agent.actor(s).float())
        adv = ret - v.detach()
        loss_pi = -(dist.log_prob(a) * adv).mean() - 0.01 * dist.entropy().mean()
        loss_v = nn.functional.mse_loss(v, ret)
        pi.zero_grad()
        vf.zero_grad()
        scaler.scale(loss_pi).backward()
        scaler.scale(loss_v).backward()
        scaler.unscale_(pi)
        nn.utils.clip_grad_norm_(agent.actor.parameters(), 0.5)
        scaler.step(pi)
        scaler.step(vf)
        scaler.update()
        if it % 20 == 0 or it == 199:
            print(f"{it:3d} reward {score:.3f} actor {loss_pi.item():+.4f} critic {loss_v.item():.4f} scale {scaler.get_scale():.0f}")


main()
