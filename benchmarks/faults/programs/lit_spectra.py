"""Classifies spectra with Lightning, bf16-mixed: the framework casts, clips and steps."""
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class SpectrumNet(nn.Module):
    def __init__(self, channels=8, classes=4):
        super().__init__()
        self.conv1 = nn.Conv1d(1, channels, 5, padding=2)
        self.bn = nn.BatchNorm1d(channels)
        self.conv2 = nn.Conv1d(channels, 2 * channels, 3, padding=1)
        self.fc = nn.Linear(16 * channels, 24)
        self.head = nn.Linear(24, classes)

    def forward(self, spectrum):
        x = F.relu(self.bn(self.conv1(spectrum)))
        x = F.relu(self.conv2(x))
        x = F.adaptive_avg_pool1d(x, 8).flatten(1)
        x = F.relu(self.fc(x))
        return self.head(x)


class LitSpectra(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.net = SpectrumNet()
        self.lr = lr

    def training_step(self, batch, index):
        spectra, kind = batch
        logits = self.net(spectra)
        loss = F.cross_entropy(logits.float(), kind)
        if self.global_step % 16 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def validation_step(self, batch, index):
        spectra, kind = batch
        loss = F.cross_entropy(self.net(spectra).float(), kind)
        print(f"validation loss {loss.item():.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr)


def spectra(n, seed):
    """One line each, at a position that the class decides, over a slope and noise."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(4, (n,), generator=g)
    axis = torch.linspace(0, 1, 32)
    centre = 0.2 + 0.2 * kind[:, None] + 0.03 * torch.randn(n, 1, generator=g)
    line = torch.exp(-(((axis - centre) / 0.06) ** 2))
    noise = 0.4 * torch.randn(n, 32, generator=g) + axis * torch.rand(n, 1, generator=g)
    return TensorDataset((line + noise).unsqueeze(1), kind)


def main():
    L.seed_everything(29, verbose=False)
    model = LitSpectra()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(model, DataLoader(spectra(960, 1), batch_size=16), DataLoader(spectra(256, 2), batch_size=256))


if __name__ == "__main__":
    main()
