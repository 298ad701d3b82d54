"""ViT in Lightning, bf16-mixed, learning rate from the linear scaling rule."""
import logging
import warnings
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
L.seed_everything(13)
PX, CLASSES = 16, 6


def dataset(n, seed):
    g = torch.Generator().manual_seed(31)
    proto = torch.randn(CLASSES, 3, PX, PX, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    return TensorDataset(proto[y] + 0.5 * torch.randn(n, 3, PX, PX, generator=g), y)


class LitViT(L.LightningModule):
    def __init__(self, base_lr, batch_size, total_steps):
        super().__init__()
        cfg = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                        image_size=PX, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
        self.model = ViTForImageClassification(cfg)
        self.lr = base_lr * batch_size
        self.total_steps = total_steps

    def training_step(self, batch, _):
        x, y = batch
        loss = self.model(pixel_values=x, labels=y).loss
        if self.global_step % 10 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        acc = (self.model(pixel_values=x).logits.argmax(-1) == y).float().mean()
        print(f"val acc {acc.item():.3f}", flush=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.total_steps)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    batch_size, epochs = 32, 6
    train = DataLoader(dataset(512, 1), batch_size=batch_size, shuffle=True)
    val = DataLoader(dataset(64, 2), batch_size=64)
    lit = LitViT(base_lr=0.1, batch_size=batch_size, total_steps=epochs * len(train))
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, precision="bf16-mixed", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        num_sanity_val_steps=0)
    trainer.fit(lit, train, val)


if __name__ == "__main__":
    main()
