"""The search for layers to skip."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from checkpoints import random_llama
from secondguess.drafters.spec import make_drafter
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.skip import write_skipped
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.train.skip_search import (
    SkipSearch,
    best_draft_length,
    stack_prefixes,
)


def target(idle: tuple[int, ...] = (), num_layers: int = 5) -> FusedRuntime:
    """A random target; layers that are idle add nothing to the states."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_llama(intermediate_size=32, num_hidden_layers=num_layers, **heads)
    with torch.no_grad():
        for index in idle:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    decoder = fuse(model, packed=False)
    assert decoder is not None
    return FusedRuntime(decoder)


TEXTS = torch.randint(0, 31, (3, 20), generator=torch.Generator().manual_seed(1))


def test_layers_that_do_nothing_are_found() -> None:
    search = SkipSearch(target(idle=(1, 3)), TEXTS)
    best = search.run(lambda line: None)
    assert {1, 3} <= set(best.skipped)
    alone = search.candidate([1, 3])
    assert alone.acceptance == pytest.approx(1.0, abs=1e-5)


def test_the_search_finds_the_best_choice() -> None:
    """Of all subsets of four layers."""
    search = SkipSearch(target(num_layers=4), TEXTS)
    found = search.run(lambda line: None)
    subsets = [each for size in range(1, 4) for each in itertools.combinations(range(4), size)]
    assert found.speedup == max(search.candidate(subset).speedup for subset in subsets)


def test_the_best_draft_length_is_that_of_the_formula() -> None:
    length, speed = best_draft_length(0.6, 0.1)
    assert length == 3
    assert speed == pytest.approx((1 - 0.6**4) / (0.4 * 1.3))
    assert best_draft_length(0.1, 0.5) == (0, 1.0)


def test_a_saved_choice_drafts(tmp_path: Path) -> None:
    write_skipped(tmp_path, (1, 3), {})
    runtime = target()

    class Loaded:
        name, path = "tiny", str(tmp_path)

    Loaded.runtime = runtime  # type: ignore[attr-defined]
    made = make_drafter(
        f"layer-skip:{tmp_path}",
        target_vocab_size=31,
        load_draft_model=lambda _: runtime,
        target=Loaded(),  # type: ignore[arg-type]
    )
    assert made.runtime.num_layers == 3  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="found by"):
        make_drafter(
            f"layer-skip:{tmp_path}",
            target_vocab_size=31,
            load_draft_model=lambda _: runtime,
            target=Loaded(),  # type: ignore[arg-type]
        )


def test_unknown_layers_are_refused() -> None:
    for skipped in ([5], [0, 1, 2, 3, 4]):
        with pytest.raises(BadInputError, match="layers 0 to 4"):
            target().skip_layers(skipped)


def test_texts_that_are_too_short_are_left_out() -> None:
    assert stack_prefixes([[1, 2, 3], [1]], 2).tolist() == [[1, 2]]
