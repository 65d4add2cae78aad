"""Measurement of systems in turns, so that a drifting machine affects all systems alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from secondguess.bench.config import BenchConfig
from secondguess.bench.costs import ForwardTimer
from secondguess.bench.systems import Run, System
from secondguess.errors import BadInputError
from secondguess.workloads.loading import interleave

WARM_UP_TOKENS = 32

Progress = Callable[[int, int, str], None]
"""Callback with (steps done, steps in total, current step), before each step and once at the end."""


@dataclass(frozen=True, order=True)
class Setting:
    """Temperature and batch size; systems are compared within one setting."""

    temperature: float
    batch_size: int = 1


@dataclass(frozen=True)
class Batch:
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
        prompts = [index for index, each in enumerate(tasks) if each == task]
        for start in range(0, len(prompts), size):
            chosen = [prompts[(start + step) % len(prompts)] for step in range(size)]
            batches.append(Batch(tuple(chosen), task))
    return sorted(batches, key=lambda batch: batch.prompts[0])


def turns(
    systems: Sequence[System], temperatures: Sequence[float], index: int
) -> Iterator[tuple[float, System]]:
    """Iterate over temperatures and systems for batch `index`, in reverse on odd ones (ABBA).

    A machine that slowly speeds up or slows down then affects all systems alike.
    """
    order = [(temperature, system) for temperature in temperatures for system in systems]
    return iter(order if index % 2 == 0 else reversed(order))


@dataclass
class Measurement:
    """Runs of every system, batch by batch; at batch size 1 a batch is a prompt.

    Args:
        prompts: token ids of each prompt.
        tasks: the task of each prompt; by default all prompts have the same task.
        finished: by batch size, the batches that every system has decoded, each with its runs by
            system and temperature.
    """

    systems: Sequence[System]
    prompts: Sequence[Sequence[int]]
    config: BenchConfig
    probe: ForwardTimer
    tasks: Sequence[str] = ()
    batches: Mapping[int, Sequence[Batch]] = field(init=False)
    finished: dict[int, list[tuple[Batch, dict[tuple[str, float], Run]]]] = field(init=False)

    def __post_init__(self) -> None:
        tasks = self.tasks or [""] * len(self.prompts)
        self.batches = {size: make_batches(tasks, size) for size in self.config.batch_sizes}
        self.finished = {size: [] for size in self.batches}

    def run(self, progress: Progress) -> bool:
        """Run all batches; return False if Ctrl-C came before the last one.

        Raises:
            KeyboardInterrupt: Ctrl-C before any batch was finished.
            BadInputError: a system that generated another number of tokens than requested.
        """
        temperatures = self.config.temperatures
        total = sum(
            len(batches) * len(temperatures) * len(self._systems_at(size))
            for size, batches in self.batches.items()
        )
        progress(0, total, "warm-up")
        self._warm_up()
        done = 0
        # Batches of all sizes are interleaved evenly over the run.
        schedule = interleave(
            [[(size, index) for index in range(len(batches))] for size, batches in self.batches.items()]
        )
        try:
            for size, index in schedule:
                runs = {}
                for temperature, system in turns(self._systems_at(size), temperatures, index):
                    what = f"prompt {index + 1}" if size == 1 else f"batch {index + 1} of {size} prompts"
                    progress(done, total, f"{what}, temperature {temperature:g}: {system.name}")
                    runs[system.name, temperature] = self._measure(system, size, index, temperature)
                    done += 1
                self.probe.sample()
                # Recorded once all systems ran the batch: medians must be over the same prompts.
                self.finished[size].append((self.batches[size][index], runs))
        except KeyboardInterrupt:
            if not self.finished_prompts:
                raise
            return False
        progress(total, total, "done")
        return True

    @property
    def finished_prompts(self) -> set[int]:
        """Indices of the prompts that every system has continued, at some batch size."""
        return {
            index for of_size in self.finished.values() for batch, _ in of_size for index in batch.prompts
        }

    def finished_runs(self) -> dict[str, dict[Setting, list[Run]]]:
        """Return the runs of finished batches by system and setting; a setting without any is absent."""
        return {
            system.name: {
                Setting(temperature, size): [
                    runs[system.name, temperature] for _, runs in self.finished[size]
                ]
                for temperature in self.config.temperatures
                for size in self.batches
                if self.finished[size] and system in self._systems_at(size)
            }
            for system in self.systems
        }

    def finished_tasks(self) -> dict[int, list[str]]:
        """Return the task of each finished batch, by batch size."""
        return {size: [batch.task for batch, _ in of_size] for size, of_size in self.finished.items()}

    def notes(self) -> list[str]:
        """Return notes on prompts repeated to fill batches and on texts of other lengths."""
        notes = []
        for size, batches in self.batches.items():
            rows = size * len(batches)
            if repeated := rows - len(self.prompts):
                notes.append(
                    f"batch size {size}: {repeated} of {rows} rows of the batches repeat a prompt of the same task, to "
                    "fill the last batch"
                )
        wanted, runs = self.config.num_tokens, self.finished_runs()
        for system in self.systems:
            lengths = [run.num_tokens for of_setting in runs[system.name].values() for run in of_setting]
            others = [length for length in lengths if length != wanted]
            if not system.exact_length and others:
                notes.append(
                    f"{system.name} wrote {min(others)} to {max(others)} tokens instead of {wanted} in {len(others)} of "
                    f"{len(lengths)} runs: its tokens/s stand for shorter or longer texts"
                )
        return notes

    def _systems_at(self, size: int) -> list[System]:
        return [system for system in self.systems if size == 1 or system.batches]

    def _warm_up(self) -> None:
        num_tokens = min(WARM_UP_TOKENS, self.config.num_tokens)
        for size, batches in self.batches.items():
            prompts = [self.prompts[index] for index in batches[0].prompts]
            for temperature, system in turns(self._systems_at(size), self.config.temperatures, 0):
                system.generate_batch(prompts, num_tokens, temperature, self.config.seed)
        self.probe.warm_up()
        for system in self.systems:
            system.reset()

    def _measure(self, system: System, size: int, index: int, temperature: float) -> Run:
        num_tokens = self.config.num_tokens
        prompts = [self.prompts[each] for each in self.batches[size][index].prompts]
        run = system.generate_batch(prompts, num_tokens, temperature, self.config.seed + index)
        if system.exact_length and set(run.row_lengths) != {num_tokens}:
            got = ", ".join(map(str, sorted(set(run.row_lengths))))
            raise BadInputError(
                f"expected {num_tokens} tokens from {system.name} to be comparable, got {got}"
            )
        return run
