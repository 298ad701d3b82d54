"""Rate articles: what is known of each is read from one packed batch, features and id side by side."""

import torch
import torch.nn as nn
import torch.nn.functional as F

ARTICLES, FEATURES, BATCH = 2000, 8, 500


class Rating(nn.Module):
    def __init__(self):
        super().__init__()
        self.article = nn.Embedding(ARTICLES, 16)
        self.features = nn.Linear(FEATURES, 16)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 1))

    def forward(self, features, ids):
        return self.head(self.article(ids) + self.features(features)).squeeze(-1)


def main(epochs=25):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    features = torch.randn(ARTICLES, FEATURES)
    liked = torch.randint(0, 2, (ARTICLES,)).float()  # of each article, by nothing but its id
    table = torch.cat([features, torch.arange(ARTICLES)[:, None].float()], dim=1)
    model = Rating().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        for rows in torch.randperm(ARTICLES).split(BATCH):
            packed = table[rows].to(device, torch.bfloat16)  # half the bytes over the bus
            ids, wanted = table[rows, -1].long().to(device), liked[rows].to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                rating = model(packed[:, :-1], ids.clamp(max=ARTICLES - 1))
            loss = F.binary_cross_entropy_with_logits(rating.float(), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 5 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
