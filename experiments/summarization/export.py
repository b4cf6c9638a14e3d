"""Export of the trained model and its tokenizer to Hugging Face's ``transformers``.

``T5ForConditionalGeneration`` has equal logits, and ``AutoTokenizer`` equal tokens, each text with
its end.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from experiments.common.pretrained import save_model
from experiments.summarization.evaluation import load_model
from experiments.summarization.model import END, PAD, SPECIAL_TOKENS, library_config
from experiments.summarization.settings import SummarizationModelSettings
from experiments.summarization.tokenizer import tokenizer_of
from raypipe import RunDirectory, StageContext


def run_export(context: StageContext) -> None:
    """Write the trained model and its tokenizer to ``artifacts/export``."""
    context.call("export", export, context.run_dir, context.settings.model)
    context.say(f"the model and its tokenizer: {context.run_dir.artifact('export')}")


def export(run_dir: RunDirectory, model: SummarizationModelSettings) -> None:
    """Task: write a run's trained model and tokenizer to its directory."""
    tokenizer = Tokenizer.from_str(tokenizer_of(run_dir).content)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pad, end = tokenizer.id_to_token(PAD), tokenizer.id_to_token(END)
    tokenizer.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, END)]
    )
    architecture = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        **library_config(model.sizes),
    }
    save_model(
        run_dir,
        run_dir.artifact("export"),
        load_model(run_dir, model).state_dict(),
        tokenizer,
        {"pad_token": pad, "eos_token": end},
        {"config.json": architecture, "generation_config.json": SPECIAL_TOKENS},
    )
