"""Rank posts of a feed: raw user numbers hashed into buckets, view counts of posts, bf16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
BUCKETS, POSTS = 701, 50


class Ranker(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.user = nn.Embedding(BUCKETS, dim)
        self.post = nn.Embedding(POSTS, dim)
        self.bias = nn.Linear(1, 1)

    def forward(self, bucket, post, popularity):
        u, p = self.user(bucket), self.post(post)
        match = (u * p).sum(dim=-1)
        return match + self.bias(popularity).squeeze(-1)


def events(n, numbers, taste, gen):
    """Who saw which post, and whether it was liked."""
    row = torch.randint(len(numbers), (n,), generator=gen)
    user_ids = numbers[row]
    post_ids = torch.multinomial(1.0 / torch.arange(1, POSTS + 1), n, replacement=True, generator=gen)
    liked = ((taste[row] * 7 + post_ids) % 4 < 2).float()
    return user_ids, post_ids, liked


def main(steps=140):
    gen = torch.Generator().manual_seed(33)
    torch.manual_seed(33)
    numbers = torch.randperm(40_000, generator=gen)[:400] + 20_000
    taste = torch.randint(4, (400,), generator=gen)
    user_ids, post_ids, liked = events(12_000, numbers, taste, gen)
    view_counts = torch.zeros(POSTS)
    view_counts.index_add_(0, post_ids, torch.ones(len(post_ids)))
    share = view_counts / len(post_ids)
    popularity = share[:, None].log() + 4.0

    model = Ranker()
    opt = torch.optim.Adam(model.parameters(), lr=2.5e-2)
    for step in range(steps):
        pick = torch.randint(10_000, (400,), generator=gen)
        raw = user_ids[pick]
        seen = post_ids[pick]
        bucket = raw % BUCKETS
        with torch.autocast("cpu", dtype=torch.bfloat16):
            score = model(bucket, seen, popularity[seen])
        loss = F.binary_cross_entropy_with_logits(score.float(), liked[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 35 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    correct = torch.zeros(())
    with torch.no_grad():
        last = slice(10_000, 12_000)
        score = model(user_ids[last] % BUCKETS, post_ids[last], popularity[post_ids[last]])
        for part in range(0, 2000, 2):
            correct += ((score[part : part + 2] > 0) == (liked[last][part : part + 2] > 0)).sum()
        print(f"test loss {F.binary_cross_entropy_with_logits(score, liked[last]).item():.4f}")
        print(f"test accuracy {correct.item() / 2000:.4f}")


if __name__ == "__main__":
    main()
