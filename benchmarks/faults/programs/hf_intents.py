"""Intent classification with Transformers' Trainer: a BERT from a configuration, a head of our own, bf16."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
VOCAB, LENGTH, INTENTS = 32, 10, 4


class Utterances(Dataset):
    """The intent is the quarter of the vocabulary from which most words are."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(INTENTS, (n,), generator=g)
        words = torch.randint(1, VOCAB, (n, LENGTH), generator=g)
        topic = torch.randint(0, VOCAB // INTENTS, (n, LENGTH), generator=g) + self.labels[:, None] * (VOCAB // INTENTS)
        self.ids = torch.where(torch.rand(n, LENGTH, generator=g) < 0.5, topic.clamp(min=1), words)
        size = torch.randint(3, LENGTH + 1, (n, 1), generator=g)
        self.mask = (torch.arange(LENGTH)[None] < size).long()
        self.ids = self.ids * self.mask

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class IntentModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.bert = BertModel(
            BertConfig(vocab_size=VOCAB, hidden_size=dim, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=48, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0),
            add_pooling_layer=False,
        )
        self.dense = nn.Linear(dim, 32)
        self.norm = nn.LayerNorm(32)
        self.classifier = nn.Linear(32, INTENTS)

    def forward(self, input_ids, attention_mask):
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask.unsqueeze(-1).to(states.dtype)
        pooled = (states * there).sum(1) / there.sum(1).clamp(min=1)
        h = F.gelu(self.dense(pooled))
        h = self.norm(h)
        return self.classifier(h)


class IntentTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = F.cross_entropy(logits.float(), labels)
        return (loss, {"logits": logits}) if return_outputs else loss


def main():
    set_seed(41)
    model = IntentModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    args = TrainingArguments(
        output_dir="out", max_steps=60, per_device_train_batch_size=16, logging_steps=12, logging_first_step=True,
        bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
        remove_unused_columns=False, dataloader_pin_memory=False, seed=41,
    )
    trainer = IntentTrainer(model=model, args=args, train_dataset=Utterances(960, 1), optimizers=(optimizer, None))
    trainer.train()
    model.eval()
    test = Utterances(256, 2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(test.ids, test.mask).float(), test.labels)
    print(f"test loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
