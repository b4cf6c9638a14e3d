"""Tuning problems: models of scikit-learn on its bundled data sets, with one to three parameters.

The value of a point is the mean over five folds: the log loss or the error rate of a classifier,
the root mean squared error of a regression. Smaller is better.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.base import BaseEstimator
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier

from experiments.pabbo_lda.space import Scale

LOG_LOSS, ERROR, RMSE = "neg_log_loss", "accuracy", "neg_root_mean_squared_error"
FOLDS, SEED = 5, 0
#: rows of a larger data set, drawn once
_MOST_ROWS = 600


@dataclass(frozen=True)
class Axis:
    """Range of a parameter, and the number of its values in the table."""

    scale: Scale
    points: int

    @property
    def positions(self) -> NDArray[np.float64]:
        """The positions of the values in the table."""
        return np.linspace(-1, 1, self.points)


@dataclass(frozen=True)
class Problem:
    """Parameters of a model on a data set; ``model`` makes it from their values."""

    name: str
    data: str
    scoring: str
    model: Callable[..., BaseEstimator]
    axes: Mapping[str, Axis]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table of values."""
        return tuple(axis.points for axis in self.axes.values())

    def points(self) -> Iterator[dict[str, float]]:
        """Yield the points of the table, in C order."""
        columns = [axis.scale.values(axis.positions) for axis in self.axes.values()]
        for values in product(*columns):
            yield dict(zip(self.axes, map(float, values), strict=True))

    def evaluate(self, point: Mapping[str, float]) -> float:
        """Return the value of a point by cross-validation."""
        x, y = _rows(self.data)
        whole = {
            name: round(value) if self.axes[name].scale.step else value
            for name, value in point.items()
        }
        folds = KFold if self.scoring == RMSE else StratifiedKFold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            scores = cross_val_score(
                self.model(**whole),
                x,
                y,
                scoring=self.scoring,
                cv=folds(FOLDS, shuffle=True, random_state=SEED),
                error_score="raise",
            )
        return float(1 - scores.mean() if self.scoring == ERROR else -scores.mean())


@cache
def _rows(name: str) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return a data set, of which at most ``_MOST_ROWS`` rows are drawn."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    chosen = np.random.default_rng(SEED).permutation(len(x))[:_MOST_ROWS]
    return x[chosen], y[chosen]


def real(low: float, high: float, points: int = 41) -> Axis:
    """Return a range of real numbers."""
    return Axis(Scale(low, high), points)


def log(low: float, high: float, points: int = 41) -> Axis:
    """Return a range of real numbers on a logarithmic scale."""
    return Axis(Scale(low, high, log=True), points)


def whole(low: int, high: int) -> Axis:
    """Return a range of integers."""
    return Axis(Scale(low, high, step=1), high - low + 1)


def _scaled(model: BaseEstimator) -> BaseEstimator:
    return make_pipeline(StandardScaler(), model)


def _polynomial(model: BaseEstimator) -> BaseEstimator:
    return make_pipeline(StandardScaler(), PolynomialFeatures(2, include_bias=False), model)


def _logistic(C: float) -> BaseEstimator:
    return _scaled(LogisticRegression(C=C, max_iter=300))


def _boosting(**options: Any) -> BaseEstimator:
    return GradientBoostingClassifier(n_estimators=30, random_state=SEED, **options)


def _boosting_regressor(**options: Any) -> BaseEstimator:
    return GradientBoostingRegressor(n_estimators=40, random_state=SEED, **options)


def _forest(**options: Any) -> BaseEstimator:
    return RandomForestClassifier(n_estimators=20, random_state=SEED, **options)


def _principal_components(n_components: int, C: float = 1.0) -> BaseEstimator:
    return make_pipeline(PCA(n_components, random_state=SEED), LogisticRegression(C=C))


def _network(learning_rate_init: float, alpha: float) -> BaseEstimator:
    return _scaled(
        MLPClassifier(
            (16,),
            learning_rate_init=learning_rate_init,
            alpha=alpha,
            max_iter=40,
            random_state=SEED,
        )
    )


def _tree(**options: Any) -> BaseEstimator:
    return DecisionTreeClassifier(random_state=SEED, **options)


PROBLEMS = (
    # one parameter
    Problem("logistic, C", "breast_cancer", LOG_LOSS, _logistic, {"C": log(1e-4, 1e4)}),
    Problem("logistic, C", "wine", LOG_LOSS, _logistic, {"C": log(1e-4, 1e4)}),
    Problem("logistic, C", "digits", LOG_LOSS, _logistic, {"C": log(1e-4, 1e2, 31)}),
    Problem(
        "ridge, alpha", "diabetes", RMSE, lambda alpha: _polynomial(Ridge(alpha)),
        {"alpha": log(1e-3, 1e5)},
    ),
    Problem(
        "lasso, alpha", "diabetes", RMSE, lambda alpha: _polynomial(Lasso(alpha)),
        {"alpha": log(1e-1, 1e2)},
    ),
    Problem(
        "k-NN, k", "digits", ERROR, lambda k: KNeighborsClassifier(k), {"k": whole(1, 50)}
    ),
    Problem(
        "k-NN, k", "breast_cancer", ERROR, lambda k: _scaled(KNeighborsClassifier(k)),
        {"k": whole(1, 100)},
    ),
    Problem(
        "k-NN, k", "diabetes", RMSE, lambda k: _scaled(KNeighborsRegressor(k)),
        {"k": whole(1, 100)},
    ),
    Problem("tree, depth", "digits", ERROR, _tree, {"max_depth": whole(1, 25)}),
    Problem("tree, pruning", "breast_cancer", ERROR, _tree, {"ccp_alpha": log(1e-4, 0.3, 61)}),
    Problem("tree, smallest leaf", "digits", LOG_LOSS, _tree, {"min_samples_leaf": whole(1, 100)}),
    Problem("SVM, gamma", "digits", ERROR, lambda gamma: SVC(gamma=gamma), {"gamma": log(1e-6, 1)}),
    Problem("SVM, C", "wine", ERROR, lambda C: _scaled(SVC(C=C)), {"C": log(1e-3, 1e3)}),
    Problem("SVR, C", "diabetes", RMSE, lambda C: _scaled(SVR(C=C)), {"C": log(1e-2, 1e5)}),
    Problem("PCA, components", "digits", LOG_LOSS, _principal_components,
            {"n_components": whole(2, 40)}),
    Problem(
        "naive Bayes, smoothing", "digits", LOG_LOSS,
        lambda smoothing: GaussianNB(var_smoothing=smoothing), {"smoothing": log(1e-9, 1e2)},
    ),
    Problem(
        "discriminant analysis, shrinkage", "digits", LOG_LOSS,
        lambda shrinkage: LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage),
        {"shrinkage": real(0, 1)},
    ),
    Problem("boosting, learning rate", "wine", LOG_LOSS, _boosting,
            {"learning_rate": log(1e-3, 1, 31)}),
    # two parameters
    Problem(
        "SVM, C and gamma", "breast_cancer", ERROR,
        lambda C, gamma: _scaled(SVC(C=C, gamma=gamma)),
        {"C": log(1e-2, 1e4, 17), "gamma": log(1e-5, 1e1, 17)},
    ),
    Problem(
        "SVM, C and gamma", "digits", ERROR, lambda C, gamma: SVC(C=C, gamma=gamma),
        {"C": log(1e-2, 1e4, 15), "gamma": log(1e-6, 1e-1, 15)},
    ),
    Problem(
        "SVR, C and gamma", "diabetes", RMSE, lambda C, gamma: _scaled(SVR(C=C, gamma=gamma)),
        {"C": log(1e-1, 1e4, 17), "gamma": log(1e-5, 1, 17)},
    ),
    Problem(
        "elastic net, alpha and l1_ratio", "diabetes", RMSE,
        lambda alpha, l1_ratio: _polynomial(ElasticNet(alpha=alpha, l1_ratio=l1_ratio)),
        {"alpha": log(1e-3, 1e2, 17), "l1_ratio": real(0.05, 1, 11)},
    ),
    Problem(
        "kernel ridge, alpha and gamma", "diabetes", RMSE,
        lambda alpha, gamma: _scaled(KernelRidge(alpha=alpha, gamma=gamma, kernel="rbf")),
        {"alpha": log(1e-4, 1e2, 17), "gamma": log(1e-5, 1, 17)},
    ),
    Problem("forest, depth and features", "wine", LOG_LOSS, _forest,
            {"max_depth": whole(1, 8), "max_features": whole(1, 13)}),
    Problem("boosting, rate and depth", "diabetes", RMSE, _boosting_regressor,
            {"learning_rate": log(1e-3, 1, 17), "max_depth": whole(1, 6)}),
    Problem(
        "PCA, components and C", "digits", LOG_LOSS, _principal_components,
        {"n_components": whole(2, 24), "C": log(1e-4, 1e1, 11)},
    ),
    Problem("network, rate and decay", "wine", LOG_LOSS, _network,
            {"learning_rate_init": log(1e-4, 1, 15), "alpha": log(1e-5, 1e1, 9)}),
    # three parameters
    Problem(
        "SVR, C, gamma and epsilon", "diabetes", RMSE,
        lambda C, gamma, epsilon: _scaled(SVR(C=C, gamma=gamma, epsilon=epsilon)),
        {"C": log(1e-1, 1e4, 9), "gamma": log(1e-5, 1, 9), "epsilon": log(1e-1, 1e2, 7)},
    ),
    Problem(
        "boosting, rate, depth and subsample", "diabetes", RMSE, _boosting_regressor,
        {"learning_rate": log(1e-3, 1, 9), "max_depth": whole(1, 5), "subsample": real(0.2, 1, 5)},
    ),
    Problem(
        "forest, depth, features and leaf", "breast_cancer", LOG_LOSS, _forest,
        {"max_depth": whole(1, 8), "max_features": whole(1, 8), "min_samples_leaf": whole(1, 6)},
    ),
)  # fmt: skip
