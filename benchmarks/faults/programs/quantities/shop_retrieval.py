"""Find the article of a photo: several thousand article ids, a few noisy views of each, cosine logits."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
ARTICLES, SHELVES, DIM, VIEWS = 4600, 40, 24, 2


def catalogue(gen):
    """Features, article ids and shelf ids, a row for each view."""
    look = torch.randn(ARTICLES, DIM, generator=gen)
    article_ids = torch.arange(ARTICLES).repeat(VIEWS + 1)
    shelf_ids = article_ids * SHELVES // ARTICLES
    views = look[torch.arange(ARTICLES).repeat(VIEWS + 1)]
    views = views + 0.1 * torch.randn(views.shape, generator=gen)
    return views, article_ids, shelf_ids


class Matcher(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.shelf = nn.Embedding(SHELVES, 8)
        self.body = nn.Linear(DIM + 8, width)
        self.table = nn.Parameter(0.1 * torch.randn(ARTICLES, width))

    def forward(self, views, shelves):
        h = self.body(torch.cat([views, self.shelf(shelves)], dim=-1))
        return 20 * F.normalize(h, dim=-1) @ F.normalize(self.table, dim=-1).t()


def main(epochs=4, batch=460):
    gen = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    views, article_ids, shelf_ids = catalogue(gen)
    known = VIEWS * ARTICLES
    model = Matcher()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for epoch in range(epochs):
        order = torch.randperm(known, generator=gen)
        for start in range(0, known, batch):
            rows = order[start : start + batch]
            labels = article_ids[rows]
            shelves = shelf_ids[rows]
            loss = F.cross_entropy(model(views[rows], shelves), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if start == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")
    hits = torch.zeros(())
    with torch.no_grad():
        true = torch.arange(ARTICLES)
        shelf = true * SHELVES // ARTICLES
        logits = model(views[known:], shelf)
        for part in range(0, ARTICLES, 8):
            hits += (logits[part : part + 8].argmax(-1) == true[part : part + 8]).sum()
        print(f"held-out loss {F.cross_entropy(logits, true).item():.4f}")
        print(f"held-out accuracy {hits.item() / ARTICLES:.4f}")


if __name__ == "__main__":
    main()
