"""Table of predictions."""

from __future__ import annotations

from raypipe.store.tables import Column, Table

PREDICTIONS = Table(
    "card_predictions",
    "a prediction of `raypipe fit --card`: a training on a card, with the largest micro-batch that "
    "fits",
    (
        Column("stage", "text", "The training stage."),
        Column("profile", "text", "The profile of the configuration."),
        Column("card", "text", "The card."),
        Column("precision", "text", "Arithmetic: fp32, tf32, bf16 or fp16."),
        Column("workers", "integer", "Workers, one per card."),
        Column("strategy", "text", "Data parallelism: ddp or fsdp."),
        Column("gradient_checkpointing", "boolean", "Whether activations are recomputed."),
        Column("compile", "boolean", "Whether the model is compiled."),
        Column("optimizer", "text", "Optimizer."),
        Column("micro_batch", "integer", "Largest micro-batch that fits; none if 1 does not."),
        Column("accumulation", "integer", "Accumulation steps that keep the effective batch."),
        Column("effective_batch", "integer", "Samples per optimizer step, over all workers."),
        Column("peak_bytes", "integer", "Peak memory that torch reserves.", "B"),
        Column("parameters_bytes", "integer", "Of the peak: weights and buffers.", "B"),
        Column("gradients_bytes", "integer", "Of the peak: gradients and their buckets.", "B"),
        Column("optimizer_bytes", "integer", "Of the peak: state of the optimizer.", "B"),
        Column("activations_bytes", "integer", "Of the peak: results of the model's layers.", "B"),
        Column("logits_bytes", "integer", "Of the peak: the model's output and the loss.", "B"),
        Column("temporaries_bytes", "integer", "Of the peak: all other tensors.", "B"),
        Column("allocator_bytes", "integer", "Of the peak: reserved beyond tensors.", "B"),
        Column("context_bytes", "integer", "Beyond the peak: CUDA context and NCCL.", "B"),
        Column("capacity_bytes", "integer", "Memory of the card.", "B"),
        Column("step_time_s", "real", "Time of an optimizer step.", "s"),
        Column("samples_per_s", "real", "Samples per second, over all workers.", "1/s", "higher"),
        Column("samples_per_s_low", "real", "Lower end of its interval.", "1/s"),
        Column("samples_per_s_high", "real", "Upper end of its interval.", "1/s"),
        Column("mfu", "real", "Model FLOPs utilization: fraction of the cards' peak."),
        Column("hours", "real", "Time of all optimizer steps of the training.", "h"),
        Column("hours_low", "real", "Lower end of its interval.", "h"),
        Column("hours_high", "real", "Upper end of its interval.", "h"),
        Column("energy_kwh", "real", "Energy of the cards.", "kWh", "lower"),
        Column("cost", "real", "Price of the cards for these hours, if it is known.", "", "lower"),
        Column("measurements", "integer", "Measurements that calibrate the card; 0 for none."),
        Column("measured_samples_per_s", "real", "Speed of the same training, measured.", "1/s"),
        Column("measured_peak_bytes", "integer", "Peak memory of it, measured.", "B"),
        Column(
            "recommended",
            "boolean",
            "Whether it is the cheapest of its command; without prices, that of the least energy. "
            "Of a sweep's points the one that it would recommend.",
        ),
        Column("note", "text", "Whether it is calibrated, and why it does not fit."),
    ),
    optional=True,
)
