"""Measurement of systems in turns, so that a drifting machine affects all systems alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from secondguess.bench.config import BenchConfig
from secondguess.bench.costs import ForwardTimer
from secondguess.bench.systems import Run, System
from secondguess.bench.workloads import interleave
from secondguess.errors import BadInputError

WARM_UP_TOKENS = 32

Progress = Callable[[int, int, str], None]
"""Callback with (runs done, runs in total, current run), before each run and once at the end."""


@dataclass(frozen=True, order=True)
class Setting:
    """Temperature and batch size; systems are compared within one setting."""

    temperature: float
    batch_size: int = 1


@dataclass(frozen=True)
class Batch:
    """Prompts of one task that are decoded together, by their indices in the workload."""

    places: tuple[int, ...]
    task: str


def make_batches(tasks: Sequence[str], size: int) -> list[Batch]:
    """Return batches of exactly `size` prompts that cover every prompt, ordered by first prompt.

    If a task's prompts do not fill its last batch, its first prompts are repeated: a batch of
    another size would be a different measurement.

    >>> [batch.places for batch in make_batches(["a", "b", "a", "a"], 2)]
    [(0, 2), (1, 1), (3, 0)]
    """
    batches = []
    for task in dict.fromkeys(tasks):
        places = [place for place, each in enumerate(tasks) if each == task]
        for start in range(0, len(places), size):
            chosen = [places[(start + step) % len(places)] for step in range(size)]
            batches.append(Batch(tuple(chosen), task))
    return sorted(batches, key=lambda batch: batch.places[0])


def num_repeated(batches: Sequence[Batch], num_prompts: int) -> int:
    """Return the number of batch entries that repeat a prompt of another entry."""
    return sum(len(batch.places) for batch in batches) - num_prompts


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
    """

    systems: Sequence[System]
    prompts: Sequence[Sequence[int]]
    config: BenchConfig
    probe: ForwardTimer
    tasks: Sequence[str] = ()
    runs: dict[str, dict[Setting, list[Run]]] = field(default_factory=dict)
    batches: Mapping[int, Sequence[Batch]] = field(init=False)

    def __post_init__(self) -> None:
        tasks = self.tasks or [""] * len(self.prompts)
        self.batches = {size: make_batches(tasks, size) for size in self.config.batch_sizes}

    def run(self, progress: Progress) -> bool:
        """Run all batches; return False if Ctrl-C came before the last one.

        Raises:
            KeyboardInterrupt: Ctrl-C before any batch was finished.
            BadInputError: a system that generated another number of tokens than requested.
        """
        temperatures = self.config.temperatures
        self.runs = {
            system.name: {Setting(each, size): [] for each in temperatures for size in self._sizes_of(system)}
            for system in self.systems
        }
        total = sum(
            len(batches) * len(temperatures) * len(self._at(size)) for size, batches in self.batches.items()
        )
        progress(0, total, "warm-up")
        self._warm_up()
        done = 0
        try:
            for size, index in self._schedule():
                finished = []
                for temperature, system in turns(self._at(size), temperatures, index):
                    what = f"prompt {index + 1}" if size == 1 else f"batch {index + 1} of {size} prompts"
                    progress(done, total, f"{what}, temperature {temperature:g}: {system.name}")
                    finished.append((temperature, system, self._measure(system, size, index, temperature)))
                    done += 1
                self.probe.sample()
                # Recorded once all systems ran the batch: medians must be over the same prompts.
                for temperature, system, run in finished:
                    self.runs[system.name][Setting(temperature, size)].append(run)
        except KeyboardInterrupt:
            if not self.num_finished:
                raise
            return False
        progress(total, total, "done")
        return True

    @property
    def finished_places(self) -> set[int]:
        """Indices of the prompts that every system has continued, at some batch size."""
        return {
            place
            for size, batches in self.batches.items()
            for batch in batches[: self._num_finished_at(size)]
            for place in batch.places
        }

    @property
    def num_finished(self) -> int:
        return len(self.finished_places)

    def finished_runs(self) -> dict[str, dict[Setting, list[Run]]]:
        """Return the runs of finished batches; Ctrl-C may leave another one partly recorded."""
        return {
            system: {
                setting: runs[: self._num_finished_at(setting.batch_size)]
                for setting, runs in by_setting.items()
                if self._num_finished_at(setting.batch_size)
            }
            for system, by_setting in self.runs.items()
        }

    def finished_tasks(self) -> dict[int, list[str]]:
        """Return the task of each finished batch, by batch size."""
        return {
            size: [batch.task for batch in batches[: self._num_finished_at(size)]]
            for size, batches in self.batches.items()
        }

    def notes(self) -> list[str]:
        """Return notes on prompts repeated to fill batches and on texts of other lengths."""
        notes = []
        for size, batches in self.batches.items():
            if repeated := num_repeated(batches, len(self.prompts)):
                places = sum(len(batch.places) for batch in batches)
                notes.append(
                    f"batch size {size}: {repeated} of {places} places of the batches are filled with prompts of the "
                    "same task that another place has already"
                )
        wanted = self.config.num_tokens
        for system in self.systems:
            lengths = [run.num_tokens for runs in self.runs[system.name].values() for run in runs]
            others = [length for length in lengths if length != wanted]
            if not system.exact_length and others:
                notes.append(
                    f"{system.name} wrote {min(others)} to {max(others)} tokens instead of {wanted} in {len(others)} of "
                    f"{len(lengths)} runs: its tokens/s stand for shorter or longer texts"
                )
        return notes

    def _sizes_of(self, system: System) -> list[int]:
        return [size for size in self.config.batch_sizes if size == 1 or system.batches]

    def _at(self, size: int) -> list[System]:
        return [system for system in self.systems if size in self._sizes_of(system)]

    def _num_finished_at(self, size: int) -> int:
        return min(
            len(runs)
            for by_setting in self.runs.values()
            for setting, runs in by_setting.items()
            if setting.batch_size == size
        )

    def _schedule(self) -> list[tuple[int, int]]:
        """Return (batch size, batch index) pairs, with sizes interleaved evenly over the run."""
        return interleave(
            [[(size, index) for index in range(len(batches))] for size, batches in self.batches.items()]
        )

    def _warm_up(self) -> None:
        num_tokens = min(WARM_UP_TOKENS, self.config.num_tokens)
        for size, batches in self.batches.items():
            prompts = [self.prompts[place] for place in batches[0].places]
            for temperature, system in turns(self._at(size), self.config.temperatures, 0):
                system.generate_batch(prompts, num_tokens, temperature, self.config.seed)
        self.probe.warm_up()
        for system in self.systems:
            system.reset()

    def _measure(self, system: System, size: int, index: int, temperature: float) -> Run:
        num_tokens = self.config.num_tokens
        prompts = [self.prompts[place] for place in self.batches[size][index].places]
        run = system.generate_batch(prompts, num_tokens, temperature, self.config.seed + index)
        if system.exact_length and set(run.row_lengths) != {num_tokens}:
            got = ", ".join(map(str, sorted(set(run.row_lengths))))
            raise BadInputError(
                f"expected {num_tokens} tokens from {system.name} to be comparable, got {got}"
            )
        return run
