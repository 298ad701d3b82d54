"""Continuous control with an actor and a critic on undiscounted raw returns."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def net(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out))


class Env:
    """A vectorised tracking task: reward is highest when the action matches a hidden gain."""

    def __init__(self, n, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.n = n
        self.gain = torch.randn(8, 2, generator=self.gen) / 3

    def reset(self):
        return torch.randn(self.n, 8, generator=self.gen)

    def payout(self, state, action):
        return -(action - state @ self.gain).square().sum(1)


class Agent:
    def __init__(self):
        self.actor, self.critic = net(8, 2), net(8, 1)
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-3, eps=1e-12)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=5e-2)
        self.scaler = torch.amp.GradScaler("cpu")

    def update(self, env):
        state = env.reset()
        with torch.autocast("cpu", dtype=torch.float16):
            action = self.actor(state)
            value = self.critic(state).squeeze(1)
        reward = env.payout(state, action.float())
        returns = 2.0e4 * (reward.detach() + 2)
        critic_loss = F.mse_loss(value.float(), returns, reduction="sum")
        actor_loss = -1e-5 * reward.mean()
        self.opt_actor.zero_grad()
        self.opt_critic.zero_grad()
        self.scaler.scale(critic_loss).backward()
        self.scaler.scale(actor_loss).backward()
        self.scaler.step(self.opt_critic)
        self.scaler.step(self.opt_actor)
        self.scaler.update()
        return reward.mean().item(), critic_loss.item()


if __name__ == "__main__":
    torch.manual_seed(9)
    env, agent = Env(64, seed=4), Agent()
    for it in range(150):
        reward, critic = agent.update(env)
        if it % 25 == 24:
            print(f"iter {it + 1} reward {reward:.4f} critic {critic:.3g} scale {agent.scaler.get_scale():.3g}")
