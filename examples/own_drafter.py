"""A drafter in a few lines: it proposes that the last `period` tokens repeat. See docs/adding-a-drafter.md."""

from collections.abc import Sequence

from secondguess.controllers import make_controller
from secondguess.core import Budgets, Draft, Row
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.verifiers import make_verifier


class PeriodicDrafter(Drafter):
    name = "periodic"
    deterministic = True
    default_controller = "fixed:4"

    def __init__(self, period: int) -> None:
        self.period = period

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        repeats = [row.tokens[-self.period :] * 8 for row in rows]
        return Draft.chains([tokens[:limit] for tokens, limit in zip(repeats, budgets.lengths, strict=True)])


table = random_probs(vocab_size=5, seed=0)
target = TableModel(
    5, lambda context: table(context[-2:])
)  # remembers two tokens, so greedy text soon repeats
row = Row([0], SamplingParams(max_tokens=40))
components = Components(target, PeriodicDrafter(period=3), make_verifier("auto"), make_controller("fixed:4"))
for _ in decode(components, [row]):
    pass
print(row.output)
print(components.recorder.of(row))
