"""Measurement of systems in turns, so that a drifting machine affects all systems alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from secondguess.bench.config import BenchConfig, TuneConfig
from secondguess.bench.costs import ForwardTimer
from secondguess.bench.systems import Run, System
from secondguess.errors import BadInputError
from secondguess.workloads.loading import interleave

WARM_UP_TOKENS = 32

Progress = Callable[[int, int, str], None]
"""Callback with (steps done, steps in total, current step), before each step and once at the end."""


class Setting(NamedTuple):
    """Temperature and batch size; systems are compared within one setting."""

    temperature: float
    batch_size: int = 1


class Batch(NamedTuple):
    """Prompts of one task that are decoded together, by their indices in the workload."""

    prompts: tuple[int, ...]
    task: str = ""


def make_batches(tasks: Sequence[str], size: int) -> list[Batch]:
    """Return batches of exactly `size` prompts that cover every prompt, ordered by first prompt.

    If a task's prompts do not fill its last batch, its first prompts are repeated: a batch of
    another size would be a different measurement.

    >>> [batch.prompts for batch in make_batches(["a", "b", "a", "a"], 2)]
    [(0, 2), (1, 1), (3, 0)]
    """
    batches = []
    for task in dict.fromkeys(tasks):
        prompts = [index for index, its_task in enumerate(tasks) if its_task == task]
        for start in range(0, len(prompts), size):
            chosen = [prompts[(start + step) % len(prompts)] for step in range(size)]
            batches.append(Batch(tuple(chosen), task))
    return sorted(batches, key=lambda batch: batch.prompts[0])


def turns(
    systems: Sequence[System], temperatures: Sequence[float], index: int
) -> Iterator[tuple[float, System]]:
    """Iterate over temperatures and systems for batch `index`, in reverse on odd ones (ABBA)."""
    order = [(temperature, system) for temperature in temperatures for system in systems]
    return iter(order if index % 2 == 0 else reversed(order))


class Measurement:
    """Runs of systems, batch by batch; at batch size 1 a batch is a prompt.

    `prompts` are token ids, `tasks` has the task of each. Batch i has the seed of the configuration + i.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], tasks: Sequence[str], config: BenchConfig | TuneConfig
    ) -> None:
        self.prompts, self.num_tokens = prompts, config.num_tokens
        self.temperatures, self.seed = config.temperatures, config.seed
        self.batches = {size: make_batches(tasks, size) for size in config.batch_sizes}
        self.forget_runs()

    def forget_runs(self) -> None:
        """Forget all runs; controllers keep their experience."""
        # By setting, batch and system. A batch is recorded once all systems of its turn have decoded it.
        self._runs: dict[Setting, dict[int, dict[str, list[Run]]]] = {
            Setting(temperature, size): {} for temperature in self.temperatures for size in self.batches
        }

    def run(self, systems: Sequence[System], probe: ForwardTimer, progress: Progress) -> bool:
        """Run all batches once; return False if Ctrl-C came before the last one, but after the first."""
        # Batches of all sizes are interleaved evenly over the run.
        schedule = interleave(
            [[(size, index) for index in range(len(batches))] for size, batches in self.batches.items()]
        )
        total = len(self.temperatures) * sum(len(_able(systems, size)) for size, _ in schedule)
        progress(0, total, "warm-up")
        for size in self.batches:
            self.warm_up(systems, size)
        probe.warm_up()
        done = count()
        try:
            for size, index in schedule:
                self.run_batch(systems, size, index, lambda what: progress(next(done), total, what))
                probe.sample()
        except KeyboardInterrupt:
            if not self.finished_prompts:
                raise
            return False
        progress(total, total, "done")
        return True

    def warm_up(self, systems: Sequence[System], size: int, num_tokens: int = WARM_UP_TOKENS) -> None:
        """Run the first batch once and discard what was measured and learnt."""
        prompts = self._prompts_of(size, 0)
        for temperature, system in turns(_able(systems, size), self.temperatures, 0):
            system.generate(prompts, min(num_tokens, self.num_tokens), temperature, self.seed)
            system.reset()

    def run_batch(
        self,
        systems: Sequence[System],
        size: int,
        index: int,
        report: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Run all systems on one batch, in reverse order on every second batch and every second run of it.

        Raises:
            BadInputError: a system that generated another number of tokens than requested.
        """
        prompts, runs = self._prompts_of(size, index), []
        what = f"prompt {index + 1}" if size == 1 else f"batch {index + 1} of {size} prompts"
        past = self._runs[Setting(self.temperatures[0], size)].get(index, {})
        turn = index + max(map(len, past.values()), default=0)
        for temperature, system in turns(_able(systems, size), self.temperatures, turn):
            report(f"{what}, temperature {temperature:g}: {system.name}")
            run = system.generate(prompts, self.num_tokens, temperature, self.seed + index)
            lengths = {len(text) for text in run.texts}
            if system.exact_length and lengths != {self.num_tokens}:
                got = ", ".join(map(str, sorted(lengths)))
                raise BadInputError(
                    f"expected {self.num_tokens} tokens from {system.name} to be comparable, got {got}"
                )
            runs.append((temperature, system.name, run))
        for temperature, name, run in runs:
            of_batch = self._runs[Setting(temperature, size)].setdefault(index, {})
            of_batch.setdefault(name, []).append(run)

    def runs_of(self, system: str, setting: Setting, indices: Iterable[int] | None = None) -> list[Run]:
        """Return the median run of each batch (by default of all) that a system has finished."""
        runs = self._runs[setting]
        chosen = sorted(runs) if indices is None else indices
        finished = [runs[index][system] for index in chosen if system in runs[index]]
        return [sorted(repeated, key=lambda run: run.seconds)[len(repeated) // 2] for repeated in finished]

    def finished_runs(self, systems: Sequence[System]) -> dict[Setting, dict[str, list[Run]]]:
        """Return the runs of finished batches by setting and system, without settings and systems that have none."""
        runs = {
            setting: {system.name: own for system in systems if (own := self.runs_of(system.name, setting))}
            for setting in self._runs
        }
        return {setting: of for setting, of in runs.items() if of}

    @property
    def finished_batches(self) -> dict[int, list[Batch]]:
        """Batches that every system has decoded, by batch size."""
        return {
            size: [batches[index] for index in sorted(self._runs[Setting(self.temperatures[0], size)])]
            for size, batches in self.batches.items()
        }

    @property
    def finished_prompts(self) -> set[int]:
        """Indices of the prompts that every system has continued, at some batch size."""
        finished = self.finished_batches.values()
        return {prompt for batches in finished for batch in batches for prompt in batch.prompts}

    @property
    def notes(self) -> list[str]:
        """Notes on prompts repeated to fill batches."""
        num_rows = {size: size * len(batches) for size, batches in self.batches.items()}
        return [
            f"batch size {size}: {rows - len(self.prompts)} of {rows} rows of the batches repeat a prompt of the same task, "
            "to fill the last batch"
            for size, rows in num_rows.items()
            if rows > len(self.prompts)
        ]

    def _prompts_of(self, size: int, index: int) -> list[Sequence[int]]:
        return [self.prompts[prompt] for prompt in self.batches[size][index].prompts]


def _able(systems: Sequence[System], size: int) -> list[System]:
    """Return the systems that support a batch size."""
    return [system for system in systems if size == 1 or system.batches]
