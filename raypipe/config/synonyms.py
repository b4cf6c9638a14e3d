"""Names that users bring from other libraries, and the keys that mean the same here.

They are of Hugging Face's ``TrainingArguments`` and Accelerate, Lightning's ``Trainer``, PyTorch,
Keras and Ray Train.
"""

from __future__ import annotations

#: the names by the ends of the dotted keys that they stand for, the most likely one first
_NAMES = {
    ("training.learning_rate",): "lr max_lr base_lr peak_lr init_lr step_size",
    ("training.micro_batch", "training.effective_batch"): "batch_size bs batch batchsize",
    ("training.micro_batch",): "per_device_train_batch_size per_device_batch_size mini_batch "
    "minibatch mini_batch_size micro_batch_size train_micro_batch_size_per_gpu per_gpu_batch_size "
    "device_batch_size auto_scale_batch_size",
    ("training.effective_batch",): "global_batch_size train_batch_size total_batch_size "
    "global_batch total_batch",
    ("training.accumulation",): "gradient_accumulation_steps grad_accum grad_accumulation "
    "gradient_accumulation accumulate_grad_batches grad_accum_steps accumulation_steps accum_steps "
    "accum_iter",
    ("training.eval_batch",): "per_device_eval_batch_size eval_batch_size val_batch_size "
    "test_batch_size",
    ("training.precision",): "amp use_amp mixed_precision dtype torch_dtype fp16 bf16 tf32 fp32 "
    "half float16 bfloat16 autocast",
    ("training.steps",): "max_steps num_steps n_steps total_steps train_steps num_train_steps "
    "max_iters max_iter num_iterations n_iter iterations iters",
    ("training.epochs",): "num_epochs n_epochs max_epochs num_train_epochs nb_epochs epoch "
    "train_epochs",
    ("training.warmup_steps",): "warmup num_warmup_steps warmup_ratio warmup_iters lr_warmup_steps "
    "warmup_epochs warm_up n_warmup_steps",
    ("training.schedule",): "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay "
    "lr_decay_style",
    ("training.min_lr_ratio",): "min_lr eta_min lr_min end_lr final_lr",
    ("training.clip_norm",): "max_grad_norm grad_clip gradient_clip_val grad_clip_norm clip "
    "gradient_clipping clip_grad clip_grad_norm clipnorm max_norm",
    ("training.weight_decay",): "wd decay l2 l2_penalty weight_decay_rate",
    ("training.optimizer",): "optim opt optimiser optimizer_name optimizer_type",
    ("training.betas",): "momentum beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    ("training.seed",): "random_seed random_state manual_seed seed_everything data_seed",
    ("training.compile",): "torch_compile compile_model use_compile",
    (
        "training.gradient_checkpointing",
    ): "activation_checkpointing checkpointing grad_checkpointing "
    "use_gradient_checkpointing enable_checkpointing",
    ("training.log_every",): "logging_steps log_every_n_steps log_interval log_freq log_steps "
    "report_every",
    ("training.eval_every",): "eval_steps eval_interval eval_freq val_check_interval val_every "
    "check_val_every_n_epoch evaluate_every eval_strategy evaluation_strategy",
    ("training.checkpoint_every",): "save_steps save_interval save_every checkpoint_interval "
    "checkpoint_freq ckpt_every every_n_train_steps save_strategy checkpoint_frequency",
    ("training.keep_checkpoints",): "save_total_limit save_top_k num_to_keep max_to_keep",
    ("training.init_from",): "pretrained resume resume_from_checkpoint ckpt_path from_pretrained "
    "load_from init_checkpoint checkpoint",
    ("training.monitor",): "early_stopping patience early_stopping_patience "
    "metric_for_best_model load_best_model_at_end",
    ("scaling.workers", "scaling.gpus_per_worker"): "gpus devices n_gpus num_gpus n_gpu ngpus "
    "num_devices num_nodes nodes world_size nproc_per_node num_processes accelerator device "
    "use_gpu",
    ("scaling.cpus_per_worker",): "cpus num_cpus n_jobs num_threads threads",
    ("scaling.strategy",): "fsdp ddp deepspeed zero_stage zero parallel data_parallel "
    "distributed_strategy",
    ("loader.workers", "scaling.workers"): "num_workers n_workers",
    ("loader.workers",): "dataloader_num_workers dataloader_workers loader_workers "
    "num_data_workers num_loader_workers",
    ("loader.prefetch",): "prefetch_factor dataloader_prefetch_factor prefetch_batches",
    ("loader.pin_memory",): "dataloader_pin_memory pin",
    ("max_restarts",): "max_failures max_retries retries",
}
_KEYS = {name: keys for keys, names in _NAMES.items() for name in names.split()}


def meant_by(name: str) -> tuple[str, ...]:
    """Return the ends of dotted keys that a name of another library stands for; often none."""
    return _KEYS.get(name.lower().replace("-", "_"), ())
