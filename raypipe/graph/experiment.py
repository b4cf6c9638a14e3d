"""Experiment, stage and unit: the work of a configuration and its dependencies.

- An **experiment** is a Python module with a variable ``EXPERIMENT``. Its settings are a pydantic
  model whose fields are the sections of the YAML file.
- ``stages`` turns validated settings into **stages** that depend on each other.
- A stage holds **units**: pieces of work with one stored result each.
- The framework composes each unit's **identity** (:mod:`raypipe.graph.identity`). A stored unit
  with the same identity is not computed again; one with another identity is never overwritten.
- A stage **reads** only the settings that its identity holds: ``context.settings`` has no others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from raypipe.graph.identity import Identity, fingerprint
from raypipe.store.ledger import LedgerView
from raypipe.store.run_directory import BASE, variant_name

if TYPE_CHECKING:
    import pandas as pd

    from raypipe.report.parts import Section
    from raypipe.store.ledger import Ledger
    from raypipe.store.run_directory import RunDirectory
    from raypipe.store.tables import Column, Table
    from raypipe.training.job import JobTask
    from raypipe.training.settings import TrainStageSettings
    from raypipe.training.weights import InitialWeights


@dataclass(frozen=True)
class Unit:
    """A piece of work whose result is stored once, under its key.

    Args:
        key: the name in the run directory, such as ``train_small`` or ``lda/20news/ga/0``.
        literals: plain values that decide the result in addition to settings and needs: the
            fingerprint of the data, a seed, the name of a method. Never a path or an address.
        needs: the stages whose results it uses; by default all that its stage needs. A stage
            starts when the needs of its first units are done.
        budget: how much of an extensible result to compute, such as the evaluations of a study.
        budget_key: the configuration key that sets the budget, for messages.
        extensible: whether its result is the beginning of that of every larger budget.
        identity: composed by the framework, as ``extents``.
        extents: of each stage that it needs, also through others, how much its units compute. A
            result is out of date once one of them has gone on. Plain lists, as the ledger has them.

    """

    key: str
    literals: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] | None = None
    budget: int = 1
    budget_key: str = ""
    extensible: bool = True
    identity: Identity | None = None
    extents: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def composed(self) -> Identity:
        """The identity. Raises ValueError before the framework composed it."""
        if self.identity is None:
            raise ValueError(f"unit {self.key}: its identity was not composed")
        return self.identity

    @property
    def fingerprint(self) -> str:
        """The hash of the identity."""
        return self.composed.fingerprint


class Units(Sequence[Unit]):
    """Units without needs that differ only in key and literals, made whenever they are asked for.

    There may be a million: in memory they would take as much as all results.

    Args:
        places: one for each unit.
        parts: returns the key and the literals of the unit of a place.
        identity: returns the identity with literals; None before the framework composed it.

    """

    def __init__(
        self,
        places: Sequence[int],
        parts: Callable[[int], tuple[str, Mapping[str, Any]]],
        identity: Callable[[Mapping[str, Any]], Identity | None] = lambda _: None,
    ) -> None:
        self._places, self._parts, self._identity = places, parts, identity

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Units(self._places[place], self._parts, self._identity)
        return self._unit(self._places[place])

    def __iter__(self) -> Iterator[Unit]:
        return map(self._unit, self._places)

    def composed(self, identity: Callable[[Mapping[str, Any]], Identity]) -> Units:
        """Return them with identities."""
        return Units(self._places, self._parts, identity)

    def where(self, condition: Callable[[Unit], bool]) -> Units:
        """Return those that meet a condition."""
        places = (place for place in self._places if condition(self._unit(place)))
        return Units(array("L", places), self._parts, self._identity)

    def _unit(self, place: int) -> Unit:
        key, literals = self._parts(place)
        return Unit(key, literals, identity=self._identity(literals))


@dataclass(frozen=True)
class Training:
    """The training of a stage: its section of the configuration, and the task.

    ``build_task`` receives the settings that the stage reads, and the run directory with the
    results of earlier stages. ``raypipe fit``, before which no stage ran, passes None: the task
    then generates samples of the largest size. ``initial`` are the weights that it starts from, if
    they are another run's. ``settings_view`` is set by the framework.
    """

    settings: TrainStageSettings
    build_task: Callable[[Any, RunDirectory | None], JobTask]
    settings_view: Any = None
    initial: InitialWeights | None = None

    def length_key(self, stage: str) -> str:
        """Return the configuration key of the length of a stage's training."""
        return f"{stage}.training.{self.settings.training.length_in}"

    def task(self, run_dir: RunDirectory | None) -> JobTask:
        """Return the task for a run directory, or for none."""
        return self.build_task(self.settings_view, run_dir)


@dataclass(frozen=True)
class Stage:
    """A step of the experiment.

    Args:
        name: the stage; its settings are the section of this name.
        run: computes the unfinished units, which the ``todo()`` of its argument, a
            :class:`~raypipe.graph.context.StageContext`, lists.
        units: by default one, named after the stage. The framework finishes it when ``run``
            returns.
        needs: the stages whose results it uses.
        reads: dotted keys of the settings that ``context.settings`` has; by default the stage's
            own section and every section that is not another stage's.
        workload: the size of a unit in a few words, such as ``200 steps of 16 samples``.
        always_rerun: whether it runs again after any stage that it needs ran, as summaries do.
        training: its training run, which a sweep can vary.
        on_gpu: whether it works on GPUs if there are any.
        alone: whether no other stage may run at the same time: it measures the speed of CPUs.
        strict_code: whether its stored results are refused, not kept with a warning, once the
            experiment's source code changed.
        verify: raises ValueError if the stored result of a unit lacks what the settings now ask of
            it; called with the rows that the stage sees, and the unit.
        forget: removes the stored parts of units whose needs have gone on since, such as the
            history of a search; not needed for rows that a new computation replaces.
        settings: the settings of its variant; set by the framework, as all that follow.
        variant: the point of the matrix that it belongs to.
        variants: the variant of each stage that it needs, also through others, by name.

    """

    name: str
    run: Callable[[Any], None]
    units: Sequence[Unit] = ()
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] | None = None
    workload: str = ""
    always_rerun: bool = False
    training: Training | None = None
    on_gpu: bool = False
    alone: bool = False
    strict_code: bool = False
    verify: Callable[[Ledger, Unit], None] | None = None
    forget: Callable[[Any, Sequence[Unit]], None] | None = None
    settings: BaseModel | None = None
    variant: str = BASE
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The stage's name in the graph of all variants."""
        return variant_name(self.name, self.variant)

    @property
    def needed_keys(self) -> tuple[str, ...]:
        """The keys of the stages that it needs."""
        return tuple(variant_name(name, self.variants.get(name, BASE)) for name in self.needs)

    @property
    def fingerprint(self) -> str:
        """The hash of the identities of all units."""
        prints = [unit.fingerprint for unit in self.units]
        return prints[0] if len(prints) == 1 else fingerprint(prints)

    @cached_property
    def unit_needs(self) -> Mapping[str, frozenset[str]]:
        """By unit, the keys of the stages that must end before it can be computed; empty if none.

        Needs of the stage that no unit names apply to all units.
        """
        if not self.needs:
            return {}
        keys = dict(zip(self.needs, self.needed_keys, strict=True))
        named = {need for unit in self.units for need in unit.needs or ()}
        common = frozenset(key for need, key in keys.items() if need not in named)
        return {
            unit.key: frozenset(self.needed_keys)
            if unit.needs is None
            else common.union(keys[need] for need in unit.needs if need in keys)
            for unit in self.units
        }

    @cached_property
    def starts(self) -> Set[frozenset[str]]:
        """The sets of stages one of which has to end before the stage can start."""
        return {*self.unit_needs.values()} or {frozenset(self.needed_keys)}

    def seen(self, ledger: Ledger) -> Ledger:
        """Return the ledger as the stage sees it: its own rows, and those of what it needs."""
        return LedgerView(ledger, self.variant, self.variants.values(), self.key)

    def files(self, run_dir: RunDirectory) -> RunDirectory:
        """Return the run directory with the names of files of the stage's variant."""
        variants = {**self.variants, self.name: self.variant}
        return replace(run_dir, variant=self.variant, variants=tuple(variants.items()))


@dataclass(frozen=True)
class Experiment:
    """An experiment: its settings and stages, and what it adds to tables and report.

    Args:
        name: names run directories and rows.
        version: part of every unit's identity; raise it when results change.
        settings: the model of the configuration's sections.
        stages: returns the stages; it may read data, and raises ``ConfigError`` (or any
            ``ValueError``) for settings that cannot work.
        report: returns its sections of the report from the tables.
        tables: declarations of the tables that its stages write.
        step_metrics: columns ``eval_...`` that its training runs add to the table ``steps``.
        asked: returns the keys of the units that its settings ask for, if a later command may ask
            for others; the report shows no failures of other units.

    """

    name: str
    version: int
    settings: type[BaseModel]
    stages: Callable[[Any], Sequence[Stage]]
    report: Callable[[Mapping[str, pd.DataFrame]], Sequence[Section]] | None = None
    tables: tuple[Table, ...] = ()
    step_metrics: tuple[Column, ...] = ()
    asked: Callable[[], Collection[str]] | None = None


def in_order(stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages so that each follows what it needs, otherwise in the given order.

    Raises:
        ValueError: a need that is not a stage, a name used twice, or a cycle.

    """
    keyed = {stage.key: stage for stage in stages}
    if len(keyed) != len(stages):
        raise ValueError("two stages have the same name")
    ordered: dict[str, Stage] = {}

    def visit(stage: Stage, above: tuple[str, ...]) -> None:
        if stage.key in ordered:
            return
        if stage.key in above:
            raise ValueError(f"stages need each other: {' -> '.join((*above, stage.key))}")
        for need in stage.needed_keys:
            if need not in keyed:
                raise ValueError(f"stage {stage.key!r} needs {need!r}, which does not exist")
            visit(keyed[need], (*above, stage.key))
        ordered[stage.key] = stage

    for stage in stages:
        visit(stage, ())
    return list(ordered.values())


def with_needs(stages: Sequence[Stage], wanted: Sequence[str]) -> list[Stage]:
    """Return all variants of the wanted stages and everything they need, in order."""
    ordered, keep = in_order(stages), set[str]()
    for stage in reversed(ordered):
        if stage.name in wanted or stage.key in keep:
            keep.update((stage.key, *stage.needed_keys))
    return [stage for stage in ordered if stage.key in keep]
