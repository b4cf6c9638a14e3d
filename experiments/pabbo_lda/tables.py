"""Tables that the main job writes, column by column."""

from __future__ import annotations

from experiments.common.tables import columns
from experiments.pabbo_lda.pabbo.evaluation import TOLERANCES
from experiments.pabbo_lda.study.comparison import NOISE, TARGETS
from raypipe import Column, Table

_NEAR = {
    **{target: f"within {excess:.0%} of the best known" for target, excess in TARGETS.items()},
    NOISE: "within the noise (`landscape.interval`) of the best known",
}
_STUDY = {
    "dataset": "text: Name of the corpus.",
    "optimizer": "text: Name of the optimizer.",
    "run": "integer: Number of the run, from 0.",
    "seed": "integer: Seed of the optimizer, and LDA's first one: `lda.seed` plus the run.",
}
_CORPUS = {"dataset": _STUDY["dataset"]}
_CORPUS_OPTIMIZER = {**_CORPUS, "optimizer": _STUDY["optimizer"]}
_LDA_SEEDS = "integer: LDA seeds whose mean is the value of a point."
_RUNS = "integer: Number of runs."
_POINT = {
    "T": "integer: Number of topics.",
    "alpha": "real: Document-topic prior; missing (1/T) if it is not searched.",
    "eta": "real: Topic-word prior; missing (1/T) if it is not searched.",
}
_BEST_POINT = {
    "best_T": "integer: Number of topics of the lowest finite value so far.",
    "best_alpha": "real: Document-topic prior of that value, if it is searched.",
    "best_eta": "real: Topic-word prior of that value, if it is searched.",
}
_MEASURE = "text: Column of `convergence` that is compared; lower is better."
_P_VALUE = "real: P-value of the test; missing if not tested."
_CONCLUSION = "text: Outcome of the test in words."
_PAIR = columns(
    **_CORPUS,
    measure=_MEASURE,
    first="text: First optimizer of the pair.",
    second="text: Second optimizer of the pair.",
    n="integer: Runs with values of both.",
    dropped="integer: Runs without a value of one of them.",
    equal="integer: Runs in which both are equal.",
    statistic="real: Wilcoxon's signed-rank statistic: the smaller rank sum.",
    p_value=_P_VALUE,
    p_holm="real: P-value after Holm's correction.",
    effect_size="real: Rank-biserial correlation; negative if the first is lower.",
    conclusion=_CONCLUSION,
)
_EVALUATION = {
    "trial_id": "text: Training run of the model.",
    "stage": "text: Evaluation stage.",
    "method": "text: `pabbo`, `shipped` (the model that ships), `random` or `preferential_gp`.",
}
_LOSSES = ("regret", "area", *(f"duels_to_{to}" for to in TOLERANCES))

TABLES = (
    Table(
        "evaluations",
        "one evaluation of the objective: a point with one seed",
        columns(
            **_CORPUS,
            **_POINT,
            seed="integer: Seed of LDA.",
            value="real: Value of the objective; lower is better.",
            duration_s="real: Wall-clock time of the evaluation.",
            cpu_s="real: CPU time of the evaluation, all threads together.",
            started_at="time: Start of the evaluation (UTC).",
            worker="text: Node and process that computed it.",
            cached="boolean: Whether the value comes from another run's cache.",
        ),
    ),
    Table(
        "corpora",
        "one corpus of the studies",
        columns(
            **_CORPUS,
            documents="integer: Documents of the studies.",
            dropped_documents="integer: Documents left out for lack of a word.",
            empty_documents="integer: Documents without a word that were kept.",
            words="integer: Words of the vocabulary.",
            tokens="integer: Sum of all counts.",
        ),
    ),
    Table(
        "studies",
        "one optimizer run on one corpus",
        columns(
            **_STUDY,
            **_BEST_POINT,
            best_perplexity="real lower: Lowest finite value of the objective, if it is a "
            "perplexity.",
            best_coherence="real higher: Highest finite coherence, if it is the objective.",
            confirmed_value="real lower: Mean objective of the best point over "
            "`lda.final_seeds` seeds that no search saw; lower is better, also where the "
            "objective is the negative coherence.",
            evaluations="integer: Requested evaluations, including repeated points.",
            unique_evaluations="integer: Distinct points evaluated.",
            batches="integer: Batches of the optimizer after the start.",
            duration_s="real: Summed wall-clock time of the evaluations.",
            cpu_s="real: Summed CPU time of the evaluations.",
        ),
        axes=("optimizer",),
        groups=("dataset",),
        baselines=("random", "bisect", "gp_ei"),
        repeats="lda.runs",
    ),
    Table(
        "study_history",
        "one distinct point of one study",
        columns(
            **_STUDY,
            **_POINT,
            **_BEST_POINT,
            evaluation="integer: Number of the point in its study, from 1.",
            batch="integer: Batch of the optimizer, from 1; 0 is the start.",
            value="real: Value of the objective: mean over seeds; lower is better.",
            lda_seeds=_LDA_SEEDS,
            best_value="real: Lowest finite value so far; infinite if there is none.",
            elapsed_s="real: Summed wall-clock time of the evaluations so far.",
            cpu_s="real: Summed CPU time of the evaluations so far.",
        ),
    ),
    Table(
        "regret",
        "one step of the search on held-out functions by one method",
        columns(
            **_EVALUATION,
            step="integer: Duels after the first one.",
            mean="real: Mean simple regret over functions.",
            low="real: Lower end of the 95 % confidence interval of the mean.",
            high="real: Upper end of the 95 % confidence interval of the mean.",
        ),
    ),
    Table(
        "measures",
        "the searches on held-out functions by one method, from one kind of start",
        columns(
            **_EVALUATION,
            regret="real lower: Mean simple regret after the last duel.",
            area="real lower: Mean simple regret after each duel.",
            start="text: `all`; `near` and `far`: an end of the first duel is within a quarter "
            "of the range from the optimum, or none.",
            functions="integer: Functions with such a start.",
            searches="integer: Searches from such a start.",
            regret_half="real: Half of the 95 % confidence interval of `regret`.",
            area_half="real: Half of the 95 % confidence interval of `area`.",
            **{
                f"reached_{to}": f"real: Share of searches within {share:.0%} of the range."
                for to, share in TOLERANCES.items()
            },
            **{
                f"duels_to_{to}": f"real: Median number of duels until within {share:.0%}; "
                "missing if fewer than half of the searches came there."
                for to, share in TOLERANCES.items()
            },
            **{
                f"p_{name}": f"real: P-value of the difference of `{name}` to `pabbo`: "
                "Wilcoxon's test over functions, corrected by Holm for the number of methods."
                for name in _LOSSES
            },
        ),
        axes=("method",),
        groups=("stage", "start"),
        baselines=("random", "preferential_gp"),
        headline={"start": "all"},
    ),
    Table(
        "landscape",
        "one corpus: the noise of the objective, and where it is lowest",
        columns(
            **_CORPUS,
            points="integer: Points pooled: of those with two or more seeds, the tenth with "
            "the lowest means, at least 5.",
            fits="integer: Evaluations of these points.",
            std="real: Standard deviation of one evaluation over seeds, pooled.",
            lda_seeds=_LDA_SEEDS,
            std_of_value="real: Standard deviation of the mean over `lda_seeds`.",
            interval="real: Largest difference of two values of a point in 95 % of cases.",
            best_T="integer: T of the lowest mean, of those that over half of the seeds tried.",
            best_mean="real: Mean over all its seeds.",
            T_low="integer: Smallest neighbor of the best T within the noise of it.",
            T_high="integer: Largest neighbor of the best T within the noise of it.",
            T_least="integer: Smallest T evaluated.",
            T_most="integer: Largest T evaluated.",
        ),
    ),
    Table(
        "convergence",
        "one study: its final value and how it got there",
        columns(
            **_STUDY,
            best_known="real: Lowest value of any study of this corpus and seed.",
            final_value="real: Lowest value of the study.",
            confirmed_value="real: Mean of the best point over seeds that no search saw.",
            final_ratio="real: Lowest value divided by the best known.",
            evaluations="integer: Distinct points evaluated.",
            duration_s="real: Summed wall-clock time of the evaluations.",
            start_evaluations="integer: Evaluations of the start.",
            start_s="real: CPU time of the start.",
            best_T="integer: Number of topics of the lowest value.",
            area_under_curve="real: Mean of log(lowest value so far / best known) after the "
            "start, or of the difference where a best known value is not positive.",
            **{
                f"evaluations_to_{to}": f"integer: Evaluations until {near}."
                for to, near in _NEAR.items()
            },
            **{
                f"evaluations_beyond_start_to_{to}": "integer: The same, after the start."
                for to in _NEAR
            },
            **{f"time_to_{to}_s": f"real: CPU time until {near}." for to, near in _NEAR.items()},
        ),
    ),
    Table(
        "summary",
        "one optimizer on one corpus",
        columns(
            **_CORPUS_OPTIMIZER,
            runs=_RUNS,
            mean="real: Mean final value.",
            std="real: Sample standard deviation of the final value.",
            min="real: Lowest final value.",
            max="real: Highest final value.",
            median="real: Median final value.",
            confirmed_mean="real: Mean value of the best points on unseen seeds.",
            confirmed_std="real: Its sample standard deviation over runs.",
            best_T_median="real: Median number of topics of the lowest value.",
            evaluations_mean="real: Mean number of distinct points evaluated.",
            duration_s_mean="real: Mean summed wall-clock time of a study, in seconds.",
            area_under_curve_median="real: Median area under the curve.",
        ),
    ),
    Table("comparisons", "one pair of optimizers on one corpus, by one measure", _PAIR),
    Table("against_control", "one optimizer against random search, by one measure", _PAIR),
    Table(
        "rankings",
        "one optimizer on one corpus, by one measure",
        columns(
            **_CORPUS_OPTIMIZER,
            measure=_MEASURE,
            average_rank="real: Average rank over runs; 1 is the lowest value.",
            runs=_RUNS,
            chi2="real: Friedman's chi-squared statistic.",
            kendalls_w="real: Kendall's W: agreement, from 0 (none) to 1.",
            p_value=_P_VALUE,
            conclusion=_CONCLUSION,
        ),
    ),
)

#: metrics of the trainings in the table ``steps``
STEP_METRICS = (
    *columns(
        prediction_loss="real: Binary cross-entropy of the predicted winners of duels.",
        accuracy="real: Fraction of duels whose winner is predicted.",
        policy_loss="real: Policy loss; in the policy phase.",
        simple_regret="real: Regret of the best point of the trajectories.",
        error="real: Squared error of the scores; in the training on curves.",
        excess="real: Log-perplexity of the best T above the minimum of its curve.",
        eval_random_simple_regret="real: Final simple regret of random search.",
        eval_random_simple_regret_all_steps="real: Mean simple regret of random search.",
    ),
    *(
        Column(f"eval_{name}", "real", meaning, better="lower")
        for name, meaning in (
            ("simple_regret", "Final simple regret on held-out functions."),
            ("simple_regret_all_steps", "Mean simple regret over all steps."),
        )
    ),
    *columns(
        eval_evaluations="real lower: Mean evaluations until close, on held-out curves whose start "
        "is not; steps + 1 if never.",
        eval_within_5="real higher: Fraction of held-out curves close within 5 evaluations.",
    ),
)
