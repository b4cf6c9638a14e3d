"""Hugging Face Trainer: its arguments from the command line, its log as JSON lines."""

import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class Counting(Dataset):
    """Sequences of numbers, each one more than the one before."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class JsonLines(TrainerCallback):
    """Write what the Trainer logs, with its step, while it trains."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        with Path(args.output_dir, "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": state.global_step, **(logs or {})}), file=file)


(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)
trainer = Trainer(
    GPT2LMHeadModel(config),
    args,
    train_dataset=Counting(),
    eval_dataset=Counting(),
    callbacks=[JsonLines],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
trainer.save_model()
