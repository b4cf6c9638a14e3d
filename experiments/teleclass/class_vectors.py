"""Class vectors of phase 2 in a run directory, and the similarity of documents to them."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.preprocessing import normalize

from experiments.teleclass.refinement import similarities
from raypipe.store.run_directory import RunDirectory

Floats = NDArray[np.float32]


def centered(vectors: Floats, center: Floats) -> Floats:
    """Return vectors ``[n, d]`` of length 1 minus a center ``[d]``; zero for a zero vector."""
    known = vectors.any(1, keepdims=True)
    return np.where(known, normalize(vectors) - center, 0).astype(np.float32)


@dataclass(frozen=True)
class ClassVectors:
    """Vectors of classes, and the center that is subtracted from the vectors of documents.

    Attributes:
        vectors: float32 [C, d] of length 1, or 0 for a class without a vector.
        center: float32 [d].

    """

    vectors: Floats
    center: Floats

    @staticmethod
    def of_descriptions(encoded: Floats, center: Floats) -> ClassVectors:
        """Return the vectors of descriptions as they were encoded ``[C, d]``, centered."""
        return ClassVectors(normalize(centered(encoded, center)), center)

    def similarities(self, documents: Floats) -> Floats:
        """Return the similarity of encoded documents to classes ``[B, C]``.

        It is :data:`~experiments.teleclass.refinement.NEVER` where a vector is zero.
        """
        return similarities(centered(documents, self.center), self.vectors)

    def write(self, run_dir: RunDirectory) -> None:
        """Store the vectors in a run directory."""
        stream = io.BytesIO()
        np.savez(stream, vectors=self.vectors, center=self.center)
        run_dir.write(_path(run_dir), stream.getvalue())

    @staticmethod
    def read(run_dir: RunDirectory) -> ClassVectors:
        """Return the vectors of a run directory.

        Raises:
            OSError, ValueError: they are missing or corrupt.

        """
        with np.load(io.BytesIO(run_dir.read(_path(run_dir))), allow_pickle=False) as stored:
            return ClassVectors(stored["vectors"], stored["center"])


def _path(run_dir: RunDirectory) -> str:
    return run_dir.artifact("refine", "classes.npz")
