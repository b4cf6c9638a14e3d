"""LDA topic model: scikit-learn's estimator on compiled variational Bayes, and its objectives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.utils import check_random_state

from experiments.pabbo_lda.objective import LdaFit
from experiments.pabbo_lda.objective.variational_bayes import bound, e_step, m_step
from experiments.pabbo_lda.space import Point

TOP_WORDS = 10


class CompiledLatentDirichletAllocation(LatentDirichletAllocation):  # type: ignore[misc]
    """Scikit-learn's estimator with the same draws and values, several times as fast.

    It replaces the private methods that ``fit``, ``transform`` and ``perplexity`` call. It uses
    one job, since the number of jobs changes the value. Documents are a sparse matrix. The topic
    parameters are ``float64`` in any case; the word probabilities have the documents' type.
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
        # the perplexity has the same type and can exceed float32
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


def fit(
    counts: csr_matrix, point: Point, seed: int, how: LdaFit
) -> CompiledLatentDirichletAllocation:
    """Return the topic model fitted to ``counts``, as scikit-learn fits it with one job.

    Online variational Bayes (Hoffman, Blei and Bach 2010). The matrix is only read, so it may be
    in read-only shared memory.

    Args:
        counts: documents x words, non-negative counts; empty documents are allowed.
        point: the number of topics, at least 1, and the Dirichlet priors, 1/T where one is None.
        seed: the seed of the initial topics.
        how: the options of fitting.

    Raises:
        ValueError: fewer than one topic, or arguments that scikit-learn rejects.

    """
    T, alpha, eta = point
    if T < 1:
        raise ValueError(f"a topic model needs at least one topic, not T={T}")
    model = CompiledLatentDirichletAllocation(
        n_components=T,
        doc_topic_prior=1 / T if alpha is None else alpha,
        topic_word_prior=1 / T if eta is None else eta,
        learning_method="online",
        max_iter=how.max_iter,
        batch_size=how.batch_size,
        random_state=seed,
        n_jobs=1,
    )
    model.fit(counts.astype(how.precision))
    return model


def lda_perplexity(counts: csr_matrix, point: Point, seed: int, how: LdaFit) -> float:
    """Return the perplexity of the documents that the topic model was fitted to."""
    # the final bound of fit is the perplexity of these documents
    return float(fit(counts, point, seed, how).bound_)


def lda_heldout_perplexity(
    parts: tuple[csr_matrix, csr_matrix], point: Point, seed: int, how: LdaFit
) -> float:
    """Return the perplexity of the second documents under the topics fitted to the first.

    As scikit-learn defines it: the variational bound of each held-out document with a topic
    distribution inferred from all of its words.
    """
    fitted_to, held_out = parts
    model = fit(fitted_to, point, seed, how)
    return float(model.perplexity(held_out.astype(how.precision)))


def lda_incoherence(counts: csr_matrix, point: Point, seed: int, how: LdaFit) -> float:
    """Return the negative coherence (:func:`npmi`) of the fitted topics; smaller is better."""
    model = fit(counts, point, seed, how)
    return -npmi(counts, model.components_)


def npmi(counts: csr_matrix, topics: NDArray[np.float64], words: int = TOP_WORDS) -> float:
    """Return the mean coherence of topics by normalized pointwise mutual information, in [-1, 1].

    For each pair of a topic's most probable words, log(p(a, b) / (p(a) p(b))) / -log p(a, b)
    (Bouma 2009), where p is the fraction of documents that hold the words; -1 for words that never
    meet. The mean is over the pairs of a topic and over topics (Lau, Newman and Baldwin 2014, who
    count in sliding windows, which word counts do not have).

    Args:
        counts: documents x words.
        topics: topics x words, the weight of each word.
        words: the number of most probable words per topic.

    """
    there = (counts > 0).astype(np.float64)
    documents = there.shape[0]
    top = np.argsort(-topics, axis=1, kind="stable")[:, :words]
    first, second = np.triu_indices(top.shape[1], 1)
    single = np.asarray(there.sum(0)).ravel() / documents
    scores = np.empty((len(top), len(first)))
    for score, chosen in zip(scores, top, strict=True):
        columns = there[:, chosen]
        together = (columns.T @ columns).toarray()[first, second] / documents
        expected = single[chosen[first]] * single[chosen[second]]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(together / expected) / -np.log(together)
        score[:] = np.select([together == 0, together == 1], [-1.0, 1.0], ratio)
    return float(scores.mean())
