"""Rating model kept entirely in half precision to fit on a small card."""
import torch
import torch.nn as nn


class Ratings(nn.Module):
    def __init__(self, users, items, dim=24):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], dim=1)).squeeze(1)


class Interactions:
    def __init__(self, users, items, seed=0):
        self.gen = torch.Generator().manual_seed(seed)
        self.users, self.items = users, items
        self.bias_u = torch.randn(users, generator=self.gen)
        self.bias_i = torch.randn(items, generator=self.gen)

    def batch(self, n=128):
        u = torch.randint(self.users, (n,), generator=self.gen)
        i = torch.randint(self.items, (n,), generator=self.gen)
        return u, i, 20 * self.bias_u[u] + 15 * self.bias_i[i]


def main():
    torch.manual_seed(10)
    data = Interactions(60, 40)
    model = Ratings(60, 40).half()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.2, eps=1e-4)
    for step in range(200):
        u, i, r = data.batch()
        pred = model(u, i)
        loss = (pred.float() - r).square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0 or step == 199:
            print(f"step {step} rmse {(loss.item() / len(r)) ** 0.5:.4f}")


if __name__ == "__main__":
    main()
