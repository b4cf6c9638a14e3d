"""The topic model of the studies: scikit-learn's estimator on compiled variational Bayes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.utils import check_random_state

from experiments.pabbo_lda.settings import LdaPrecision
from experiments.pabbo_lda.variational import bound, e_step, m_step


class CompiledLatentDirichletAllocation(LatentDirichletAllocation):  # type: ignore[misc]
    """As scikit-learn's, with the same draws and the same values, several times as fast.

    It replaces the private methods that ``fit``, ``transform`` and ``perplexity`` call. One job,
    since the number of jobs changes the value; documents are a sparse matrix. The parameters of
    the topics are in ``float64`` whatever the documents are in; the probabilities of the words
    have the documents' type.
    """

    def _init_latent_vars(self, n_features: int, dtype: Any = np.float64) -> None:
        self.random_state_ = check_random_state(self.random_state)
        self.n_batch_iter_, self.n_iter_ = 1, 0
        equal = 1.0 / self.n_components
        self.doc_topic_prior_ = equal if self.doc_topic_prior is None else self.doc_topic_prior
        self.topic_word_prior_ = equal if self.topic_word_prior is None else self.topic_word_prior
        drawn = self.random_state_.gamma(100.0, 0.01, (self.n_components, n_features))
        self._topics = np.ascontiguousarray(drawn.T)
        self._words = np.zeros(self._topics.shape, dtype)
        self._stats = np.zeros(self._topics.shape)
        m_step(self._topics, self._words, self._stats, 0.0, 0.0, 0.0)
        self.components_ = self._topics.T
        self.exp_dirichlet_component_ = self._words.T

    def _e_step(
        self, X: csr_matrix, cal_sstats: bool, random_init: bool, parallel: Any = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        del parallel
        shape = X.shape[0], self.n_components
        gamma = self.random_state_.gamma(100.0, 0.01, shape) if random_init else np.ones(shape)
        stats = self._stats if cal_sstats else self._stats[:0]
        e_step(
            *_parts(X),
            self._words,
            gamma,
            self.doc_topic_prior_,
            self.max_doc_update_iter,
            self.mean_change_tol,
            stats,
        )
        return gamma, stats if cal_sstats else None

    def _em_step(
        self, X: csr_matrix, total_samples: int, batch_update: bool, parallel: Any = None
    ) -> None:
        del parallel
        self._stats[:] = 0
        self._e_step(X, cal_sstats=True, random_init=True)
        weight, scale = 1.0, 1.0
        if not batch_update:
            weight = (self.learning_offset + self.n_batch_iter_) ** -self.learning_decay
            scale = total_samples / X.shape[0]
        m_step(self._topics, self._words, self._stats, self.topic_word_prior_, weight, scale)
        self.n_batch_iter_ += 1

    def _approx_bound(
        self, X: csr_matrix, doc_topic_distr: NDArray[np.float64], sub_sampling: bool
    ) -> np.float64:
        if sub_sampling:
            raise ValueError("the bound is of all documents")
        # its type decides that of the perplexity, which is beyond what float32 holds
        return np.float64(
            bound(
                *_parts(X),
                self._topics,
                self._words,
                doc_topic_distr,
                self.doc_topic_prior_,
                self.topic_word_prior_,
            )
        )


def _parts(documents: csr_matrix) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
    ids, starts = (np.asarray(part, np.int32) for part in (documents.indices, documents.indptr))
    return documents.data, ids, starts


def lda_perplexity(
    counts: csr_matrix, T: int, seed: int, max_iter: int, batch_size: int, precision: LdaPrecision
) -> float:
    """The perplexity on ``counts`` of the topic model fitted to ``counts``.

    Online variational Bayes (Hoffman, Blei and Bach 2010) as scikit-learn has it, with both
    Dirichlet priors 1/T and one job. The matrix is only read, so it may lie in read-only shared
    memory.

    Args:
        counts: documents x words, non-negative counts; empty documents are allowed.
        T: the number of topics, at least 1.
        seed: of the initial topics.
        max_iter: passes over the documents.
        batch_size: documents a step.
        precision: what the words' probabilities are kept in; the value is a ``float64``.

    Raises:
        ValueError: for fewer than one topic, or what scikit-learn refuses.

    """
    if T < 1:
        raise ValueError(f"a topic model needs at least one topic, not T={T}")
    model = CompiledLatentDirichletAllocation(
        n_components=T,
        doc_topic_prior=1 / T,
        topic_word_prior=1 / T,
        learning_method="online",
        max_iter=max_iter,
        batch_size=batch_size,
        random_state=seed,
        n_jobs=1,
    )
    # the bound that fit ends with is the perplexity of these documents
    return float(model.fit(counts.astype(precision)).bound_)
