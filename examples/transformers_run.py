"""A Transformers Trainer, watched by one callback. The model is made here; nothing is downloaded.

pip install "ampscope[transformers]"
python examples/transformers_run.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ampscope.integrations.transformers import AmpscopeCallback

has_gpu = torch.cuda.is_available()
set_seed(0)
sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (64, 16))]
callback = AmpscopeCallback(every=5, name="transformers", policy="stop")

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=8,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            # Accelerate trains in fp16 on GPUs only; on a CPU its mixed precision is bf16.
            fp16=has_gpu,
            bf16=not has_gpu,
            use_cpu=not has_gpu,
        ),
        train_dataset=texts,
        callbacks=[callback],
    )
    trainer.train()

run = callback.run
print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}, run {run.id} in {run.store}")
for alarm in run.alarms:
    print(f"step {alarm.step}: {alarm.text}")
