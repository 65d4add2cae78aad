"""Run the compiled kernels on random models and inputs under ASAN and UBSAN: `make fuzz`.

    python tests/fuzz_kernels.py --minutes 10
    python tests/fuzz_kernels.py --tests tests/runtime tests/heads

Builds the kernels of this processor with both sanitizers in a temporary copy of the package, and runs
itself with them. Each case is a random model with rows, drafts and weights of random shapes, random
logits with random settings, or a product; results are compared with those of other paths. The first
failure ends the run with the seed of its case: `--seed SEED --cases 1` repeats it. With `--tests` the
tests in these folders run with the sanitizers instead.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
COPY = "SECONDGUESS_SANITIZED"
"""Environment variable that names the copy of the package, in the process that runs with it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=None, help="number of cases, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="PATH",
        help="tests to run instead of cases; needs none of the other options",
    )
    options = parser.parse_args()
    if COPY in os.environ:
        check_copy()
        if options.tests:
            import pytest

            sys.exit(pytest.main([*options.tests, "-q", "-p", "no:cacheprovider"]))
        fuzz(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run_with_sanitizers(Path(folder)))


def run_with_sanitizers(folder: Path) -> int:
    """Build a copy of the package with sanitizers, run this file with it, and return its exit code."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    flags = {"CFLAGS": SANITIZERS, "CXXFLAGS": SANITIZERS, "LDFLAGS": SANITIZERS}
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, env=os.environ | flags, check=True, stdout=subprocess.DEVNULL)
    libraries = [
        subprocess.run(["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    settings = {
        COPY: str(folder),
        "PYTHONPATH": os.pathsep.join(
            map(str, (folder / "src", ROOT / "tests", ROOT / "tests" / "drafters"))
        ),
        "LD_PRELOAD": " ".join(each.stdout.strip() for each in libraries),
        # Python and torch keep memory until the end, and define some symbols twice.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([sys.executable, *sys.argv], env=os.environ | settings, check=False).returncode


def check_copy() -> None:
    """Check that the package with sanitizers is imported, and has kernels."""
    from secondguess.runtime.cpu import library

    loaded = Path(library.__file__)
    assert library.units(), "expected kernels, got none; were they built?"
    assert loaded.is_relative_to(os.environ[COPY]), f"expected the copy of the package, got {loaded}"


def fuzz(options: argparse.Namespace) -> None:
    """Run cases with successive seeds."""
    from secondguess.runtime.cpu import library

    units = library.units()
    cases = (decoder_case, chain_case, product_case, sampling_case)
    end, seed, counts = time.monotonic() + 60 * options.minutes, options.seed, Counter[str]()
    while time.monotonic() < end if options.cases is None else seed < options.seed + options.cases:
        rng = random.Random(seed)
        case = rng.choice(cases)
        try:
            case(rng)
        except BaseException:
            print(f"case {seed} ({case.__name__}) failed", flush=True)
            raise
        counts[case.__name__] += 1
        seed += 1
    print(f"{seed - options.seed} cases on {', '.join(unit.name for unit in units)}: {dict(counts)}")


def random_decoder(rng: random.Random):
    """Return a fused decoder of a random family and shape, and an encoding and a unit for it."""
    import torch
    import transformers

    from families import COVERED, FAMILIES
    from secondguess.runtime.cpu import library
    from secondguess.runtime.decoder.fused import fuse
    from secondguess.runtime.weight_format import BFLOAT16, INT4, INT8, INT8_GROUPS

    name = rng.choice(COVERED)
    config = FAMILIES[name]()
    if name == "llama":
        config.head_dim = rng.choice([2, 6, 8, 16, 64, 80])
        config.num_key_value_heads = rng.choice([1, 2, 4])
        config.hidden_size, config.intermediate_size = (
            8 * rng.randint(1, 40),
            rng.choice([8, 24, 64, 328]),
        )
        config.attention_bias = rng.random() < 0.5
    if name == "qwen3-moe":
        config.num_experts = rng.choice([1, 4, 33, 70])
        config.num_experts_per_tok = rng.randint(1, min(config.num_experts, 5))
        config.moe_intermediate_size = rng.choice([8, 17, 48, 65])
        config.mlp_only_layers = rng.choice([[], [0]])
        config.norm_topk_prob = rng.random() < 0.5
    torch.manual_seed(rng.getrandbits(32))
    # torch's grouped products take only sizes that are multiples of 8
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    )
    decoder = fuse(model.eval(), packed=False)
    assert decoder is not None, name
    return decoder, rng.choice([BFLOAT16, INT8, INT4, INT8_GROUPS]), rng.choice(library.units())


def decoder_case(rng: random.Random) -> None:
    """Compare drafts in batches, after prefills in pieces, with whole texts."""
    import torch

    from families import random_tokens, row_of
    from secondguess.core import Draft
    from secondguess.runtime.cpu.decoder import NativeDecoder
    from secondguess.runtime.cpu.runtime import NativeRuntime

    runtime = NativeRuntime(NativeDecoder(*random_decoder(rng)))
    runtime.prefill_chunk = rng.choice([1, 7, 16, 512])
    torch.set_num_threads(rng.randint(1, 3))
    runtime.request_hidden_states(rng.choice([(), (0,), (1, -1)]))
    if rng.random() < 0.5:  # as heads do, in the buffers of the decoder's passes
        head = runtime.embedding_and_head()
        head.unembed(torch.zeros(rng.randint(1, 80), head.width, dtype=head.dtype))
    rows, chains, expected = [], [], []
    for number in range(rng.randint(1, 4)):
        length, drafted = rng.randint(1, 60), rng.randint(0, 9)
        tokens = random_tokens(length + drafted, seed=rng.getrandbits(30) + number)
        whole = NativeRuntime(runtime.decoder).probe(torch.tensor([tokens])).logits[0]
        rows.append(row_of(tokens[:length]))
        chains.append(tokens[length:])
        expected.append(whole[length - 1 :])
    runtime.begin(rows)
    draft = Draft.chains(chains)
    for _ in range(2):
        logits = runtime.score(rows, draft).logits
        for own, whole in zip(logits, expected, strict=True):
            assert torch.equal(own[: len(whole)], whole)
        runtime.rewind(rows, [len(row.tokens) - 1 - rng.randrange(2) * (len(row.tokens) > 1) for row in rows])
    parents = [[rng.randint(-1, node - 1) for node in range(draft.num_nodes)] for _ in rows]
    tree = Draft(draft.tokens, torch.tensor(parents).reshape(draft.tokens.shape), draft.lengths)
    assert runtime.score(rows, tree).logits.isfinite().all()
    runtime.keep(rows, [_random_path(rng, shape) for shape in tree.shapes])
    for row in rng.sample(rows, len(rows)):
        runtime.release(row)


def _random_path(rng: random.Random, parents: tuple[int, ...]) -> list[int]:
    path: list[int] = []
    while children := [node for node, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
        if rng.random() < 0.3:
            break
        path.append(rng.choice(children))
    return path


def chain_case(rng: random.Random) -> None:
    """Draft chains of a row, or of a batch, at once and token by token."""
    from unittest.mock import patch

    import torch
    from chain_cases import SETTINGS, compare_batches, run_batches, run_rounds

    from secondguess.drafters.model import ModelDrafter
    from secondguess.runtime.cpu.decoder import NativeDecoder
    from secondguess.runtime.cpu.runtime import NativeRuntime
    from secondguess.sampling.noise import KeyedNoise

    # By the unit whose kernels also draw token by token.
    decoder = NativeDecoder(*random_decoder(rng)[:2])
    seed, settings, found = rng.getrandbits(30), rng.choice(SETTINGS), []
    is_batch = rng.random() < 0.5
    torch.set_num_threads(rng.randint(1, 3))
    vocab_size = decoder.described.head.num_outputs - rng.randint(0, 5)
    for method in (KeyedNoise.of_rows, lambda self: None):
        drafter = ModelDrafter(NativeRuntime(decoder), "model:draft", vocab_size)
        with patch.object(KeyedNoise, "of_rows", method):
            own = random.Random(seed)
            found.append(
                run_batches(drafter, None, own) if is_batch else run_rounds(drafter, None, own, settings)
            )
    if is_batch:
        compare_batches(*found)
        return
    for (tokens, probs, *decisions), (own_tokens, own_probs, *own_decisions) in zip(*found, strict=True):
        assert (tokens, decisions) == (own_tokens, own_decisions)
        assert probs is own_probs is None or torch.equal(probs, own_probs)


def product_case(rng: random.Random) -> None:
    """Compare a product with torch's in float64."""
    import torch
    from runtime.test_native import Product, as_rounded

    from secondguess.runtime.cpu import library
    from secondguess.runtime.weight_format import BFLOAT16, INT4, INT8, INT8_GROUPS

    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    num_outputs, num_inputs, num_rows = rng.randint(1, 400), 8 * rng.randint(1, 60), rng.randint(1, 70)
    weight_format = rng.choice([BFLOAT16, INT8, INT4, INT8_GROUPS])
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    states = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    torch.set_num_threads(rng.randint(1, 3))
    expected = states.double() @ as_rounded(weight, weight_format).double().T
    found = Product(weight, weight_format, rng.choice(library.units())).multiply(states).double()
    tolerance = 0.03 if weight_format.is_quantised else 0.01
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def sampling_case(rng: random.Random) -> None:
    """Compare probabilities with torch's, and draw from them."""
    from unittest.mock import patch

    import numpy
    import torch

    from secondguess.sampling import SamplingParams, truncation
    from secondguess.sampling import kernels as sampling

    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    shape = (rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 3000))
    logits = torch.randn(shape, generator=generator) * rng.choice([0.0, 1.0, 10.0])
    logits[torch.rand(shape, generator=generator) < rng.choice([0.0, 0.3])] = -torch.inf
    logits[..., 0] = 0.0
    params = SamplingParams(
        temperature=rng.choice([0.05, 0.7, 1.0, 30.0]),
        top_k=rng.choice([0, 1, 5, 1000]),
        top_p=rng.choice([1.0, 0.9, 0.01]),
        min_p=rng.choice([0.0, 0.1]),
    )
    rule = truncation.make_rule([params] * shape[0], logits.device)
    found = rule(logits)
    with patch.object(truncation, "kernels_for", lambda *_: None):
        expected = rule(logits)
    # Which of the logits at a limit are kept may differ by rounding; the others are in proportion.
    kept = (found > 0) & (expected > 0)
    assert ((found > 0) != (expected > 0)).sum(-1).max() <= 2 or params.top_p == 1
    for own, other, both in zip(found.flatten(0, 1), expected.flatten(0, 1), kept.flatten(0, 1), strict=True):
        ratios = own[both & (other > 1e-6)] / other[both & (other > 1e-6)]
        assert ratios.max() <= 1.01 * ratios.min()
    numpy.testing.assert_allclose(found.double().sum(-1).numpy(), 1, rtol=1e-4)
    uniforms = numpy.random.default_rng(rng.getrandbits(30)).random(shape[:2])
    drawn = sampling.draw_by_inversion(found, uniforms)
    assert (found.gather(-1, drawn[..., None]) > 0).all()
    left, masses = sampling.residuals(numpy.ones(shape[:2]), found, expected)
    numpy.testing.assert_allclose(masses, left.double().sum(-1).numpy(), atol=1e-5)
    assert (masses == sampling.residual_masses(numpy.ones(shape[:2]), found, expected)).all()
    tokens, confidences = sampling.with_confidences(logits[0])
    assert tokens == logits[0].argmax(-1).tolist()
    numpy.testing.assert_allclose(confidences, logits[0].softmax(-1).amax(-1).numpy(), rtol=1e-4)


if __name__ == "__main__":
    main()
