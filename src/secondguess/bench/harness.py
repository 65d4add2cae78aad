"""Systems in turn on the same prompts: the part of a benchmark that has to be careful."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from secondguess.api import default_drafter, encode
from secondguess.bench.costs import CostProbe, stretch
from secondguess.bench.provenance import gather
from secondguess.bench.report import Report, Workbench, make_cost_table, make_results
from secondguess.bench.systems import Models, Run, Speculator, System, draft_models, public_name
from secondguess.bench.workloads import Workload, load_workload
from secondguess.errors import BadInputError
from secondguess.runtime.loading import LoadedModel

PEERS = ("transformers",)
WARM_UP_TOKENS = 32

Progress = Callable[[int, int, str], None]
"""Told (runs done, runs in all, what is running) before each run and once at the end."""


@dataclass(frozen=True)
class BenchConfig:
    """What to compare, on what, under which conditions.

    Args:
        model: the target.
        drafters: names of the drafters to compare; None takes the target's default one, `ngram` and `suffix`.
        against: other libraries to run beside ours, of `PEERS`.
        prompts: a JSONL file with a `prompt` per line, or `builtin`; None takes HumanEval where it lies beside
            the checkout, else `builtin`.
        num_prompts: how many of them, evenly spread.
        num_tokens: new tokens per prompt, exactly.
        temperatures: each is a table of its own.
        draft_lengths: constant lengths that model drafters (ours and the peers') are run with, beside their
            defaults.
        dtype: of all weights; `auto` picks bfloat16 where the processor has it.
        device: `auto`, `cpu` or `cuda[:N]`.
        num_threads: of torch, for everybody.
        seed: of the sampled texts and of the bootstrap.
        name: of the saved files.

    Raises:
        BadInputError: a value that makes no sense.
    """

    model: str = "builtin"
    drafters: tuple[str, ...] | None = None
    against: tuple[str, ...] = ()
    prompts: str | None = None
    num_prompts: int = 40
    num_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    draft_lengths: tuple[int, ...] = (3, 5, 8)
    dtype: str = "bfloat16"
    device: str = "cpu"
    num_threads: int = 2
    seed: int = 0
    name: str = "bench"

    def __post_init__(self) -> None:
        for option in ("num_prompts", "num_tokens", "num_threads"):
            _require(getattr(self, option) >= 1, option, "at least 1", getattr(self, option))
        _require(bool(self.temperatures), "temperatures", "at least one temperature", self.temperatures)
        _require(
            all(0 <= each <= 100 for each in self.temperatures), "temperatures", "0 to 100", self.temperatures
        )
        _require(
            all(each >= 1 for each in self.draft_lengths), "draft_lengths", "at least 1", self.draft_lengths
        )
        _require(self.seed >= 0, "seed", "at least 0", self.seed)
        for option in ("temperatures", "draft_lengths", "against", "drafters"):
            values = getattr(self, option) or ()
            _require(len(set(values)) == len(values), option, "different values", values)
        for peer in self.against:
            _require(peer in PEERS, "against", f"one of {', '.join(PEERS)}", peer)
        plain_name = self.name.replace("-", "").replace("_", "").isalnum()
        _require(plain_name, "name", "letters, digits, - and _ (it becomes a file name)", self.name)

    @property
    def drafters_to_run(self) -> tuple[str, ...]:
        if self.drafters is not None:
            return self.drafters
        return tuple(dict.fromkeys((default_drafter(self.model), "ngram", "suffix")))


def _require(holds: bool, option: str, expected: str, got: object) -> None:
    if not holds:
        raise BadInputError(f"expected {option} to be {expected}, got {got!r}")


def run_bench(config: BenchConfig, progress: Progress = lambda done, total, what: None) -> Report:
    """Run the comparison.

    Ctrl-C ends it early with a report over the prompts that were finished (`complete` is False then); before
    the first of them is finished there is nothing to report and KeyboardInterrupt is raised.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the model's context.
        CheckpointError: a model that cannot be loaded.
    """
    workload = load_workload(config.prompts, config.num_prompts)
    if workload.note:
        progress(0, 0, workload.note)
    with _threads(config.num_threads):
        models = Models(config.model, config.dtype, config.device)
        prompts = encode_workload(models.target, workload, config.num_tokens)
        systems = make_systems(config, models)
        probe = CostProbe(
            models.target.runtime,
            {name: models.draft_model(name).runtime for name in draft_models(systems)},
            context=typical_context(prompts, config.num_tokens),
        )
        measured = Measurement(systems, prompts, config, probe)
        complete = measured.run(progress)
    return make_report(config, workload, models, measured, complete)


@dataclass
class Measurement:
    """Runs of every system, prompt by prompt."""

    systems: Sequence[System]
    prompts: Sequence[Sequence[int]]
    config: BenchConfig
    probe: CostProbe
    runs: dict[str, dict[float, list[Run]]] = field(default_factory=dict)

    def run(self, progress: Progress) -> bool:
        """Measure; False when Ctrl-C came before the last prompt."""
        temperatures = self.config.temperatures
        self.runs = {system.name: {each: [] for each in temperatures} for system in self.systems}
        total = len(self.prompts) * len(temperatures) * len(self.systems)
        progress(0, total, "warm-up")
        self._warm_up()
        done = 0
        try:
            for index in range(len(self.prompts)):
                finished = []
                for temperature, system in turns(self.systems, temperatures, index):
                    progress(done, total, f"prompt {index + 1}, temperature {temperature:g}: {system.name}")
                    finished.append((temperature, system, self._measure(system, index, temperature)))
                    done += 1
                self.probe.sample()
                # A prompt counts once all systems have had it: medians must be over the same prompts.
                for temperature, system, run in finished:
                    self.runs[system.name][temperature].append(run)
        except KeyboardInterrupt:
            if not self.num_finished:
                raise
            return False
        progress(total, total, "done")
        return True

    @property
    def num_finished(self) -> int:
        """Prompts that every system has continued."""
        return min(len(runs) for by_temperature in self.runs.values() for runs in by_temperature.values())

    def finished_runs(self) -> dict[str, dict[float, list[Run]]]:
        """The runs of those prompts: Ctrl-C may have come while those of another were being noted."""
        count = self.num_finished
        return {
            system: {temperature: runs[:count] for temperature, runs in by_temperature.items()}
            for system, by_temperature in self.runs.items()
        }

    def _warm_up(self) -> None:
        num_tokens = min(WARM_UP_TOKENS, self.config.num_tokens)
        for temperature, system in turns(self.systems, self.config.temperatures, 0):
            system.generate(self.prompts[0], num_tokens, temperature, self.config.seed)
        self.probe.warm_up()

    def _measure(self, system: System, index: int, temperature: float) -> Run:
        num_tokens = self.config.num_tokens
        run = system.generate(self.prompts[index], num_tokens, temperature, self.config.seed + index)
        if len(run.tokens) != num_tokens:
            raise BadInputError(
                f"expected {num_tokens} tokens from {system.name} to be comparable, got {len(run.tokens)}"
            )
        return run


def turns(
    systems: Sequence[System], temperatures: Sequence[float], index: int
) -> Iterator[tuple[float, System]]:
    """Who runs when on prompt `index`: everybody in order on even prompts, in reverse on odd ones (ABBA).

    A machine that slowly speeds up or slows down then favours nobody.
    """
    order = [(temperature, system) for temperature in temperatures for system in systems]
    return iter(order if index % 2 == 0 else reversed(order))


def make_systems(config: BenchConfig, models: Models) -> list[System]:
    """Ours plain, ours with every drafter (model drafters at each draft length too), then the peers."""
    systems: list[System] = [Speculator(models, "none")]
    for drafter in config.drafters_to_run:
        default = Speculator(models, drafter)
        systems.append(default)
        if default.draft_model is not None:
            systems += [Speculator(models, drafter, f"fixed:{length}") for length in config.draft_lengths]
    if "transformers" in config.against:
        systems += _transformers_systems(config, models, draft_models(systems))
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise BadInputError(f"expected drafters whose names differ in a report, got {', '.join(names)}")
    return systems


def _transformers_systems(config: BenchConfig, models: Models, draft_names: Sequence[str]) -> list[System]:
    from secondguess.bench.peers import StockModel, transformers_systems

    def stock(loaded: LoadedModel) -> StockModel:
        return StockModel(loaded.path, getattr(torch, loaded.dtype), loaded.runtime.device)

    assistants = {name: stock(models.draft_model(name)) for name in draft_names}
    return transformers_systems(stock(models.target), assistants, config.draft_lengths)


def encode_workload(target: LoadedModel, workload: Workload, num_tokens: int) -> list[list[int]]:
    """Token ids of all prompts, refused when one leaves no room for its continuation."""
    prompts = [encode(target, prompt) for prompt in workload.prompts]
    longest, room = max(map(len, prompts)), target.runtime.context_length - num_tokens
    if longest > room:
        raise BadInputError(
            f"expected prompts of at most {room} tokens (the context less {num_tokens} new ones), got one of "
            f"{longest} in {workload.name}; take other prompts or fewer tokens"
        )
    return prompts


def typical_context(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Tokens of the prompts, as many as a row of median length holds halfway through."""
    length = int(median(len(prompt) for prompt in prompts)) + num_tokens // 2
    return stretch([token for prompt in prompts for token in prompt], length)


def make_report(
    config: BenchConfig, workload: Workload, models: Models, measured: Measurement, complete: bool
) -> Report:
    """Everything that can be said about the prompts that were finished."""
    systems, probe = measured.systems, measured.probe
    ours = {
        system.name: probe.costs(system.draft_model) for system in systems if isinstance(system, Speculator)
    }
    loaded = {config.model: models.target, **models.draft_models}
    return Report(
        name=config.name,
        complete=complete,
        workbench=Workbench(
            workload=workload.name,
            workload_sha256=workload.sha256,
            workload_note=workload.note,
            num_prompts=measured.num_finished,
            num_prompts_asked=len(workload.prompts),
            num_tokens=config.num_tokens,
            median_prompt_tokens=median(len(prompt) for prompt in measured.prompts[: measured.num_finished]),
        ),
        costs=make_cost_table(
            probe.context_length,
            {
                None: probe.costs(),
                **{public_name(name): probe.costs(name) for name in models.draft_models},
            },
        ),
        results=make_results(systems, measured.finished_runs(), ours, config.seed),
        provenance=gather(
            num_threads=config.num_threads,
            device=models.target.device,
            dtype=models.target.dtype,
            seed=config.seed,
            models={public_name(name): Path(each.path) for name, each in loaded.items()},
            runtimes={public_name(name): each.runtime_in_words for name, each in loaded.items()},
        ),
    )


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Run with so many torch threads, and give back the former number."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
