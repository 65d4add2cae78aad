"""Early exit: nothing of the shared layers is computed or stored twice."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from head_cases import tiny_target
from secondguess import custom_generate, load
from secondguess.controllers import make_controller
from secondguess.core import Draft, Row
from secondguess.decode import Components, decode
from secondguess.drafters.early_exit import EarlyExitDrafter
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.spec import make_drafter
from secondguess.drafters.trees import StaticTree, TreeShape
from secondguess.errors import BadInputError, CheckpointError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.early_exit import EarlyExitHead
from secondguess.heads.files import Provenance
from secondguess.heads.learning import TrainingBatch
from secondguess.names import parse_name
from secondguess.runtime.base import Runtime
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.decoder.fused_decoder import Layer
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.train.losses import objective
from secondguess.verifiers import make_verifier

PROMPTS = [[3, 5, 7, 5, 7], [9, 9, 2, 9]]


def fused_target(num_layers: int = 4) -> FusedRuntime:
    decoder = fuse(tiny_target(num_layers=num_layers), packed=False)
    assert decoder is not None
    return FusedRuntime(decoder)


TARGET = TargetModel.from_runtime(fused_target())


def drafter_of(
    target: Runtime,
    num_layers: int,
    head: EarlyExitHead | None = None,
    shape: TreeShape | None = None,
) -> EarlyExitDrafter:
    return EarlyExitDrafter(target, num_layers, f"early-exit:{num_layers}", shape, head)


def play(
    target: Runtime, shape: TreeShape | None = None, temperature: float = 0.0, controller: str = "fixed:3"
) -> int:
    """Decode, and return the number of drafted nodes."""
    drafter = drafter_of(target, 2, shape=shape)
    components = Components(target, drafter, make_verifier("auto"), make_controller(controller))
    params = SamplingParams(max_tokens=12, temperature=temperature)
    rows = [Row(list(prompt), params, seed=3) for prompt in PROMPTS]
    for _ in decode(components, rows):
        pass
    return sum(components.recorder.of(row).num_drafted for row in rows)


@pytest.mark.parametrize("shape", [None, StaticTree((2, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shared_layers_run_once_per_token(
    shape: TreeShape | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many queries pass the first layer as the last: those that the target scores."""
    counts: dict[int, int] = {}
    forward = Layer.forward

    def counted(self: Layer, states: Tensor, index: int, *others: object) -> Tensor:
        counts[index] = counts.get(index, 0) + states.shape[0] * states.shape[1]
        return forward(self, states, index, *others)  # type: ignore[arg-type]

    target = fused_target()
    monkeypatch.setattr(Layer, "forward", counted)
    assert play(target, shape, temperature) > 10
    assert len(set(counts.values())) == 1


def test_early_exit_has_no_second_cache() -> None:
    target = fused_target()
    drafter = drafter_of(target, 2)
    assert [value for value in vars(drafter).values() if isinstance(value, Runtime)] == [target]


def held_bytes() -> int:
    """Bytes of all tensors made since `gc.freeze`, each storage once."""
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (
            each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, Parameter)
        )
    }
    return sum(storages.values())


def test_early_exit_needs_no_more_memory_than_target_and_adapter() -> None:
    """Measured in the middle of a text: over plain decoding of the same text it holds the adapter and one round's states."""
    params = SamplingParams(max_tokens=40)
    sizes = {}
    gc.freeze()  # leaves out the objects of all imported libraries
    for kind in ("plain", "early-exit"):
        before = held_bytes()
        target = fused_target()
        head = EarlyExitHead.fresh(TargetModel.from_runtime(target), 1, exit_layer=2, mlp_size=32).double()
        adapter = sum(weight.numel() * weight.itemsize for weight in head.parameters())
        exits = drafter_of(target, 2, head)
        drafter = exits if kind == "early-exit" else NoDrafter()
        controller = make_controller("fixed:3" if kind == "early-exit" else "fixed:0")
        rounds = decode(
            Components(target, drafter, make_verifier("auto"), controller),
            [Row([3, 5, 7], params) for _ in range(4)],
        )
        for _ in range(5):
            next(rounds)
        sizes[kind] = held_bytes() - before - adapter  # both hold it, one of them idle
        rounds.close()
        del target, head, exits, drafter, rounds
    gc.unfreeze()
    cache = (
        4 * 2 * 4 * 2 * 256 * 16 * 8
    )  # layers, keys and values, slots, key heads, positions, head size, float64
    assert sizes["plain"] > cache
    assert sizes["early-exit"] - sizes["plain"] < 0.05 * cache


def test_a_changed_draft_is_computed_again() -> None:
    """Another token in place of one that was run ahead: its hidden states must not be used."""
    expected, found = fused_target(), fused_target()
    params = SamplingParams()
    draft, other = Draft.chains([[4, 5, 6]]), Draft.chains([[4, 8, 6]])
    logits = []
    for target in (expected, found):
        row = Row([1, 2, 3], params)
        target.begin([row])
        if target is found:
            target.run_first_layers([row], draft, 2)
        logits.append(target.score([row], other).logits)
    torch.testing.assert_close(logits[0], logits[1])


def test_an_interrupted_round_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are decoded again look as they did, but the cache has been written anew: what was read before is gone."""
    params = SamplingParams(max_tokens=12)
    texts = []
    for interrupted in (False, True):
        target = fused_target()
        rows = [Row(list(prompt), params) for prompt in ([9, 2], [3, 5, 7, 5, 7, 2, 8, 8, 4])]
        drafter = drafter_of(target, 2)
        components = Components(target, drafter, make_verifier("auto"), make_controller("fixed:3"))
        if interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(drafter, "_exit_logits", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    next(decode(components, rows))
        for _ in decode(components, rows):
            pass
        texts.append([row.output for row in rows])
    assert texts[0] == texts[1]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_invalid_numbers_of_first_layers_are_refused() -> None:
    target = fused_target()
    for num_layers in (0, 4):
        with pytest.raises(BadInputError, match="after layer 1 to 3"):
            drafter_of(target, num_layers)


def test_modules_are_refused_by_name() -> None:
    target = TransformersRuntime(tiny_target(num_layers=4))
    row = Row([1, 2, 3], SamplingParams())
    with pytest.raises(UnsupportedModelError, match="runtime native, fused or graphs"):
        target.run_first_layers([row], Draft.empty(1), 2)
    with pytest.raises(UnsupportedModelError, match="runtime native, fused or graphs"):
        target.skip_layers([1])


def test_modules_are_refused_before_the_first_draft(tiny_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"runs as a whole.*suffix"):
        load(tiny_checkpoint, "early-exit:1", runtime="transformers")
    model = tiny_target(num_layers=4)
    with pytest.raises(UnsupportedModelError, match=r"runs as a whole.*suffix"):
        model.generate(
            torch.tensor([[3, 4]]),
            custom_generate=custom_generate,
            max_new_tokens=1,  # no room for a draft: it is refused nevertheless
            drafter="early-exit:2",
        )


def test_runtimes_report_whether_they_support_partial_forward() -> None:
    assert fused_target().supports_partial_forward
    assert not TransformersRuntime(tiny_target()).supports_partial_forward


def test_a_saved_adapter_is_loaded_unchanged(tmp_path: Path) -> None:
    head = EarlyExitHead.fresh(TARGET, 5, exit_layer=2, mlp_size=16).double()
    torch.nn.init.normal_(head.down_proj.weight)
    head.save(tmp_path)
    loaded = EarlyExitHead.load(tmp_path, TARGET).double()
    states = torch.randn(2, 3, 64, dtype=torch.float64)
    torch.testing.assert_close(loaded(states), head(states))


def test_broken_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        EarlyExitHead.load(tmp_path, TARGET)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="got the model_type 'llama'"):
        EarlyExitHead.load(tmp_path, TARGET)
    for broken, message in (
        ({"exit_layer": None}, "the field 'exit_layer'"),
        ({"exit_layer": 0}, "whole number from 1 on"),
        ({"rms_norm_eps": "small"}, "could not convert"),
    ):
        EarlyExitHead(1, 64, 4).save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | broken))
        with pytest.raises(CheckpointError, match=message):
            EarlyExitHead.load(tmp_path, TARGET)
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected the field 'intermediate_size' in"):
        EarlyExitHead.load(tmp_path, TARGET)
    EarlyExitHead(1, 8, 4).save(tmp_path)
    target = fused_target()
    name = parse_name(f"early-exit:{tmp_path}", "drafter", ["early-exit"])
    with pytest.raises(CheckpointError, match="width of 64, got one for 8"):
        make_drafter(
            str(name), target_vocab_size=31, load_draft_model=lambda _: target, target=_Loaded(target)
        )


class _Loaded:
    name = "tiny"
    path = "."

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime


def test_a_batch_without_counted_positions_has_no_gradient() -> None:
    """Short answers, of which chance leaves out every place."""
    target = fused_target()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    target.request_hidden_states([2, -1])
    training_batch = TrainingBatch(
        tokens, torch.zeros_like(tokens, dtype=torch.bool), target.probe(tokens).hidden
    )
    head = EarlyExitHead.fresh(TargetModel.from_runtime(target), exit_layer=2, mlp_size=8).double()
    head.learn(training_batch, target.embedding_and_head(), objective("kl")).losses[0].backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in head.parameters())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_controller_reads_bfloat16_distributions(temperature: float) -> None:
    decoder = fuse(tiny_target(num_layers=4).bfloat16(), packed=False)
    assert decoder is not None
    for controller in ("cost", "confidence", "entropy"):
        target = FusedRuntime(decoder)
        assert play(target, StaticTree((2, 1)), temperature, controller) >= 0


def test_training_an_adapter_lowers_the_loss() -> None:
    target = fused_target()
    embedding_and_head = target.embedding_and_head()
    tokens = torch.randint(0, 31, (4, 24), generator=torch.Generator().manual_seed(0))
    target.request_hidden_states([2, -1])
    training_batch = TrainingBatch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), target.probe(tokens).hidden
    )
    head = EarlyExitHead.fresh(TargetModel.from_runtime(target), exit_layer=2, mlp_size=64).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    marks = []
    for _ in range(40):
        mark = head.learn(training_batch, embedding_and_head, objective("kl"))
        optimizer.zero_grad()
        mark.losses[0].backward()
        optimizer.step()
        marks.append(mark)
    assert marks[-1].losses[0] < 0.7 * marks[0].losses[0]
    assert marks[-1].accepted[0] > marks[0].accepted[0]


@pytest.mark.filterwarnings("default")
def test_an_adapter_of_another_target_is_used_with_a_warning(
    tiny_checkpoint: Path, tmp_path: Path, secondguess_command: Callable[..., Any]
) -> None:
    EarlyExitHead(1, 32, 16).save(tmp_path)
    Provenance("early-exit", "somebody", "0" * 64).write(tmp_path)
    done = secondguess_command(
        "generate", "abc", "--model", tiny_checkpoint, "--drafter", f"early-exit:{tmp_path}",
        "--max-tokens", 4, "--dtype", "float32",
    )  # fmt: skip
    assert done.code == 0
    warned = [line for line in done.err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert "trained for somebody with other weights" in warned[0]
