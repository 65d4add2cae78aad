"""What rounds of all drafters of a tuning cost: what there is to time, in turns, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from secondguess.bench.round_costs import (
    LENGTHS,
    Cell,
    Curve,
    PartCosts,
    RoundCosts,
    Stage,
    fit_line,
    in_turns,
    make_cells,
    make_plain_cells,
    part_costs,
    plain_costs,
)
from secondguess.drafters import make_drafter
from secondguess.drafters.base import Drafter
from secondguess.runtime.base import Runtime

MOST_TURNS, FEWEST_TURNS, NUM_CYCLES = 12, 2, 2


@dataclass(frozen=True)
class Costs:
    """Seconds of rounds, plain and by drafter (not those made of several), and the same for rows out of order.

    Args:
        joining: by drafters made of several, one of them a model, what a drafted round takes beyond its parts, by rows.
        models: the drafters that run a model.
    """

    plain: Curve
    parts: Mapping[str, PartCosts]
    disordered_plain: Curve
    disordered_parts: Mapping[str, PartCosts]
    joining: Mapping[str, Curve] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    def of(self, names: Sequence[str]) -> RoundCosts:
        """For a drafter made of these."""
        joining = self.joining.get("+".join(names), {})
        left = RoundCosts(self.disordered_plain, self._beside(names, self.disordered_parts), joining=joining)
        return RoundCosts(self.plain, self._beside(names, self.parts), left, joining)

    def _beside(self, names: Sequence[str], parts: Mapping[str, PartCosts]) -> list[PartCosts]:
        """Beside a model a look-up's guesses are judged as the model's are, sampled ones with laws."""
        rests = [parts[name].rest for name in names if name in self.models]
        return [replace(parts[name], rest=rests[0]) if rests else parts[name] for name in names]

    def with_reading(self, reading: Mapping[str, float]) -> Costs:
        """With the seconds in which each drafter reads a token."""

        def told(parts: Mapping[str, PartCosts]) -> dict[str, PartCosts]:
            return {name: replace(part, reading=reading[name]) for name, part in parts.items()}

        return replace(self, parts=told(self.parts), disordered_parts=told(self.disordered_parts))


@dataclass(frozen=True)
class Joined:
    """A drafter made of several, one of them a model.

    Args:
        names: of its parts.
        model: which of them that is.
    """

    drafter: Drafter
    names: Sequence[str]
    model: int


class RoundTimer:
    """Times rounds of every drafter at every batch size.

    Args:
        make_stage: who plays with a drafter.
        drafters: by name, those that are not made of several.
        upkeep: by name, seconds per row and round that a look-up takes.
        joined: by name, those that are.
        batch_sizes: for which speeds are to be predicted; what else is needed for that is timed too.
    """

    def __init__(
        self,
        make_stage: Callable[[Drafter], Stage],
        drafters: Mapping[str, Drafter],
        upkeep: Mapping[str, float],
        joined: Mapping[str, Joined],
        batch_sizes: Sequence[int],
    ) -> None:
        self._drafters, self._upkeep, self._joined = drafters, upkeep, joined
        # Rows leave a batch one by one: the sizes between are interpolated.
        sizes = sorted({1, *batch_sizes, *([4] if max(batch_sizes) > 8 else [])})
        several = [size for size in sizes if size > 1]
        look_up = make_drafter("suffix", target_vocab_size=1, load_draft_model=_no_model)
        alone = make_stage(look_up)
        self._plain = [*make_plain_cells(alone, sizes), *make_plain_cells(alone, several, disordered=True)]

        def cells(drafter: Drafter, certain: bool) -> list[Cell]:
            stage = make_stage(drafter)
            left = make_cells(stage, [certain], several, disordered=True)
            return [*make_cells(stage, [certain], sizes), *left]

        # Rounds of one look-up stand for those of all: what tokens they guess makes no difference.
        self._look_up = cells(look_up, True) if any(each.certain for each in drafters.values()) else []
        self._models = {name: cells(each, False) for name, each in drafters.items() if not each.certain}
        self._lone = {
            name: [Cell(make_stage(each), 0, size, False, False, LENGTHS, lone=True) for size in several]
            for name, each in drafters.items()
            if not each.certain
        }
        self._together = {
            name: [Cell(make_stage(each.drafter), each.model, size, False, False, LENGTHS) for size in sizes]
            for name, each in joined.items()
        }

    def run(self, most_turns: int, go_on: Callable[[], bool]) -> int:
        """Time everything in turns, at least `FEWEST_TURNS` and then while there is time; gives their number."""
        of_models = [cell for cells in self._models.values() for cell in cells]
        of_models += [cell for cells in self._lone.values() for cell in cells]
        of_several = [cell for cells in self._together.values() for cell in cells]
        done = 0

        def has_time() -> bool:
            nonlocal done
            done += 1
            return done < FEWEST_TURNS or go_on()

        return in_turns(
            [*self._plain, *self._look_up, *of_models, *of_several], NUM_CYCLES, most_turns, has_time
        )

    def costs(self) -> Costs:
        """What came of it."""
        # One row alone is always in order.
        return Costs(
            plain_costs([cell for cell in self._plain if not cell.disordered]),
            self._parts(lambda cell: not cell.disordered),
            plain_costs([cell for cell in self._plain if cell.disordered or cell.num_rows == 1]),
            self._parts(lambda cell: cell.disordered or cell.num_rows == 1),
            {name: self._joining(name) for name in self._together},
            tuple(self._models),
        )

    def _parts(self, belongs: Callable[[Cell], bool]) -> dict[str, PartCosts]:
        return {
            name: replace(part_costs(list(filter(belongs, self._look_up))), upkeep=self._upkeep[name])
            if drafter.certain
            else replace(
                part_costs(list(filter(belongs, self._models[name]))), lone_step=self._lone_steps(name)
            )
            for name, drafter in self._drafters.items()
        }

    def _lone_steps(self, name: str) -> Curve:
        """Seconds of a step that one row takes, by rows of the batch."""
        return {
            cell.num_rows: fit_line(
                {length: median(all_) for length, all_ in cell.sweep.draft.items() if length}
            )[1]
            for cell in self._lone[name]
        }

    def _joining(self, name: str) -> Curve:
        """How much longer a round of the model takes beside the others: medians over draft lengths."""
        joined = self._joined[name]
        upkeep = sum(self._upkeep.get(part, 0.0) for part in joined.names)
        own = {
            cell.num_rows: _medians(cell)
            for cell in self._models[joined.names[joined.model]]
            if not cell.disordered and not cell.asks
        }
        curve = {}
        for cell in self._together[name]:
            alone, together = own[cell.num_rows], _medians(cell)
            longer = [together[length] - alone[length] for length in together if length and length in alone]
            curve[cell.num_rows] = max(0.0, median(longer) - cell.num_rows * upkeep) if longer else 0.0
        return curve


def _medians(cell: Cell) -> dict[int, float]:
    """Seconds of a round, by nodes of the longest draft."""
    sweep = cell.sweep
    return {
        length: median(map(sum, zip(sweep.draft[length], seconds, strict=True)))
        for length, seconds in sweep.rest.items()
    }


def _no_model(path: str) -> Runtime:
    raise AssertionError(f"a look-up asked for the model {path}")
