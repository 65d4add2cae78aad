"""The drop-in for `model.generate(custom_generate=...)`."""

import gc
import warnings
import weakref

import accelerate
import huggingface_hub
import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2ForCausalLM,
    MambaForCausalLM,
    NoRepeatNGramLogitsProcessor,
    T5Config,
)

import secondguess
import secondguess.drop_in.kept
from drop_in_cases import BATCH, BATCH_MASK, PROMPT, ours, tiny_model
from families import needs_kernels
from secondguess.checkpoint.loader import wrap_model
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.errors import CheckpointError, MismatchWarning, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.files import Provenance
from secondguess.heads.medusa import MedusaHead
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.modules.packing import why_not_copied
from secondguess.runtime.modules.support import cache_parameter
from secondguess.runtime.modules.transformers import TransformersRuntime
from tree_drafter import DistTreeDrafter

NUM_LINEARS = 7 * 2 + 1
"""Linear layers of the tiny model, its head included."""


@pytest.fixture
def model():
    return tiny_model()


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_greedy_output_equals_generate(model, drafter):
    plain = model.generate(PROMPT, max_new_tokens=30, do_sample=False)
    ours = model.generate(
        PROMPT,
        max_new_tokens=30,
        do_sample=False,
        custom_generate=secondguess.custom_generate,
        drafter=drafter,
    )
    assert torch.equal(ours, plain)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_drafts_with_a_quantised_copy(dtype, made_layers):
    """Which is made once, and freed with the model."""
    settings = {"max_new_tokens": 20, "do_sample": False}
    model = tiny_model().to(dtype)
    plain = model.generate(PROMPT, **settings)
    for _ in range(2):
        drafted = ours(model, PROMPT, drafter="self:int4", **settings)
        assert torch.equal(drafted, plain)
        assert len(made_layers) == NUM_LINEARS
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


@pytest.fixture
def made_layers(monkeypatch):
    """Return the list to which each layer of a quantised copy adds an entry when it is made."""
    made = []
    init = KernelLinear.__init__
    monkeypatch.setattr(KernelLinear, "__init__", lambda self, *args: (made.append(1), init(self, *args))[1])
    return made


@needs_kernels
def test_the_default_drafter_is_a_copy_where_memory_holds_it(made_layers, monkeypatch):
    settings = {"max_new_tokens": 12, "do_sample": False}
    model = tiny_model()
    plain = model.generate(PROMPT, **settings)
    for _ in range(2):
        assert torch.equal(ours(model, PROMPT, drafter=None, **settings), plain)
        assert len(made_layers) == NUM_LINEARS
    monkeypatch.setattr(secondguess.drop_in.kept, "available_memory", lambda device: 1000)
    assert torch.equal(ours(tiny_model(), PROMPT, drafter=None, **settings), plain)
    assert len(made_layers) == NUM_LINEARS


@needs_kernels
def test_a_model_in_training_is_not_copied(made_layers):
    settings = {"max_new_tokens": 12, "do_sample": False}
    model = tiny_model().train()
    ours(model, PROMPT, drafter=None, **settings)
    assert not made_layers
    ours(model.eval(), PROMPT, drafter=None, **settings)
    assert len(made_layers) == NUM_LINEARS
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert torch.equal(ours(model, PROMPT, drafter=None, **settings), model.generate(PROMPT, **settings))
    assert len(made_layers) == NUM_LINEARS
    ours(model, PROMPT, drafter="self:int4", **settings)
    assert len(made_layers) == 2 * NUM_LINEARS, "the copy had the weights from before"


@needs_kernels
@pytest.mark.parametrize("change", ["dtype", "parameters"])
def test_a_copy_is_made_again_of_other_weights(made_layers, change):
    settings = {"max_new_tokens": 12, "do_sample": False}
    model = tiny_model()
    ours(model, PROMPT, drafter=None, **settings)
    if change == "dtype":
        model.to(torch.bfloat16)
    else:
        model.load_state_dict(tiny_model(seed=3).state_dict(), assign=True)
    for _ in range(2):
        assert torch.equal(ours(model, PROMPT, drafter=None, **settings), model.generate(PROMPT, **settings))
    assert len(made_layers) == 2 * NUM_LINEARS


@needs_kernels
def test_the_default_of_a_class_of_ones_own_is_a_copy(made_layers):
    class OwnConfig(LlamaConfig):
        model_type = "own"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    source = tiny_model()
    model = Own(OwnConfig(**{**source.config.to_dict(), "model_type": "own"})).eval()
    model.load_state_dict(source.state_dict())
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours(model, PROMPT, drafter=None, **settings), source.generate(PROMPT, **settings))
    assert len(made_layers) == NUM_LINEARS


@needs_kernels
def test_a_model_whose_copy_would_run_its_own_layers_is_not_copied():
    model = tiny_model()
    plain, forward = model.generate(PROMPT, max_new_tokens=4, do_sample=False), model.forward
    model.forward = lambda *args, **settings: forward(*args, **settings)  # as torch.compile does
    assert torch.equal(ours(model, PROMPT, max_new_tokens=4, do_sample=False), plain)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, which runs its own layers"):
        ours(model, PROMPT, drafter="self:int4", max_new_tokens=4)


@pytest.mark.parametrize("made", [MambaForCausalLM, Mamba2ForCausalLM])
def test_a_model_of_recurrent_layers_alone_is_decoded(made):
    """Transformers adds an empty cache under another name."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
    if made is Mamba2ForCausalLM:
        sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2}
    model = made(made.config_class(**sizes, state_size=8, eos_token_id=1)).eval()
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours(model, PROMPT, **settings), model.generate(PROMPT, **settings))
    name = cache_parameter(made)
    used = model(PROMPT, use_cache=True)[name]
    with pytest.raises(secondguess.BadInputError, match=f"expected {name} "):
        ours(model, PROMPT, **{name: used}, **settings)


def test_a_model_with_another_head_is_decoded(model):
    model.lm_head = torch.nn.Sequential(model.lm_head)
    settings = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(ours(model, PROMPT, **settings), model.generate(PROMPT, **settings))


def test_an_offloaded_model_is_refused_in_every_call():
    model = accelerate.cpu_offload(tiny_model(), execution_device="cpu")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="got one that is offloaded"):
            ours(model, PROMPT, max_new_tokens=4)


@pytest.mark.parametrize(
    "settings", [{"drafter": 5}, {"drafter": ["ngram"]}, {"verifier": None}, {"controller": 5}]
)
def test_a_name_of_another_type_is_refused(model, settings):
    with pytest.raises(secondguess.BadInputError, match=f"expected {next(iter(settings))} to be a text"):
        ours(model, PROMPT, max_new_tokens=4, **settings)


@pytest.mark.parametrize("family", [T5Config, BartConfig])
def test_an_encoder_decoder_is_refused_as_such(family):
    config = family(vocab_size=40, d_model=64, decoder_start_token_id=0, pad_token_id=1)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(
        UnsupportedModelError, match="is an encoder-decoder; secondguess decodes decoder-only"
    ):
        ours(model, PROMPT, max_new_tokens=4)


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@needs_kernels
def test_under_autocast_the_text_is_that_of_transformers(model, made_layers):
    """The model's passes are cast, and the default drafter is `suffix`."""
    settings = {"attention_mask": BATCH_MASK, "max_new_tokens": 12, "do_sample": False}
    dtypes = set()
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: dtypes.add(logits.dtype))
    with autocast():
        plain = model.generate(BATCH, **settings)
        dtypes.clear()
        assert torch.equal(ours(model, BATCH, drafter=None, controller="fixed:3", **settings), plain)
        assert dtypes == {torch.bfloat16}
        assert not made_layers
    hook.remove()
    assert torch.equal(ours(model, BATCH, drafter=None, **settings), model.generate(BATCH, **settings))
    assert len(made_layers) == NUM_LINEARS


def test_a_copy_of_the_model_is_refused_under_autocast(model):
    with (
        autocast(),
        pytest.raises(secondguess.BadInputError, match=r"under torch.autocast: it copies the model"),
    ):
        ours(model, PROMPT, max_new_tokens=4, drafter="suffix+self:int4")


def test_a_draft_model_used_under_autocast_can_be_used_without(tiny_checkpoint):
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    drafter = {"drafter": f"model:{tiny_checkpoint}", "controller": "fixed:3"}
    secondguess.drop_in.kept.loaded_draft_model.cache_clear()
    with autocast():
        assert torch.equal(ours(model, BATCH, **settings, **drafter), model.generate(BATCH, **settings))
    assert torch.equal(ours(model, BATCH, **settings, **drafter), model.generate(BATCH, **settings))


def test_a_draft_model_for_a_model_without_files_is_refused(model, tiny_checkpoint):
    with pytest.raises(secondguess.BadInputError, match=r"a model without files .* Save model and tokenizer"):
        ours(model, PROMPT, max_new_tokens=4, drafter=f"model:{tiny_checkpoint}")
    with pytest.raises(CheckpointError, match="missing"):
        ours(model, PROMPT, max_new_tokens=4, drafter="model:/missing")


@needs_kernels
def test_a_model_with_weights_elsewhere_is_not_copied():
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    assert "not all on a CPU" in why_not_copied(model)


def test_left_padded_rows_equal_generate_and_pad_on_the_right(model):
    batch = torch.tensor([[2, 2, 5, 6, 5, 6], [9, 8, 7, 9, 8, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2}
    plain = model.generate(batch, **settings)
    ours = model.generate(batch, custom_generate=secondguess.custom_generate, drafter="ngram", **settings)
    assert torch.equal(ours, plain)


def test_a_seed_gives_the_same_sample_with_any_drafter(model):
    def sample(drafter):
        return model.generate(
            PROMPT,
            max_new_tokens=30,
            do_sample=True,
            temperature=1.2,
            top_k=10,
            custom_generate=secondguess.custom_generate,
            drafter=drafter,
            seed=5,
        )

    assert torch.equal(sample("none"), sample("suffix"))


def test_the_attention_of_the_users_model_is_restored(model):
    before = model.config._attn_implementation
    model.generate(PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"num_beams": 2}, "num_beams"),
        ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "NoRepeatNGramLogitsProcessor"),
        ({"max_time": 3.0}, "max_time"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(model, settings, named):
    with pytest.raises(secondguess.BadInputError, match=named):
        model.generate(
            PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none", **settings
        )


@pytest.fixture
def head(model, tmp_path):
    """An untrained head for the model, whose files lie in the folder `target`."""
    model.save_pretrained(tmp_path / "target")
    with wrap_model(model) as target:
        MedusaHead.fresh(TargetModel.from_runtime(target.runtime), num_heads=2).save(
            tmp_path / "head", target="tiny"
        )
    Provenance("medusa", "tiny", hash_weights(tmp_path / "target")).write(tmp_path / "head")
    return tmp_path / "head"


def draft_with(model, head):
    settings = {"max_new_tokens": 4, "do_sample": False, "custom_generate": secondguess.custom_generate}
    return model.generate(PROMPT, drafter=f"medusa:{head}", **settings)


@pytest.mark.parametrize("name", ["org/tiny", "org/gone", ""], ids=["cached", "gone", "nameless"])
def test_a_head_for_a_model_known_by_name_gives_no_warning(model, head, monkeypatch, name):
    found = {"org/tiny": str(head.parent / "target" / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, _: found.get(name))
    model.name_or_path = name
    with warnings.catch_warnings():
        warnings.simplefilter("error", MismatchWarning)
        draft_with(model, head)


def test_a_head_for_other_weights_gives_a_warning(model, head):
    model.name_or_path = str(head.parent / "target")
    Provenance("medusa", "somebody", "0" * 64).write(head)
    with pytest.warns(MismatchWarning, match="somebody"):
        draft_with(model, head)


def test_loading_a_head_draws_nothing_from_torchs_generator(model, head):
    before = torch.get_rng_state()
    draft_with(model, head)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_controller_is_kept_between_calls(model, monkeypatch):
    made = []

    def choose(name, drafter):
        made.append((name, drafter.name))
        return secondguess.api.choose_controller(name, drafter)

    monkeypatch.setattr(secondguess.drop_in.kept, "choose_controller", choose)
    settings = {"max_new_tokens": 3, "do_sample": False, "custom_generate": secondguess.custom_generate}
    for controller in (None, None, "fixed:2", None):
        model.generate(PROMPT, drafter="ngram", controller=controller, **settings)
    model.generate(PROMPT, drafter="suffix", **settings)
    assert [name for name, _ in made] == [None, "fixed:2", None]


def test_a_drafter_of_trees_with_a_verifier_of_chains_is_refused_before_generation(model, monkeypatch):
    monkeypatch.setattr(
        secondguess.drop_in, "make_drafter", lambda *_, **__: DistTreeDrafter(40, None, (2, 2))
    )
    with pytest.raises(secondguess.BadInputError, match=r"sampled-tree.*'block'"):
        model.generate(
            PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, verifier="block"
        )


def test_a_used_model_can_be_garbage_collected(model):
    settings = {"max_new_tokens": 3, "do_sample": False, "custom_generate": secondguess.custom_generate}
    used = model.__class__(model.config).eval()
    used.generate(PROMPT, drafter="ngram", **settings)
    gone = weakref.ref(used)
    del used
    gc.collect()
    assert gone() is None


def test_the_public_name_is_the_function_after_repeated_access():
    assert secondguess.custom_generate is secondguess.custom_generate
    assert callable(secondguess.custom_generate)


def test_an_attention_mask_is_accepted(model):
    mask = torch.ones_like(PROMPT)
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    ours = model.generate(PROMPT, custom_generate=secondguess.custom_generate, drafter="ngram", **settings)
    assert torch.equal(ours, model.generate(PROMPT, **settings))


def test_inputs_that_would_change_the_text_are_refused(model):
    embeddings = model.get_input_embeddings()(PROMPT + 3).detach()
    for extra in ({"inputs_embeds": embeddings}, {"use_cache": False}, {"position_ids": PROMPT * 0}):
        with pytest.raises(secondguess.BadInputError, match=next(iter(extra))):
            model.generate(
                PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none", **extra
            )


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(secondguess.BadInputError, match="context of 128"):
        model.generate(
            PROMPT.repeat(1, 12),
            max_new_tokens=20,
            custom_generate=secondguess.custom_generate,
            drafter="none",
        )


def test_training_modes_are_restored(model):
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    model.generate(PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none")
    assert [module.training for module in model.modules()] == before


def test_a_call_interrupted_before_its_context_restores_the_model(model, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersRuntime, "__enter__", interrupt)
    model.train()
    before = model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, max_new_tokens=3, custom_generate=secondguess.custom_generate, drafter="none")
    assert (model.config._attn_implementation, model.training) == (before, True)
