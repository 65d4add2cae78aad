"""Benchmark configuration: systems, prompts and conditions."""

from __future__ import annotations

from dataclasses import dataclass

from secondguess.api import default_drafter
from secondguess.bench.inventory import all_drafters
from secondguess.bench.server import ServerAddress, is_address
from secondguess.drafters import parse_drafter_name
from secondguess.errors import BadInputError
from secondguess.names import ALL

PEERS = ("transformers",)


@dataclass(frozen=True)
class BenchConfig:
    """Configuration of a benchmark.

    Args:
        model: the target.
        drafters: names of the drafters to compare. None takes the target's default drafter, its
            components, `ngram` and `suffix`. A single `all` takes every drafter available for the
            target, as chain and as tree, without constant draft lengths, and under `controllers`
            instead of the default ones if any are named.
        against: other systems to compare with: libraries from `PEERS`, and servers
            (`http://HOST:PORT,model=NAME`).
        prompts: one or several sources of prompts (see `workloads.load_workload`); None takes
            HumanEval if its file is in the folder `SECONDGUESS_DATA`, else `builtin`.
        num_prompts: number of prompts, spread evenly over the tasks and within each task.
        num_tokens: exact number of new tokens per prompt.
        temperatures: each gets its own table.
        draft_lengths: constant draft lengths at which model drafters (ours and the peers') run,
            besides their defaults.
        dtype, device: of all systems, as in `load`.
        num_threads: torch threads, for all systems; None leaves torch's own number.
        seed: seed of the sampled texts and of the bootstrap.
        name: name of the saved files.
        tasks: only prompts of these tasks; empty for all.
        controllers: controllers with which every drafter of ours runs, besides its default.
        batch_sizes: numbers of prompts that our systems decode together; each gets its own table.

    Raises:
        BadInputError: an invalid value.
    """

    model: str = "builtin"
    drafters: tuple[str, ...] | None = None
    against: tuple[str, ...] = ()
    prompts: str | tuple[str, ...] | None = None
    num_prompts: int = 40
    num_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    draft_lengths: tuple[int, ...] = (3, 5, 8)
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    name: str = "bench"
    tasks: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for option in ("num_prompts", "num_tokens", "num_threads"):
            value = getattr(self, option)
            _require(value is None or value >= 1, option, "at least 1", value)
        for option in ("temperatures", "batch_sizes"):
            _require(bool(getattr(self, option)), option, "at least one value", getattr(self, option))
        _require(
            all(0 <= each <= 100 for each in self.temperatures), "temperatures", "0 to 100", self.temperatures
        )
        for option in ("draft_lengths", "batch_sizes"):
            values = getattr(self, option)
            _require(all(each >= 1 for each in values), option, "at least 1", values)
        _require(self.prompts != (), "prompts", "at least one source (or None for the default)", self.prompts)
        _require(self.seed >= 0, "seed", "at least 0", self.seed)
        for option in (
            "temperatures", "draft_lengths", "against", "drafters", "tasks", "controllers", "batch_sizes",
        ):  # fmt: skip
            values = getattr(self, option) or ()
            _require(len(set(values)) == len(values), option, "different values", values)
        if isinstance(self.prompts, tuple):
            _require(len(set(self.prompts)) == len(self.prompts), "prompts", "different values", self.prompts)
        self._check_peers()
        plain_name = self.name.replace("-", "").replace("_", "").isalnum()
        _require(plain_name, "name", "letters, digits, - and _ (it becomes a file name)", self.name)

    def _check_peers(self) -> None:
        for peer in self.against:
            if is_address(peer):
                ServerAddress.parse(peer)
            else:
                known = f"one of {', '.join(PEERS)}, or the http:// address of a server"
                _require(peer in PEERS, "against", known, peer)
        _require(
            not self.against or 1 in self.batch_sizes,
            "batch_sizes",
            f"1 among others, since {', '.join(self.against)} decodes one prompt at a time",
            self.batch_sizes,
        )

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        return tuple(ServerAddress.parse(peer) for peer in self.against if is_address(peer))

    @property
    def runs_all(self) -> bool:
        """True if all available drafters were requested with `all`."""
        return self.drafters == (ALL,)

    @property
    def drafters_to_run(self) -> tuple[str, ...]:
        if self.runs_all:
            return all_drafters(self.model)
        if self.drafters is not None:
            return self.drafters
        default = default_drafter(self.model)
        parts = map(str, parse_drafter_name(default))
        return tuple(dict.fromkeys((default, *parts, "ngram", "suffix")))


def _require(holds: bool, option: str, expected: str, got: object) -> None:
    if not holds:
        raise BadInputError(f"expected {option} to be {expected}, got {got!r}")
