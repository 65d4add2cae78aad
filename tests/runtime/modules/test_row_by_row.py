"""Modules that do not take our masks: choice of the runtime, passes per tree, and the check at loading.

Their logits are compared in `test_families.py`.
"""

import pytest

from families import (
    FAMILIES,
    assert_near,
    plain_logits,
    plain_model,
    random_tokens,
    row_of,
    runtime_of,
    trees,
    write_checkpoint,
)  # fmt: skip
from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.modules.forward import MaskedForward
from secondguess.runtime.modules.row_by_row import RowByRowForward
from secondguess.runtime.modules.transformers import TransformersRuntime


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    return write_checkpoint(FAMILIES["bloom"](), tmp_path_factory.mktemp("bloom"))


@pytest.fixture
def runtime(bloom):
    return runtime_of(bloom)


def test_the_forward_depends_on_the_attention_interface(bloom, tmp_path):
    llama = write_checkpoint(FAMILIES["llama"](), tmp_path)
    assert type(TransformersRuntime(plain_model(llama)).forward) is MaskedForward
    assert type(TransformersRuntime(plain_model(bloom)).forward) is RowByRowForward


def test_each_node_of_a_tree_runs_once(runtime, monkeypatch):
    rows = [row_of(random_tokens(6, seed=1)), row_of(random_tokens(3, seed=2))]
    runtime.begin(rows)
    widths = []
    call = runtime.forward.call

    def spy(tokens, *others, **named):
        widths.append(tokens.shape[1])
        return call(tokens, *others, **named)

    monkeypatch.setattr(runtime.forward, "call", spy)
    runtime.score(rows, trees(([7, 8, 9, 10], [-1, 0, 0, -1]), ([5, 6], [-1, 0])))
    assert widths == [3, 1, 1, 3]
    widths.clear()
    runtime.keep(rows, [[0, 2], []])
    for row, added in zip(rows, ([7, 9, 11], [12]), strict=True):
        row.tokens += added
    runtime.score(rows, Draft.empty(2))
    assert widths == [1, 1]


def test_a_module_whose_cache_gives_other_logits_is_refused(bloom, monkeypatch):
    monkeypatch.setattr(KeyValueCache, "get_query_offset", lambda self, layer_idx=0: 0)
    model = plain_model(bloom).train()
    with pytest.raises(UnsupportedModelError, match=r"BloomForCausalLM.*several tokens.*relative error"):
        TransformersRuntime(model)
    assert model.training


def test_an_interrupted_check_restores_the_model(bloom, monkeypatch):
    def interrupt(self, vocab_size):
        raise KeyboardInterrupt

    monkeypatch.setattr(RowByRowForward, "set_up", interrupt)
    model = plain_model(bloom).train()
    with pytest.raises(KeyboardInterrupt):
        TransformersRuntime(model)
    assert model.training


def test_a_module_that_fails_with_a_cache_is_refused(bloom, monkeypatch):
    monkeypatch.delattr(KeyValueCache, "get_mask_sizes")
    with pytest.raises(
        UnsupportedModelError, match=r"BloomForCausalLM.*cache per row \(AttributeError: "
    ) as refused:
        TransformersRuntime(plain_model(bloom))
    assert "\n" not in str(refused.value)


def test_an_index_of_keys_is_kept_while_rows_join_and_leave(tmp_path, monkeypatch):
    """DeepSeek-V3.2 chooses keys by an index of its own, which is copied, moved and grown with keys and values."""
    monkeypatch.setattr("secondguess.runtime.cache.MIN_CAPACITY", 32)
    path = write_checkpoint(FAMILIES["deepseek-v3.2"](), tmp_path)
    runtime, plain = runtime_of(path), plain_model(path)

    def check(row):
        assert_near(runtime.score([row], Draft.empty(1)).logits[0], plain_logits(plain, row.tokens)[-1:])

    first, second = row_of(random_tokens(24, seed=1)), row_of(random_tokens(26, seed=2))
    runtime.begin([first])
    runtime.begin([second])  # the cache grows
    runtime.release(first)  # the second row moves
    check(second)
    third = row_of([*second.tokens[:24], 5, 6])
    runtime.admit([third])  # a prefix is copied
    runtime.prefill([third])
    check(third)
    third.tokens += random_tokens(20, seed=3)
    check(third)  # the cache grows again
    check(second)
