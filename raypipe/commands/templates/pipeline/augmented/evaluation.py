"""Evaluation stage: how many held-out digits are recognized, by digit."""

import torch

from augmented.prepare import digits
from augmented.training import TUNED_ON, build_model
from raypipe import Column, Table
from raypipe.training.weights import read_weights

#: `better` lets a matrix name the best point of this column
MEASURES = Table(
    "measures",
    "a digit, or all of them",
    (
        Column("digit", "text", "The digit, or `all`."),
        Column("images", "integer", "Held-out images of it."),
        Column("recall", "real", "Share of them that is recognized.", better="higher"),
    ),
)


def run_evaluate(context):
    """Record the measures of the trained model."""
    recognized = context.call("evaluate", recognize, context.run_dir, context.settings.model.width)
    _, shown = digits(first=TUNED_ON.stop)
    rows = measures(shown, recognized)
    context.say(f"{rows['all']['recall']:.1%} of {len(shown)} held-out digits are recognized")
    context.finish("evaluate", {"measures": rows})


def recognize(run_dir, width):
    """Task: return the digit that the model recognizes in each held-out image."""
    model = build_model(width)
    model.load_state_dict(read_weights(run_dir, run_dir.model("train"))[0])
    images, _ = digits(first=TUNED_ON.stop)
    with torch.inference_mode():
        outputs = model.eval()(torch.tensor(images.reshape(-1, 64), dtype=torch.float32))
    return outputs.argmax(1).numpy()


def measures(shown, recognized):
    """Return the rows of the table by their keys."""
    parts = {"all": shown == shown, **{str(digit): shown == digit for digit in range(10)}}
    return {
        name: {
            "digit": name,
            "images": int(part.sum()),
            "recall": float((recognized == shown)[part].mean()),
        }
        for name, part in parts.items()
    }
