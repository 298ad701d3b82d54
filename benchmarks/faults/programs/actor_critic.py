"""Advantage actor-critic on a contextual bandit with delayed reward; two networks, two optimizers."""
import torch
from torch import nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, obs, actions, width=32):
        super().__init__()
        self.fc1 = nn.Linear(obs, width)
        self.fc2 = nn.Linear(width, actions)

    def forward(self, state):
        h = torch.tanh(self.fc1(state))
        return self.fc2(h)


class Critic(nn.Module):
    def __init__(self, obs, width=32):
        super().__init__()
        self.fc1 = nn.Linear(obs, width)
        self.fc2 = nn.Linear(width, 1)

    def forward(self, state):
        h = torch.relu(self.fc1(state))
        return self.fc2(h).squeeze(-1)


class Bandit:
    def __init__(self, obs=6, actions=4, seed=41):
        self.gen = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(obs, actions, generator=self.gen)
        self.obs = obs

    def states(self, n):
        return torch.randn(n, self.obs, generator=self.gen)

    def reward(self, state, action):
        best = (state @ self.weights).softmax(-1)
        return best.gather(1, action[:, None]).squeeze(1)

    def regret(self, state, logits):
        value = (state @ self.weights).softmax(-1)
        return (value.max(-1).values - (logits.float().softmax(-1) * value).sum(-1)).mean()

    def exam(self, state, logits, predicted):
        """Regret of the policy plus the critic's error in the value of that policy."""
        value = (state @ self.weights).softmax(-1)
        expected = (logits.float().softmax(-1) * value).sum(-1)
        return self.regret(state, logits) + (predicted.float() - expected).pow(2).mean()


def main(updates=70, batch=64, entropy_bonus=0.01):
    torch.set_num_threads(1)
    torch.manual_seed(41)
    env = Bandit()
    actor = Policy(6, 4)
    critic = Critic(6)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-2)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
    actor_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    critic_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    exam = env.states(256)
    print(f"start loss {env.exam(exam, actor(exam), critic(exam)).item():.4f}")

    for update in range(updates):
        state = env.states(batch)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = actor(state)
            value = critic(state)
        logp = F.log_softmax(logits.float(), dim=-1)
        action = torch.multinomial(logp.detach().exp(), 1, generator=env.gen).squeeze(1)
        reward = env.reward(state, action)
        advantage = reward - value.detach().float()
        chosen = logp.gather(1, action[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        policy_loss = -(advantage * chosen).mean() - entropy_bonus * entropy
        value_loss = F.mse_loss(value.float(), reward)

        actor_opt.zero_grad()
        actor_scaler.scale(policy_loss).backward()
        actor_scaler.step(actor_opt)
        actor_scaler.update()

        critic_opt.zero_grad()
        critic_scaler.scale(value_loss).backward()
        critic_scaler.step(critic_opt)
        critic_scaler.update()
        if update % 20 == 0:
            print(f"update {update:3d} reward {reward.mean().item():.3f} value mse {value_loss.item():.4f}")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        print(f"final loss {env.exam(exam, actor(exam), critic(exam)).item():.4f}")


if __name__ == "__main__":
    main()
