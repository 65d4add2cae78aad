"""Drafter heads on the compiled kernels compute what their modules compute."""

import copy
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from head_cases import tiny_target
from secondguess.core import Draft, Row
from secondguess.drafters.eagle import EagleDrafter
from secondguess.heads import native
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.block_config import DsparkConfig
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.eagle import Eagle1Head, EagleConfig, EagleHead
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.feature import FeatureHead
from secondguess.heads.layer import LayerConfig
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.heads.mtp import MtpHead
from secondguess.heads.native import (
    NativeBlockRuntime,
    NativeFeatureRuntime,
    PackedHead,
    block_runtime,
    exit_logits,
    feature_runtime,
    medusa_logits,
)
from secondguess.heads.runtime import BlockRuntime, FeatureRuntime
from secondguess.params import SamplingParams
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import fuse

pytestmark = pytest.mark.skipif(not library.units(), reason="no compiled kernels on this machine")

VOCAB_SIZE = 50
HeadT = TypeVar("HeadT", bound=torch.nn.Module)


YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    }
}


def eagle(
    target: TargetModel,
    *,
    num_draft_tokens: int | None = None,
    more: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    width: int | None = None,
    **fields: object,
) -> EagleHead:
    layer = LayerConfig(
        width or target.width, 4, 2, 8, 3 * target.width + 5, model_type=model_type, more=more or {}
    )
    if width is not None:
        fields["target_width"] = target.width
    vocabulary = None
    if num_draft_tokens is not None:
        vocabulary = DraftVocabulary(VOCAB_SIZE, torch.arange(0, 2 * num_draft_tokens, 2))
    has_embeddings = bool(fields.pop("has_embeddings", False))
    layers = fields.pop("hidden_layers", (0, 1, 2))
    return EagleHead(EagleConfig(layer, layers, **fields), target, vocabulary, has_embeddings)


def mtp(target: TargetModel, **options: bool) -> MtpHead:
    return MtpHead(LayerConfig(target.width, 4, 4, 8, 40, model_type="qwen3"), target, **options)


def eagle1(target: TargetModel, **options: Any) -> Eagle1Head:
    return Eagle1Head(LayerConfig(target.width, 2, 1, 16, 40, model_type="qwen2"), target, **options)


HEADS: dict[str, Callable[[TargetModel], FeatureHead]] = {
    "eagle": eagle,
    "eagle, normalised residual": lambda target: eagle(target, norm_before_residual=True, fc_norm=True),
    "eagle, two layers": lambda target: eagle(target, num_layers=2, norm_output=True, norm_before_fc=True),
    "eagle, own words": lambda target: eagle(target, num_draft_tokens=17, has_embeddings=True),
    "eagle, YaRN": lambda target: eagle(target, more=YARN),
    "eagle, window": lambda target: eagle(target, windows=(3,)),
    "eagle, two layers, one with a window": lambda target: eagle(target, num_layers=2, windows=(None, 4)),
    "eagle, narrower": lambda target: eagle(target, width=48, has_embeddings=True, fc_norm=True),
    "eagle, last state": lambda target: eagle(target, hidden_layers=(-1,), has_fusion=False),
    "eagle, biases": lambda target: eagle(
        target, more={"attention_bias": True, "mlp_bias": True}, has_fusion_bias=True
    ),
    "eagle, query and key norms": lambda target: eagle(target, model_type="qwen3"),
    "eagle, parallel": lambda target: eagle(
        target, mask_token=3, num_layers=2, windows=(None, 4), has_embeddings=True, norm_before_fc=True
    ),
    "eagle 1, norms and window": lambda target: eagle1(target, has_norms=True, windows=(2,)),
    "eagle 1": eagle1,
    "eagle 1 with bias": lambda target: eagle1(target, has_bias=True),
    "mtp": mtp,
    "mtp with everything": lambda target: mtp(
        target, has_embeddings=True, has_head=True, norm_output=True, has_bias=True
    ),
}


def native_target() -> NativeRuntime:
    return NativeRuntime(NativeDecoder(fuse(tiny_target(VOCAB_SIZE).bfloat16(), packed=False)))


def random_head(name: str, target: NativeRuntime) -> FeatureHead:
    return randomised(HEADS[name](TargetModel.from_runtime(target)), target)


def randomised(head: HeadT, target: NativeRuntime) -> HeadT:
    """Fill a head with random weights that bfloat16 represents, the same at every call."""
    torch.manual_seed(4)
    for parameter in head.parameters():
        spread = 0.2 if parameter.dim() > 1 else 1.0
        torch.nn.init.normal_(parameter, std=spread)
        parameter.data = parameter.data.bfloat16().to(target.embedding_and_head().dtype)
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("name", HEADS)
def test_native_heads_compute_the_logits_and_features_of_the_module(name: str) -> None:
    target = native_target()
    runtime = feature_runtime(random_head(name, target), target)
    assert isinstance(runtime, NativeFeatureRuntime)
    head = random_head(name, target)
    plain = FeatureRuntime(head, target.context_length, target.device)
    tokens, width = torch.randint(VOCAB_SIZE, (3, 9)), head.layer_config.width
    features = torch.randn(3, 9, width).bfloat16()
    with torch.inference_mode():
        expected = plain.probe_with_features(tokens, features.to(head.target.dtype))
        found = runtime.probe_with_features(tokens, features)
    covered = expected.logits.isfinite()
    assert torch.equal(covered, found.logits.isfinite())
    for exact, rounded in (
        (expected.logits[covered], found.logits[covered]),
        (expected.hidden[0], found.hidden[0]),
    ):
        assert (exact.float() - rounded.float()).norm() < 0.03 * exact.float().norm()
    states = {
        layer: torch.randn(5, head.target.width, dtype=head.target.dtype) for layer in head.hidden_layers
    }
    exact, rounded = head.features(states), runtime.features(states)
    assert (exact - rounded).norm() < 0.02 * exact.norm()


def test_all_draft_positions_of_a_parallel_head_are_those_of_the_module() -> None:
    target = native_target()
    runtimes = [
        feature_runtime(random_head("eagle, parallel", target), target),
        FeatureRuntime(random_head("eagle, parallel", target), target.context_length, target.device),
    ]
    assert isinstance(runtimes[0], NativeFeatureRuntime)
    sizes, counts = (9, 6), (4, 2)
    tokens, features = torch.randint(VOCAB_SIZE, (2, 9)), torch.randn(2, 9, target.embedding_and_head().width)
    found = []
    for runtime in runtimes:
        rows = [Row(tokens[i, :size].tolist(), SamplingParams()) for i, size in enumerate(sizes)]
        runtime.admit(rows)
        for row, row_features in zip(rows, features, strict=True):
            runtime.set_features(
                row, 0, row_features.bfloat16().to(runtime.features(runtime.head.mask_states()).dtype)
            )
        with torch.inference_mode():
            logits = runtime.score_masks(rows, counts)
        found += [torch.cat([logits[i, :count] for i, count in enumerate(counts)]).float()]
    assert relative_error(found[1], found[0]) < 0.03


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    target = native_target()
    width = random_head(name, target).layer_config.width
    tokens, features = torch.randint(VOCAB_SIZE, (2, 6)), torch.randn(2, 6, width).bfloat16()

    def step(indices: list[int], sizes: list[int]) -> torch.Tensor:
        """Return the logits after the last of `sizes` tokens of each row, run in two steps."""
        runtime = feature_runtime(random_head(name, target), target)
        rows = [
            Row(tokens[i, :size].tolist(), SamplingParams()) for i, size in zip(indices, sizes, strict=True)
        ]
        runtime.admit(rows)
        for row, i in zip(rows, indices, strict=True):
            runtime.set_features(row, 0, features[i])
        runtime.prefill(rows)
        return runtime.score(rows, Draft.empty(len(rows), target.device)).logits

    together = step([0, 1], [6, 4])
    assert torch.equal(together[:1], step([0], [6]))
    assert torch.equal(together[1:], step([1], [4]))


def test_a_head_that_the_kernels_do_not_reproduce_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = native_target()
    original = PackedHead._norm

    def doubled(self: PackedHead, norm: torch.nn.Module) -> library.Norm:
        norm.weight.data = 2 * norm.weight.data + 1
        return original(self, norm)

    monkeypatch.setattr(PackedHead, "_norm", doubled)
    head = random_head("mtp", target)
    copied = random_head("mtp", target)
    monkeypatch.setattr(native, "FeatureRuntime", lambda _, *rest: FeatureRuntime(copied, *rest))
    assert type(feature_runtime(head, target)) is FeatureRuntime


def relative_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((exact.float() - rounded.float()).norm() / exact.float().norm())


MEDUSA_CONFIGS = {
    "the target's output matrix": MedusaConfig(num_heads=3, num_layers=2),
    "one output matrix, bias": MedusaConfig(num_heads=2, num_layers=1, has_bias=True, num_outputs=1),
    "output matrices": MedusaConfig(num_heads=2, num_layers=1, num_outputs=2),
}


def medusa(name: str, target: NativeRuntime) -> MedusaHead:
    config = MEDUSA_CONFIGS[name]
    vocabulary = DraftVocabulary(VOCAB_SIZE, torch.arange(0, 34, 2)) if config.num_outputs == 2 else None
    return randomised(MedusaHead(config, TargetModel.from_runtime(target), vocabulary), target)


@pytest.mark.parametrize("name", MEDUSA_CONFIGS)
def test_native_medusa_heads_compute_the_logits_of_the_module(name: str) -> None:
    target = native_target()
    head = medusa(name, target)
    found = medusa_logits(medusa(name, target), target)
    assert found.__name__ == "native"
    states = torch.randn(7, head.target.width)
    for depth in range(head.config.num_heads):
        expected = head.logits(states.to(head.target.dtype), depth)
        covered = expected.isfinite()
        together = found(states, depth)
        assert torch.equal(covered, together.isfinite())
        assert relative_error(expected[covered], together[covered]) < 0.03
        for row in range(7):
            assert torch.equal(found(states[row : row + 1], depth), together[row : row + 1])


@pytest.mark.parametrize("has_adapter", [True, False])
def test_native_exits_compute_the_logits_of_the_module(has_adapter: bool) -> None:
    target = native_target()
    shared = target.embedding_and_head()

    def adapter() -> EarlyExitHead | None:
        return randomised(EarlyExitHead(1, shared.width, 72), target) if has_adapter else None

    found, head = exit_logits(adapter(), target), adapter()
    assert isinstance(found, partial)
    states = torch.randn(2, 3, shared.width)
    exact = states.to(shared.dtype)
    expected = shared.unembed(shared.normalise(exact) if head is None else head(exact))
    together = found(states)
    assert relative_error(expected, together) < 0.03
    assert torch.equal(found(states[1:, 2:]), together[1:, 2:])


BLOCKS: dict[str, dict[str, Any]] = {
    "dspark": {"markov_rank": 6, "has_confidence": True, "confidence_reads_markov": True},
    "dspark without a Markov head": {"has_confidence": True},
    "dflash with an output matrix": {"samples_from_anchor": False, "has_output": True, "mask_token": 3},
    "a gated Markov head and embeddings": {"markov_rank": 6, "markov_kind": "gated", "has_embeddings": True},
    "a recurrent Markov head": {"markov_rank": 6, "markov_kind": "rnn"},
}


def dspark(name: str, target: NativeRuntime) -> DsparkHead:
    model = TargetModel.from_runtime(target)
    # The queries do not end at a block of the kernels.
    layer = LayerConfig(model.width, 2, 1, 24, 40, model_type="qwen3")
    config = DsparkConfig(layer, num_layers=2, hidden_layers=(0, 2), block_size=5, **BLOCKS[name])
    vocabulary = DraftVocabulary(VOCAB_SIZE, torch.arange(0, 34, 2)) if config.has_output else None
    return randomised(DsparkHead(config, model, vocabulary), target)


def block_rows() -> list[Row]:
    return [Row(torch.arange(start, end).tolist(), SamplingParams()) for start, end in ((3, 12), (20, 24))]


def received_by(rows: list[Row], start: int, width: int) -> list[dict[int, torch.Tensor]]:
    """Return random target states of the tokens of rows from `start` on, the same at every call."""
    states = torch.randn(2, 40, width, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    return [
        {layer: states[layer // 2, row.tokens[0] + start : row.tokens[-1]] for layer in (0, 2)}
        for row in rows
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_native_block_drafters_compute_the_logits_of_the_module(name: str) -> None:
    target = native_target()
    head = dspark(name, target)
    width, dtype = head.config.layer.width, head.target.dtype
    found = block_runtime(dspark(name, target), target)
    assert isinstance(found, NativeBlockRuntime)
    runtimes = (BlockRuntime(head, target.device), found)
    rows = block_rows()
    previous = torch.tensor([[1, 2, 3], [4, 5, 6]])
    outputs = []
    with torch.inference_mode():
        for runtime in runtimes:
            # two calls: later tokens attend to earlier ones
            runtime.append(
                rows, [{k: v[:2].to(dtype) for k, v in each.items()} for each in received_by(rows, 0, width)]
            )
            runtime.append(
                rows, [{k: v.to(dtype) for k, v in each.items()} for each in received_by(rows, 2, width)]
            )
            block = runtime.run(rows, 3)
            logits = runtime.logits(block, previous)
            scores = runtime.confidence(block, previous) if head.config.has_confidence else None
            outputs.append((block.states, logits, scores))
    (states, logits, scores), (found_states, found_logits, found_scores) = outputs
    assert relative_error(states, found_states) < 0.03
    assert relative_error(logits, found_logits) < 0.03
    assert (scores is None) == (found_scores is None)
    if scores is not None and found_scores is not None:
        assert relative_error(scores, found_scores) < 0.06


def test_blocks_have_the_same_bits_alone_and_in_a_batch() -> None:
    target = native_target()
    width = dspark("dspark", target).config.layer.width

    def run(indices: list[int]) -> torch.Tensor:
        runtime = block_runtime(dspark("dspark", target), target)
        rows = [block_rows()[index] for index in indices]
        with torch.inference_mode():
            runtime.append(rows, received_by(rows, 0, width))
            block = runtime.run(rows, 5)
            previous = torch.tensor([[1, 2, 3, 4, 5]] * len(rows))
            parts = [
                torch.cat((runtime.logits(block, before), runtime.confidence(block, before)[:, None]), -1)
                for before in (previous[:, : length + 1] for length in range(5))
            ]
            return torch.stack(parts, 1)

    together = run([0, 1])
    assert torch.equal(together[:1], run([0]))
    assert torch.equal(together[1:], run([1]))


def test_other_heads_that_the_kernels_do_not_reproduce_run_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = native_target()
    pack = PackedHead._linear

    def doubled(self: PackedHead, *linears: torch.nn.Linear, gated: bool = False) -> library.Weight:
        copies = [copy.deepcopy(linear) for linear in linears]
        for each in copies:
            each.weight.data *= 2
        return pack(self, *copies, gated=gated)

    monkeypatch.setattr(PackedHead, "_linear", doubled)
    head = medusa("output matrices", target)
    assert medusa_logits(head, target) == head.logits
    adapter = randomised(EarlyExitHead(1, head.target.width, 72), target)
    assert not isinstance(exit_logits(adapter, target), partial)
    block = dspark("dspark", target)
    assert type(block_runtime(block, target)) is BlockRuntime
    assert all(weight.numel() for each in (head, adapter, block) for weight in each.parameters())


def test_built_drafters_use_the_kernels_of_their_target_and_keep_no_matrices_beside_them() -> None:
    target = native_target()
    head = random_head("eagle", target)
    matrices = [weakref.ref(weight) for weight in head.parameters() if weight.dim() > 1]
    drafter = EagleDrafter(head, target, "eagle")
    assert isinstance(drafter.runtime, NativeFeatureRuntime)
    assert matrices
    assert not any(matrix() is not None for matrix in matrices)
