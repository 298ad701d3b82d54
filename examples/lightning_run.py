"""A Lightning fit, watched by one callback.

pip install "ampscope[lightning]"
python examples/lightning_run.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampscope.integrations.lightning import AmpscopeCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


seed_everything(0)
data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
callback = AmpscopeCallback(every=5, name="lightning", policy="stop")
trainer = Trainer(
    max_epochs=5,
    # Lightning trains in fp16 on GPUs only; on a CPU its mixed precision is bf16.
    precision="16-mixed" if torch.cuda.is_available() else "bf16-mixed",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=32))

run = callback.run
print(f"loss {trainer.callback_metrics['train_loss']:.3f}, run {run.id} in {run.store}")
for alarm in run.alarms:
    print(f"step {alarm.step}: {alarm.text}")
