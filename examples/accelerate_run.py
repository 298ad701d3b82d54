"""An Accelerate loop, watched: `watch` takes what `accelerator.prepare` gave back.

pip install "ampscope[accelerate]"
python examples/accelerate_run.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampscope.integrations.accelerate import watch

set_seed(0)
# Accelerate trains in fp16 on GPUs only; on a CPU its mixed precision is bf16.
accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "bf16")
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))

with watch(accelerator, model, optimizer, every=5, name="accelerate") as run:
    for _ in range(5):
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

print(f"loss {loss.item():.3f}, run {run.id} in {run.store}")
for alarm in run.alarms:
    print(f"step {alarm.step}: {alarm.text}")
