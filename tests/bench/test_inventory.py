"""Memory and training time of drafters, and the drafters available for a target."""

import pytest

from secondguess.bench import BenchConfig
from secondguess.bench.inventory import all_drafters, drafter_footprint
from secondguess.builtin import builtin_paths, head_path
from secondguess.drafters import parse_drafter_name
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.files import Provenance


def test_lookup_drafters_have_no_weights():
    assert drafter_footprint("suffix").num_bytes == 0
    assert drafter_footprint("suffix").training_minutes is None


def test_the_memory_of_a_draft_model_is_its_weights():
    weights = builtin_paths().drafter / "model.safetensors"
    assert drafter_footprint("suffix+model:builtin-draft").num_bytes == weights.stat().st_size


def test_the_training_time_of_a_head_is_reported(tmp_path):
    EarlyExitHead(1, 8, 4).save(tmp_path)
    Provenance("early-exit", "tiny", "0", training={"minutes": 2.5}).write(tmp_path)
    found = drafter_footprint(f"early-exit:{tmp_path},tree=2x1")
    assert found.num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert found.training_minutes == 2.5


def test_all_selects_every_drafter_with_chains_and_trees():
    names = all_drafters("builtin")
    assert {"suffix", "ngram", "model:builtin-draft"} < set(names)
    assert any(name.startswith("model:builtin-draft,tree=") for name in names)
    assert all(parse_drafter_name(name) for name in names)
    assert BenchConfig(drafters=("all",)).drafters_to_run == names


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [(builtin_paths().target, False), (head_path("mtp"), True)]
)
def test_modules_in_a_targets_own_checkpoint_are_found(checkpoint, expected):
    assert ("mtp" in all_drafters(str(checkpoint))) == expected
