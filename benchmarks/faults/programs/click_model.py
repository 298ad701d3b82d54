"""Click-through prediction: embeddings of users and items, a history that may be empty, BCE."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
USERS, ITEMS, HISTORY = 40, 60, 6


class HistoryAttention(nn.Module):
    """Attends from the candidate item to the user's past items."""

    def __init__(self, dim):
        super().__init__()
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, dim)

    def forward(self, item, history, missing):
        q = self.wq(item).unsqueeze(1)
        k = self.wk(history)
        score = torch.bmm(q, k.transpose(1, 2)) / item.shape[-1] ** 0.5
        score = score.masked_fill(missing.unsqueeze(1), -1e4)
        weight = score.softmax(dim=-1)
        return torch.bmm(weight, history.to(weight.dtype)).squeeze(1)


class CTR(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.attend = HistoryAttention(dim)
        self.fc1 = nn.Linear(3 * dim, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, user, item, past, missing):
        u, i, h = self.user(user), self.item(item), self.item(past)
        taste = self.attend(i, h, missing)
        x = F.relu(self.fc1(torch.cat([u, i, taste.to(u.dtype)], dim=-1)))
        return self.fc2(x).squeeze(-1)


class Log:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.group_u = torch.randint(4, (USERS,), generator=self.g)
        self.group_i = torch.randint(4, (ITEMS,), generator=self.g)

    def batch(self, n):
        user = torch.randint(USERS, (n,), generator=self.g)
        item = torch.randint(ITEMS, (n,), generator=self.g)
        past = torch.randint(ITEMS, (n, HISTORY), generator=self.g)
        seen = torch.randint(0, HISTORY + 1, (n, 1), generator=self.g)
        missing = torch.arange(HISTORY)[None] >= seen
        p = torch.where(self.group_u[user] == self.group_i[item], 0.9, 0.1)
        return user, item, past, missing, torch.bernoulli(p, generator=self.g)


def fit(steps=72, lr=2e-2):
    log = Log(71)
    torch.manual_seed(71)
    ctr = CTR()
    opt = torch.optim.Adam(ctr.parameters(), lr=lr, eps=1e-7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    for step in range(1, steps + 1):
        user, item, past, missing, click = log.batch(64)
        with torch.autocast("cpu", dtype=torch.float16):
            logit = ctr(user, item, past, missing)
            loss = F.binary_cross_entropy_with_logits(logit, click)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step in (1, 24, 48):
            print(f"{step}: loss {loss.item():.4f}, scale {scaler.get_scale()}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        user, item, past, missing, click = log.batch(512)
        test = F.binary_cross_entropy_with_logits(ctr(user, item, past, missing), click)
    print(f"test loss {test.item():.4f}")


if __name__ == "__main__":
    fit()
