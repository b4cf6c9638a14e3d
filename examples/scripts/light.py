"""Lightning: the CSVLogger's file, and a checkpoint to resume from."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--accum", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--resume")
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), args.lr)


lightning.seed_everything(0)
x = torch.randn(1024, 8)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
trainer = lightning.Trainer(
    max_steps=args.steps,
    accumulate_grad_batches=args.accum,
    logger=CSVLogger(args.out, name="", version="", flush_logs_every_n_steps=10),
    log_every_n_steps=10,
    callbacks=[ModelCheckpoint(args.checkpoints, every_n_train_steps=40, save_last=True)],
    enable_progress_bar=False,
)
loader = DataLoader(data, args.batch_size, shuffle=True)
trainer.fit(Model(), loader, DataLoader(data, 256), ckpt_path=args.resume)
