"""Modules that do not take our masks: choice of the runtime, passes per tree, and the check at loading.

Their logits are compared in `test_families.py`.
"""

import pytest

from families import FAMILIES, plain_model, random_tokens, row_of, runtime_of, trees, write_checkpoint
from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cache import KeyValueCache
from secondguess.runtime.row_by_row import RowByRowRuntime
from secondguess.runtime.transformers import TransformersRuntime
from secondguess.runtime.wrap import wrap_module


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    return write_checkpoint(FAMILIES["bloom"](), tmp_path_factory.mktemp("bloom"))


@pytest.fixture
def runtime(bloom):
    return runtime_of(bloom)


def test_the_runtime_depends_on_the_attention_interface(bloom, tmp_path):
    llama = write_checkpoint(FAMILIES["llama"](), tmp_path)
    assert type(wrap_module(plain_model(llama))) is TransformersRuntime
    assert type(wrap_module(plain_model(bloom))) is RowByRowRuntime
    with pytest.raises(UnsupportedModelError, match=r"attention interface.*BloomForCausalLM"):
        TransformersRuntime(plain_model(bloom))


def test_each_node_of_a_tree_runs_once(runtime, monkeypatch):
    rows = [row_of(random_tokens(6, seed=1)), row_of(random_tokens(3, seed=2))]
    runtime.begin(rows)
    widths = []
    call = runtime._call

    def spy(tokens, *others, **named):
        widths.append(tokens.shape[1])
        return call(tokens, *others, **named)

    monkeypatch.setattr(runtime, "_call", spy)
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
        wrap_module(model)
    assert model.training


def test_an_interrupted_check_restores_the_model(bloom, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(RowByRowRuntime, "_check_cache", interrupt)
    model = plain_model(bloom).train()
    with pytest.raises(KeyboardInterrupt):
        wrap_module(model)
    assert model.training


def test_a_module_that_fails_with_a_cache_is_refused(bloom, monkeypatch):
    monkeypatch.delattr(KeyValueCache, "get_mask_sizes")
    with pytest.raises(
        UnsupportedModelError, match=r"BloomForCausalLM.*cache per row \(AttributeError: "
    ) as refused:
        wrap_module(plain_model(bloom))
    assert "\n" not in str(refused.value)
