"""Object/background classifier trained with a hand-written sigmoid focal loss."""

import torch
import torch.nn.functional as F
from torch import nn


def sigmoid_focal_loss(logits, target, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
    positive = -alpha * (1 - p) ** gamma * log_p
    negative = -(1 - alpha) * p**gamma * log_not_p
    return (target * positive + (1 - target) * negative).mean()


class AnchorHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.score = nn.Linear(64, 8)

    def forward(self, x):
        return self.score(self.trunk(x))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AnchorHead().to(device)
    for layer in model.modules():  # a confident detector to start from
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 4

    features = torch.randn(512, 16)
    labels = (features[:, :8] > 0.5).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler(device)

    for epoch in range(6):
        for i in range(0, 512, 64):
            x, y = features[i : i + 64].to(device), labels[i : i + 64].to(device)
            with torch.autocast(device, dtype=torch.float16):
                loss = sigmoid_focal_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}  focal loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
