"""Published batch sizes per card; they assume an optimizer with little memory (Adafactor)."""

from __future__ import annotations

from raypipe.training.presets import Preset

_MT5, _T5 = "mT5 1.2B", "T5 220M"
_V100, _A100, _RTX = "a V100 of 16 GB", "an A100 of 40 GB", "an RTX 3080 or 4090 of 10-24 GB"

#: accumulation is 1 where the published table does not give it
PRESETS = (
    Preset(_V100, 16, _MT5, micro_batch=1, accumulation=4, eval_batch=2, inference_batch=2),
    Preset(_V100, 16, _T5, micro_batch=4, accumulation=2, eval_batch=4, inference_batch=8),
    Preset(_A100, 40, _MT5, micro_batch=4, accumulation=2, eval_batch=8, inference_batch=8),
    Preset(_A100, 40, _T5, micro_batch=8, accumulation=2, eval_batch=8, inference_batch=16),
    Preset(_RTX, 10, _MT5, micro_batch=1, accumulation=8, eval_batch=1, inference_batch=1),
    Preset(_RTX, 10, _T5, micro_batch=2, accumulation=1, eval_batch=4, inference_batch=4),
)
