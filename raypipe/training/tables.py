"""Tables of training runs: trials, logged steps and samples of the hardware."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.store.tables import Column, Table

#: settings of a training, which every trial shows
SETTINGS = (
    Column("micro_batch", "integer", "Samples per worker per forward pass."),
    Column("accumulation", "integer", "Forward passes per worker per optimizer step."),
    Column("effective_batch", "integer", "Samples per optimizer step, over all workers."),
    Column("workers", "integer", "Workers of the last attempt."),
    Column("strategy", "text", "Data parallelism: ddp or fsdp."),
    Column("precision", "text", "Arithmetic: fp32, tf32, bf16 or fp16."),
    Column("weights", "text", "Precision of the stored weights: fp32 or bf16."),
    Column("gradient_checkpointing", "boolean", "Whether activations were recomputed."),
    Column("compile", "boolean", "Whether the model was compiled."),
    Column("optimizer", "text", "Optimizer."),
    Column("learning_rate", "real", "Peak learning rate."),
    Column("schedule", "text", "Learning-rate schedule after warm-up."),
    Column("warmup_steps", "real", "Warm-up in steps; below 1, a fraction of all steps."),
    Column("decay_steps", "real", "Decay of warmup-stable-decay, as warmup_steps."),
    Column("min_lr_ratio", "real", "Final learning rate as a fraction of the peak."),
    Column("weight_decay", "real", "Weight decay."),
    Column("clip_norm", "real", "Maximum norm of the gradient."),
    Column("seed", "integer", "Seed of the training."),
)

TRIALS = Table(
    "trials",
    "a training run: a stage's, or a trial of a sweep; shows its last attempt",
    (
        Column("trial_id", "text", "Key of the unit; the same in every attempt."),
        Column("stage", "text", "The stage that ran it."),
        Column("status", "text", "succeeded, failed, out_of_memory, interrupted or skipped."),
        *SETTINGS,
        Column("init_from", "text", "Run directory and stage of the weights it started from."),
        Column("init_sha256", "text", "Checksum of these weights."),
        Column("device", "text", "Name of the GPU, or cpu."),
        Column("steps", "integer", "Optimizer steps that were done."),
        Column("attempts", "integer", "Attempts, the last one included."),
        Column("samples_per_s", "real", "Samples per second, over all workers.", "1/s", "higher"),
        Column("tokens_per_s", "real", "Tokens per second, over all workers.", "1/s"),
        Column("step_time_s", "real", "Mean time of an optimizer step.", "s"),
        Column("loader_wait_share", "real", "Fraction of the time spent waiting for the loader."),
        Column("flops_per_s", "real", "Model FLOPs per second, over all workers.", "1/s"),
        Column("mfu", "real", "Model FLOPs utilization: fraction of the devices' peak."),
        Column("gpu_util_mean", "real", "Mean utilization of the GPUs after warm-up.", "%"),
        Column("gpu_peak_bytes", "integer", "Peak memory allocated by torch on a GPU.", "B"),
        Column("gpu_memory_used_peak_bytes", "integer", "Peak memory in use on a GPU.", "B"),
        Column("cpu_util_mean", "real", "Mean CPU use per worker, of one core.", "%"),
        Column("host_peak_bytes", "integer", "Peak resident memory of a worker.", "B"),
        Column("energy_j", "real", "Energy of the GPUs.", "J", "lower"),
        Column("loss_final", "real", "Training loss of the last logged step.", better="lower"),
        Column("best_step", "integer", "Step of the model that is kept, by its held-out metric."),
        Column("stopped_early", "boolean", "Whether the training stopped, as nothing improved."),
        Column("skipped_steps", "integer", "Steps skipped because fp16 gradients overflowed."),
        Column("parameters", "integer", "Parameters of the model."),
        Column("trained_stage", "text", "The stage that a sweep's trial trains."),
        Column("kind", "text", "Kind of the sweep: systems or quality."),
        Column("repeats", "text", "The trial of a sweep that this one measures again."),
        Column("search", "text", "The search that proposed the trial."),
        Column("number", "integer", "Number of the trial within its search."),
        Column("parity", "real", "Relative difference of its losses to fp32, of a sweep."),
        Column("reason", "text", "Why it was skipped, stopped or failed."),
        Column(
            "settings_history",
            "text",
            "Settings that changed during the training, from which step on, as JSON.",
        ),
    ),
    internal=("point",),
    shown=(
        *("trial_id", "status", "precision", "micro_batch", "accumulation", "workers"),
        *("effective_batch", "steps", "samples_per_s", "step_time_s", "gpu_util_mean"),
        *("gpu_peak_bytes", "host_peak_bytes", "energy_j", "loss_final", "parity", "attempts"),
        *("device", "reason"),
    ),
)

STEPS = Table(
    "steps",
    "a logged step of a training run",
    (
        Column("trial_id", "text", "The training run."),
        Column("step", "integer", "Optimizer steps done."),
        Column("loss", "real", "Training loss of the step."),
        Column("lr", "real", "Learning rate."),
        Column("samples_per_s", "real", "Samples per second since the last logged step.", "1/s"),
        Column("tokens_per_s", "real", "Tokens per second since the last logged step.", "1/s"),
        Column("grad_norm", "real", "Norm of the gradient before clipping."),
        Column("phase", "text", "Phase of the training."),
    ),
    partitioned=True,
    shown=("loss", "lr", "samples_per_s"),
)

GPU_SAMPLES = Table(
    "gpu_samples",
    "a sample of a worker's GPU and processes, every half second, of every attempt",
    (
        Column("trial_id", "text", "The training run."),
        Column("gpu_uuid", "text", "UUID of the GPU."),
        Column("at", "time", "When the sample was taken."),
        Column("util", "real", "Utilization of the GPU in its last sampling period.", "%"),
        Column("memory_bytes", "integer", "Memory in use on the GPU.", "B"),
        Column("power_w", "real", "Power of the GPU.", "W"),
        Column("rank", "integer", "Rank of the worker."),
        Column("attempt", "integer", "Attempt of the training run."),
        Column("warmup", "boolean", "Whether it was taken during warm-up."),
        Column("cpu_util", "real", "CPU use of the worker and its children, of one core.", "%"),
        Column("rss_bytes", "integer", "Resident memory of the worker and its children.", "B"),
    ),
    partitioned=True,
    shown=("util", "memory_bytes", "cpu_util", "rss_bytes"),
)

TABLES = (TRIALS, STEPS, GPU_SAMPLES)


def with_metrics(tables: Sequence[Table], metrics: Sequence[Column]) -> tuple[Table, ...]:
    """Return the tables; trials and steps also have the metrics of an experiment's evaluations."""
    extended = {TRIALS.name, STEPS.name}
    return tuple(table.extended(metrics) if table.name in extended else table for table in tables)
