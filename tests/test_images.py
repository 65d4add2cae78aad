"""Vision-language targets: prompts with images give the text of Transformers' own generate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from checkpoints import write_llama, write_tokenizer
from families import GEMMA, LLAMA_LIKE, VOCAB_SIZE, needs_kernels
from secondguess import load
from secondguess.api import LLM, encode
from secondguess.checkpoint.classes import outline_of
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint, ties_embeddings
from secondguess.controllers import make_controller
from secondguess.drafters.self import SelfDrafter
from secondguess.errors import BadInputError, CheckpointError
from secondguess.prompts import EncodedPrompt
from secondguess.verifiers import make_verifier

IMAGE_TOKEN = VOCAB_SIZE
TEXT = LLAMA_LIKE | {"vocab_size": VOCAB_SIZE + 1, "max_position_embeddings": 128}
CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4, "initializer_range": 0.3, "initializer_factor": 10.0}  # fmt: skip
NUM_TOKENS = 16
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}assistant:"
)


def llava() -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP), text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE_TOKEN, vision_feature_layer=-1,
    )  # fmt: skip


def gemma3() -> Any:
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**CLIP),
        text_config=transformers.Gemma3TextConfig(**TEXT, **GEMMA, query_pre_attn_scalar=8),
        mm_tokens_per_image=16, image_token_id=IMAGE_TOKEN,
    )  # fmt: skip


def qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    return transformers.Qwen3VLConfig(
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
                       "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
                       "initializer_range": 0.3},
        text_config=TEXT | {"head_dim": 8, "rope_parameters": rope}, image_token_id=IMAGE_TOKEN,
    )  # fmt: skip


def image(seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (16, 24, 3), generator=generator, dtype=torch.uint8).numpy())


def asked(picture: Image.Image, text: str = "def quicksort(items):") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}
    ]


class StubProcessor:
    """Processor of models whose own needs torchvision, with the same outputs: 6 or 16 tokens per image."""

    def __init__(self, model_type: str) -> None:
        self.is_qwen = model_type == "qwen3_vl"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: object) -> dict[str, torch.Tensor]:
        (picture,) = [part["image"] for part in messages[0]["content"] if part["type"] == "image"]
        pixels = torch.tensor(list(picture.convert("RGB").tobytes())).float() / 127.5 - 1
        num_tokens = 6 if self.is_qwen else 16
        ids = torch.tensor([[5, 6, *[IMAGE_TOKEN] * num_tokens, 9, 8, 7]])
        types = (ids == IMAGE_TOKEN).long()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_qwen:  # 4 x 6 patches of 2 times 3 x 4 x 4 numbers
            patches = pixels.view(24, 48).repeat(1, 2)
            grid = torch.tensor([[1, 4, 6]])
            return inputs | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}
        square = pixels.view(16, 24, 3)[:, :16].permute(2, 0, 1)[None]
        return inputs | {"pixel_values": square, "token_type_ids": types}


def write_vision_model(config: Any, directory: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # images that texts depend on
            if "projector" in name or "merger" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    if config.model_type == "llava":
        transformers.LlavaProcessor(
            LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
            tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=TEMPLATE,
        ).save_pretrained(directory)  # fmt: skip
    else:
        tokenizer.save_pretrained(directory)
    return directory


def inputs_of(checkpoint: Checkpoint, picture: Image.Image) -> dict[str, torch.Tensor]:
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    return dict(checkpoint.processor.apply_chat_template(asked(picture), **options))


@dataclass
class Vision:
    """A checkpoint and the texts that Transformers alone generates for two images."""

    llm: LLM
    pictures: list[Image.Image]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=[llava, gemma3, qwen3_vl], ids=lambda make: make.__name__)
def vision(request, tmp_path_factory):
    path = write_vision_model(request.param(), tmp_path_factory.mktemp("vision"))
    llm = load(path, "suffix", dtype="float32", device="cpu")
    checkpoint = llm.target.checkpoint
    if request.param is not llava:
        vars(checkpoint.source)["processor"] = StubProcessor(checkpoint.config.model_type)
    module = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    pictures, expected = [image(1), image(2)], []
    for picture in pictures:
        inputs = inputs_of(checkpoint, picture)
        limits = {
            "max_new_tokens": NUM_TOKENS,
            "min_new_tokens": NUM_TOKENS,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        found = module.generate(**inputs, do_sample=False, **limits)
        expected.append(found[0, inputs["input_ids"].shape[1] :].tolist())
    assert expected[0] != expected[1]
    return Vision(llm, pictures, expected)


def generated(vision: Vision, prompts: Any, **settings: Any) -> Any:
    limits = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 0}
    return vision.llm.generate(prompts, **limits | settings)


@needs_kernels
def test_a_quantised_copy_drafts_after_images(vision):
    target = vision.llm.target
    llm = LLM(
        target,
        SelfDrafter(target.runtime, "self:int4"),
        make_verifier("auto"),
        make_controller("fixed:3"),
    )
    drafting = Vision(llm, vision.pictures, vision.expected)
    outputs = generated(drafting, [asked(picture) for picture in vision.pictures])
    assert [output.token_ids for output in outputs] == vision.expected
    assert sum(output.stats.num_accepted for output in outputs) > 0


def test_prompts_with_images_give_the_text_of_transformers(vision):
    """Equal tokens with another image share nothing, also in one batch with a text."""
    alone = [generated(vision, asked(picture)).token_ids for picture in vision.pictures]
    assert alone == vision.expected
    text = generated(vision, "def f(x):")
    batch = generated(vision, [asked(vision.pictures[0]), "def f(x):", asked(vision.pictures[1])])
    assert [each.token_ids for each in batch] == [alone[0], text.token_ids, alone[1]]


def test_drafts_after_images_are_verified(vision):
    """Of a draft with errors the right tokens are accepted."""
    draft = [token if place % 4 != 3 else 1 for place, token in enumerate(vision.expected[0])]
    output = generated(vision, asked(vision.pictures[0]), prediction=draft)
    assert output.token_ids == vision.expected[0]
    assert 0 < sum(output.drafted) < NUM_TOKENS


def test_samples_of_a_prompt_share_its_images(vision):
    """The images are run once for all samples."""
    runtime, prompt = vision.llm.target.runtime, asked(vision.pictures[1])
    before = runtime.num_prefilled
    samples = generated(vision, prompt, n=3, temperature=1e-4, seed=1)
    num_prefilled = runtime.num_prefilled - before
    assert [sample.token_ids for sample in samples] == [vision.expected[1]] * 3
    generated(vision, prompt)
    assert runtime.num_prefilled - before == 2 * num_prefilled


def test_a_list_of_texts_is_one_text(vision):
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "f(x):"}]
    target = vision.llm.target
    target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    ids = encode(target, [{"role": "user", "content": parts}])
    assert ids == encode(target, [{"role": "user", "content": "def f(x):"}])


LIST_TEMPLATE = """{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] \
| selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("place", ["tokenizer", "processor"])
def test_a_template_that_reads_lists_alone_gets_them(vision, monkeypatch, place):
    """That of Llava leaves out a content that is a text; old checkpoints have a template of the processor only."""
    target = vision.llm.target
    monkeypatch.setattr(target.tokenizer, "chat_template", LIST_TEMPLATE if place == "tokenizer" else None)
    monkeypatch.setattr(target.checkpoint.processor, "chat_template", LIST_TEMPLATE, raising=False)
    for content in ("def f(x):", [{"type": "text", "text": "def f(x):"}]):
        ids = encode(target, [{"role": "user", "content": content}])
        assert ids == target.tokenizer("user:def f(x):").input_ids


def test_a_prompt_that_ends_with_an_image_is_refused(vision):
    inputs = inputs_of(vision.llm.target.checkpoint, vision.pictures[0])
    is_image = inputs["input_ids"][0] == IMAGE_TOKEN
    end = int(is_image.nonzero()[-1]) + 1
    cut = {
        name: each[:, :end] if each.shape == inputs["input_ids"].shape else each
        for name, each in inputs.items()
    }
    with pytest.raises(BadInputError, match="text after the last image"):
        vision.llm.generate(EncodedPrompt.from_inputs(cut), max_tokens=2)


@pytest.mark.parametrize("is_tied", [True, False])
def test_heads_are_tied_as_the_outer_configuration_says(is_tied):
    """That of Llava is tied if the text's is."""
    text = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99,
        tie_word_embeddings=not is_tied,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    model = outline_of(config)
    model.tie_weights()
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert ties_embeddings(config) == shared


@pytest.mark.parametrize(
    ("dtype", "quantize"), [("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")]
)
def test_other_dtypes_and_encodings_are_loaded(dtype, quantize, vision, secondguess_command):
    """The field for tied embeddings may be outside of the text's configuration."""
    path = vision.llm.target.checkpoint.path
    loaded = load_model(Checkpoint.resolve(path, dtype=dtype, device="cpu", quantize=quantize))
    logits = loaded.runtime.probe(torch.arange(5, 12)[None]).logits
    exact = vision.llm.target.runtime.probe(torch.arange(5, 12)[None]).logits
    assert (logits - exact).norm() < 0.6 * exact.norm()
    assert secondguess_command("inspect", path, "--dtype", dtype).code == 0


def test_a_model_without_its_processor_is_named(vision):
    checkpoint = vision.llm.target.checkpoint
    processor = vars(checkpoint.source).pop("processor")
    try:
        if checkpoint.config.model_type == "llava":
            assert type(checkpoint.processor).__name__ == "LlavaProcessor"
        else:
            with pytest.raises(
                CheckpointError, match=r"expected a processor for images that can be read in .*, got"
            ):
                generated(vision, asked(vision.pictures[0]))
    finally:
        vars(checkpoint.source)["processor"] = processor


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return load(write_llama(tmp_path_factory.mktemp("text"), seed=0), "none", dtype="float32", device="cpu")


def test_a_model_of_texts_refuses_images(text_model):
    with pytest.raises(BadInputError, match="got an image; images are taken by gemma3"):
        text_model.generate(asked(image(1)))


@pytest.mark.parametrize(
    "part",
    ["text", {"type": "image", "image": "/etc/passwd"}, {"type": "image"}, {"type": "text", "text": 3},
     {"type": "image", "url": "http://localhost"}],
)  # fmt: skip
def test_other_parts_of_a_message_are_refused(part, text_model):
    """A path or an address would be opened by the processor."""
    with pytest.raises(BadInputError, match=r"each part of messages\[0\] to be text or an image"):
        text_model.generate([{"role": "user", "content": [part]}])


def test_images_are_refused_where_token_ids_are_made(vision):
    with pytest.raises(BadInputError, match=r"images are taken by LLM\.generate"):
        encode(vision.llm.target, asked(vision.pictures[0]))
