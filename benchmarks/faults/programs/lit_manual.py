"""Lightning with manual optimization: fp16 and the scaler are the module's own."""
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


class Denoiser(nn.Module):
    def __init__(self, size=16, width=40):
        super().__init__()
        self.encode = nn.Linear(size, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.decode = nn.Linear(width, size)

    def forward(self, signal):
        h = F.silu(self.norm(self.encode(signal)))
        h = h + F.silu(self.middle(h))
        return self.decode(h)


class LitDenoiser(L.LightningModule):
    def __init__(self, lr=6e-3):
        super().__init__()
        self.automatic_optimization = False
        self.model = Denoiser()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

    def training_step(self, batch, index):
        noisy, clean = batch
        optimizer = self.optimizer
        with torch.autocast("cpu", dtype=torch.float16):
            restored = self.model(noisy)
            loss = F.mse_loss(restored.float(), clean)
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        if index % 16 == 0:
            print(f"batch {index} loss {loss.item():.4f}")

    def validation_step(self, batch, index):
        noisy, clean = batch
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(self.model(noisy).float(), clean)
        print(f"validation loss {loss.item():.4f}")

    def configure_optimizers(self):
        return self.optimizer


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 16)
    clean = torch.sin(6.28 * (t * torch.randint(1, 4, (n, 1), generator=g) + torch.rand(n, 1, generator=g)))
    return TensorDataset(clean + 0.3 * torch.randn(n, 16, generator=g), clean)


def main():
    L.seed_everything(37, verbose=False)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(LitDenoiser(), DataLoader(waves(1600, 1), batch_size=24), DataLoader(waves(256, 2), batch_size=256))


if __name__ == "__main__":
    main()
