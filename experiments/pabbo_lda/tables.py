"""Tables that the main job writes, column by column."""

from __future__ import annotations

from experiments.pabbo_lda.pabbo.search_measures import TOLERANCES
from experiments.pabbo_lda.study.convergence import NOISE, TARGETS
from raypipe.store.tables import Column, Table

_DATASET = Column("dataset", "text", "Name of the corpus.")
_OPTIMIZER = Column("optimizer", "text", "Name of the optimizer.")
_SEED = Column(
    "seed", "integer", "Seed of the optimizer, and LDA's first one: `lda.seed` plus the run."
)
_LDA_SEEDS = Column("lda_seeds", "integer", "LDA seeds whose mean is the value of a point.")
_STUDY = (_DATASET, _OPTIMIZER, Column("run", "integer", "Number of the run, from 0."), _SEED)
_RUNS = Column("runs", "integer", "Number of runs.")
_POINT = (
    Column("T", "integer", "Number of topics."),
    Column("alpha", "real", "Document-topic prior; missing (1/T) if it is not searched."),
    Column("eta", "real", "Topic-word prior; missing (1/T) if it is not searched."),
)
_BEST_POINT = (
    Column("best_T", "integer", "Number of topics of the lowest finite value so far."),
    Column("best_alpha", "real", "Document-topic prior of that value, if it is searched."),
    Column("best_eta", "real", "Topic-word prior of that value, if it is searched."),
)
_EVALUATIONS = Column("evaluations", "integer", "Distinct points evaluated.")
_DURATION = Column("duration_s", "real", "Summed wall-clock time of the evaluations.", "s")
_MEASURE = Column("measure", "text", "Column of `convergence` that is compared; lower is better.")
_TEST = (
    Column("p_value", "real", "P-value of the test; missing if not tested."),
    Column("conclusion", "text", "Outcome of the test in words."),
)
_KENDALLS_W = Column("kendalls_w", "real", "Kendall's W: agreement, from 0 (none) to 1.")
_PAIR = (
    _DATASET,
    _MEASURE,
    Column("first", "text", "First optimizer of the pair."),
    Column("second", "text", "Second optimizer of the pair."),
    Column("n", "integer", "Runs with values of both."),
    Column("dropped", "integer", "Runs without a value of one of them."),
    Column("equal", "integer", "Runs in which both are equal."),
    Column("statistic", "real", "Wilcoxon's signed-rank statistic: the smaller rank sum."),
    Column("p_holm", "real", "P-value after Holm's correction."),
    Column("effect_size", "real", "Rank-biserial correlation; negative if the first is lower."),
    *_TEST,
)
_EVALUATION = (
    Column("trial_id", "text", "Training run of the model."),
    Column("stage", "text", "Evaluation stage."),
    Column(
        "method",
        "text",
        "`pabbo`, `shipped` (the model that ships), `random` or `preferential_gp`.",
    ),
)
_SEARCH = {
    "regret": "Simple regret after the last duel",
    "area": "Mean of the simple regret after each duel",
}
_QUARTILES = {"median": "median", "q25": "lower quartile", "q75": "upper quartile"}
_NEAR = {
    **{target: f"within {excess:.0%} of the best known" for target, excess in TARGETS.items()},
    NOISE: "within the noise (`landscape.interval`) of the best known",
}

TABLES = (
    Table(
        "evaluations",
        "one evaluation of the objective: a point with one seed",
        (
            _DATASET,
            Column("seed", "integer", "Seed of LDA."),
            *_POINT,
            Column("value", "real", "Value of the objective; lower is better."),
            Column("duration_s", "real", "Wall-clock time of the evaluation.", "s"),
            Column("cpu_s", "real", "CPU time of the evaluation, all threads together.", "s"),
            Column("started_at", "time", "Start of the evaluation (UTC)."),
            Column("worker", "text", "Node and process that computed it."),
            Column("cached", "boolean", "Whether the value comes from another run's cache."),
        ),
    ),
    Table(
        "corpora",
        "one corpus of the studies",
        (
            _DATASET,
            Column("documents", "integer", "Documents of the studies."),
            Column(
                "dropped_documents",
                "integer",
                "Documents that were left out because they have no word of the vocabulary.",
            ),
            Column("empty_documents", "integer", "Documents without a word that were kept."),
            Column("words", "integer", "Words of the vocabulary."),
            Column("tokens", "integer", "Sum of all counts."),
        ),
    ),
    Table(
        "studies",
        "one optimizer run on one corpus",
        (
            *_STUDY,
            *_BEST_POINT,
            Column(
                "best_perplexity",
                "real",
                "Lowest finite value of the objective, if it is a perplexity.",
                better="lower",
            ),
            Column(
                "best_coherence",
                "real",
                "Highest finite coherence, if it is the objective.",
                better="higher",
            ),
            Column(
                "confirmed_value",
                "real",
                "Mean objective of the best point over `lda.final_seeds` seeds that no search saw; "
                "lower is better, also where the objective is the negative coherence.",
                better="lower",
            ),
            Column("evaluations", "integer", "Requested evaluations, including repeated points."),
            Column("unique_evaluations", "integer", "Distinct points evaluated."),
            Column("batches", "integer", "Batches of the optimizer after the start."),
            _DURATION,
            Column("cpu_s", "real", "Summed CPU time of the evaluations.", "s"),
        ),
        axes=("optimizer",),
        groups=("dataset",),
        baselines=("random", "bisect", "gp_ei"),
        repeats="lda.runs",
    ),
    Table(
        "study_history",
        "one distinct point of one study",
        (
            *_STUDY,
            Column("evaluation", "integer", "Number of the point in its study, from 1."),
            Column("batch", "integer", "Batch of the optimizer, from 1; 0 is the start."),
            *_POINT,
            Column("value", "real", "Value of the objective: mean over seeds; lower is better."),
            _LDA_SEEDS,
            *_BEST_POINT,
            Column("best_value", "real", "Lowest finite value so far; infinite if there is none."),
            Column("elapsed_s", "real", "Summed wall-clock time of the evaluations so far.", "s"),
            Column("cpu_s", "real", "Summed CPU time of the evaluations so far.", "s"),
        ),
    ),
    Table(
        "regret",
        "one step of the search on held-out functions by one method",
        (
            *_EVALUATION,
            Column("step", "integer", "Duels after the first one."),
            Column("mean", "real", "Mean simple regret over functions."),
            Column("low", "real", "Lower end of the 95 % confidence interval of the mean."),
            Column("high", "real", "Upper end of the 95 % confidence interval of the mean."),
        ),
    ),
    Table(
        "measures",
        "the searches on held-out functions by one method, from one kind of start",
        (
            *_EVALUATION,
            Column(
                "start",
                "text",
                "`all`; `near` and `far`: an end of the first duel is within a quarter of the "
                "range from the optimum, or none.",
            ),
            Column("functions", "integer", "Functions with such a start."),
            Column("searches", "integer", "Searches from such a start."),
            *(
                column
                for name, meaning in _SEARCH.items()
                for column in (
                    Column(name, "real", f"{meaning}, mean over functions.", better="lower"),
                    Column(f"{name}_half", "real", "Half of its 95 % confidence interval."),
                )
            ),
            *(
                column
                for to, share in TOLERANCES.items()
                for column in (
                    Column(
                        f"reached_{to}",
                        "real",
                        f"Share of searches that came within {share:.0%} of the function's range.",
                    ),
                    Column(
                        f"duels_to_{to}",
                        "real",
                        f"Median number of duels until within {share:.0%}; missing if fewer than "
                        "half of the searches came there.",
                    ),
                )
            ),
            *(
                Column(
                    f"p_{name}",
                    "real",
                    f"P-value of the difference of `{name}` to `pabbo`: Wilcoxon's test over "
                    "functions, corrected by Holm for the number of methods.",
                )
                for name in (*_SEARCH, *(f"duels_to_{to}" for to in TOLERANCES))
            ),
        ),
        axes=("method",),
        groups=("stage", "start"),
        baselines=("random", "preferential_gp"),
        headline={"start": "all"},
    ),
    Table(
        "landscape",
        "one corpus: the noise of the objective, and where it is lowest",
        (
            _DATASET,
            Column(
                "points",
                "integer",
                "Points pooled: of those with two or more seeds, the tenth with the lowest means, "
                "at least 5.",
            ),
            Column("fits", "integer", "Evaluations of these points."),
            Column("std", "real", "Standard deviation of one evaluation over seeds, pooled."),
            _LDA_SEEDS,
            Column("std_of_value", "real", "Standard deviation of the mean over `lda_seeds`."),
            Column(
                "interval",
                "real",
                "Largest difference of two values of one point in 95 % of cases (Student's t).",
            ),
            Column(
                "best_T",
                "integer",
                "T of the lowest mean, of those that more than half of the seeds tried.",
            ),
            Column("best_mean", "real", "Mean over all its seeds."),
            Column("T_low", "integer", "Smallest neighbor of the best T within the noise of it."),
            Column("T_high", "integer", "Largest neighbor of the best T within the noise of it."),
            Column("T_least", "integer", "Smallest T evaluated."),
            Column("T_most", "integer", "Largest T evaluated."),
        ),
    ),
    Table(
        "anytime",
        "one number of evaluations of one optimizer on one corpus",
        (
            _DATASET,
            _OPTIMIZER,
            Column("evaluation", "integer", "Number of evaluations, including the start."),
            _RUNS,
            *(
                Column(f"{column}_{name}", "real", f"{meaning}: {spread} over runs.")
                for column, meaning in (
                    ("best_value", "Lowest value so far"),
                    ("ratio", "Lowest value so far divided by the best known"),
                )
                for name, spread in {"mean": "mean", **_QUARTILES}.items()
            ),
        ),
    ),
    Table(
        "convergence",
        "one study: its final value and how it got there",
        (
            *_STUDY,
            Column("best_known", "real", "Lowest value of any study of this corpus and seed."),
            Column("final_value", "real", "Lowest value of the study."),
            Column(
                "confirmed_value",
                "real",
                "Mean of the best point over seeds that no search saw, if there are any.",
            ),
            Column("final_ratio", "real", "Lowest value divided by the best known."),
            _EVALUATIONS,
            _DURATION,
            Column("start_evaluations", "integer", "Evaluations of the start."),
            Column("start_s", "real", "CPU time of the start.", "s"),
            Column("best_T", "integer", "Number of topics of the lowest value."),
            *(
                column
                for to, near in _NEAR.items()
                for column in (
                    Column(
                        f"evaluations_to_{to}", "integer", f"Evaluations until {near}, if ever."
                    ),
                    Column(
                        f"evaluations_beyond_start_to_{to}",
                        "integer",
                        f"Evaluations after the start until {near}, if ever.",
                    ),
                    Column(f"time_to_{to}_s", "real", f"CPU time until {near}, if ever.", "s"),
                )
            ),
            Column(
                "area_under_curve",
                "real",
                "Mean of log(lowest value so far / best known) after the start, or of the "
                "difference where a best known value is not positive; 0 is perfect.",
            ),
        ),
    ),
    Table(
        "summary",
        "one optimizer on one corpus",
        (
            _DATASET,
            _OPTIMIZER,
            _RUNS,
            Column("mean", "real", "Mean final value."),
            Column("std", "real", "Sample standard deviation of the final value."),
            Column("min", "real", "Lowest final value."),
            Column("max", "real", "Highest final value."),
            Column("median", "real", "Median final value."),
            Column("confirmed_mean", "real", "Mean value of the best points on unseen seeds."),
            Column("confirmed_std", "real", "Its sample standard deviation over runs."),
            Column("best_T_median", "real", "Median number of topics of the lowest value."),
            Column("evaluations_mean", "real", "Mean number of distinct points evaluated."),
            Column("duration_s_mean", "real", "Mean summed wall-clock time of a study.", "s"),
            Column("area_under_curve_median", "real", "Median area under the curve."),
            *(
                column
                for to, near in _NEAR.items()
                for column in (
                    Column(f"runs_to_{to}", "integer", f"Runs that came {near}."),
                    *(
                        Column(
                            f"evaluations_to_{to}_{name}",
                            "real",
                            f"Evaluations until {near}: {spread}; missing among censored runs.",
                        )
                        for name, spread in _QUARTILES.items()
                    ),
                )
            ),
        ),
    ),
    Table("comparisons", "one pair of optimizers on one corpus, by one measure", _PAIR),
    Table("against_control", "one optimizer against random search, by one measure", _PAIR),
    Table(
        "rankings",
        "one optimizer on one corpus, by one measure",
        (
            _DATASET,
            _MEASURE,
            _OPTIMIZER,
            Column("average_rank", "real", "Average rank over runs; 1 is the lowest value."),
            _RUNS,
            Column("chi2", "real", "Friedman's chi-squared statistic."),
            _KENDALLS_W,
            *_TEST,
        ),
    ),
    Table(
        "across_corpora",
        "one optimizer over all corpora, by one measure",
        (
            _MEASURE,
            _OPTIMIZER,
            Column("corpora", "integer", "Number of corpora."),
            Column("average_rank", "real", "Average over corpora of the rank on each corpus."),
            Column("wins", "integer", "Corpora on which its average rank is the lowest."),
            _KENDALLS_W,
            *_TEST,
        ),
    ),
)

#: metrics of the trainings in the table ``steps``
STEP_METRICS = (
    Column("prediction_loss", "real", "Binary cross-entropy of the predicted winners of duels."),
    Column("accuracy", "real", "Fraction of duels whose winner is predicted."),
    Column("policy_loss", "real", "Policy loss; in the policy phase."),
    Column("simple_regret", "real", "Regret of the best point of the trajectories."),
    Column("error", "real", "Squared error of the scores; in the training on curves."),
    Column("excess", "real", "Log-perplexity of the best T above the minimum of its curve."),
    Column(
        "eval_simple_regret",
        "real",
        "Final simple regret on held-out functions.",
        better="lower",
        baseline="eval_random_simple_regret",
    ),
    Column(
        "eval_simple_regret_all_steps",
        "real",
        "Mean simple regret over all steps.",
        better="lower",
        baseline="eval_random_simple_regret_all_steps",
    ),
    Column("eval_random_simple_regret", "real", "Final simple regret of random search."),
    Column("eval_random_simple_regret_all_steps", "real", "Mean simple regret of random search."),
    Column(
        "eval_evaluations",
        "real",
        "Mean evaluations until close, on held-out curves whose start is not; steps + 1 if never.",
        better="lower",
    ),
    Column(
        "eval_within_5",
        "real",
        "Fraction of held-out curves close within 5 evaluations.",
        better="higher",
    ),
)
