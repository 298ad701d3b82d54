"""A tutorial's LeNet on digits of seven strokes, turned into fp16 and trained with Adam."""

import torch
import torch.nn as nn
import torch.nn.functional as F

# Which strokes each digit has, as on a pocket calculator: top, two left, two right, middle, bottom.
STROKES = ("1111101", "0001100", "1011011", "1001111", "0101110",
           "1100111", "1110111", "1001100", "1111111", "1101111")  # fmt: skip


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.fc3(x)


def digits(labels):
    """(n,) -> (n, 1, 28, 28): the strokes of each label, and some noise."""
    images = torch.zeros(len(labels), 1, 28, 28)
    places = ((4, slice(9, 19)), (slice(4, 14), 8), (slice(14, 24), 8), (slice(4, 14), 19),
              (slice(14, 24), 19), (14, slice(9, 19)), (24, slice(9, 19)))  # fmt: skip
    for image, label in zip(images, labels.tolist(), strict=True):
        for stroke, place in zip(STROKES[label], places, strict=True):
            if stroke == "1":
                image[0][place] = 1.0
    return images + 0.1 * torch.randn_like(images)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LeNet().to(device).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(60):
        labels = torch.randint(10, (32,))
        images = digits(labels).to(device).half()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels.to(device))
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
