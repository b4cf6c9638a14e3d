"""Prepare stage: rotated copies of the training digits, computed in tasks on half a CPU each."""

import numpy as np
import pyarrow as pa
from scipy import ndimage
from sklearn.datasets import load_digits

from raypipe import PoolOptions
from raypipe.store.artifacts import read_parquet, write_parquet

TRAINED_ON = 1200
_BLOCK = 200


def digits(first=0, last=None):
    """Return images ``[n, 8, 8]`` with values from 0 to 1, and the digits that they show."""
    pixels, shown = load_digits(return_X_y=True)
    return pixels[first:last].reshape(-1, 8, 8) / 16, shown[first:last]


def run_prepare(context):
    """Store the training images with their rotated copies."""
    settings = context.settings.prepare
    images, shown = digits(last=TRAINED_ON)
    starts = range(0, len(images), _BLOCK)
    calls = (
        (start, rotated, images[start : start + _BLOCK], settings.copies, settings.degrees, seed)
        for start in starts
        for seed in [(settings.seed, start)]
    )
    with context.pool(PoolOptions(cpus=0.5)) as pool:
        context.begin(len(starts))
        blocks = []
        for _, block in context.map(pool, calls):
            blocks.append(block)
            context.advance(len(blocks))
    pixels = np.concatenate(blocks).reshape(len(images) * settings.copies, -1)
    table = pa.table({"pixels": list(pixels), "digit": np.repeat(shown, settings.copies)})
    write_parquet(context.run_dir, stored_path(context.run_dir), table)
    context.say(f"{len(pixels)} images to train on")


def rotated(images, copies, degrees, seed):
    """Task: return ``[n * copies, 8, 8]``: each image as it is, then its rotated copies."""
    draw = np.random.default_rng(seed)
    angles = draw.uniform(-degrees, degrees, (len(images), copies))
    angles[:, 0] = 0
    return np.stack(
        [
            ndimage.rotate(image, angle, reshape=False, order=1)
            for image, of_image in zip(images, angles, strict=True)
            for angle in of_image
        ]
    )


def stored_path(run_dir):
    """Return the path of the prepared images."""
    return run_dir.artifact("prepare", "images.parquet")


def stored(run_dir):
    """Return the prepared images ``[n, 64]`` and their digits."""
    table = read_parquet(run_dir, stored_path(run_dir))
    return np.stack(table["pixels"].to_numpy()).astype(np.float32), table["digit"].to_numpy()
