"""Measure a random target of the shape of an 8B model, with a small drafter, on one CUDA GPU.

    python benchmarks/gpu.py --seconds 420 --output gpu.json

The models are made on the device, as in make_pair.py; the drafter is the target's first layer with its norm
and head. The output is written at every result; what time (`--seconds`) or memory does not allow, and what
fails, is left out and listed. Sections (`--only costs,single`):

- `bandwidth`: rate of copies within the device's memory, bytes read plus bytes written.
- `costs`: v(m), the time of a target pass over m tokens relative to one, and c, that of a draft step; also for the
  target's copy in 4 bits.
- `profile`: host synchronisations per round, and the kernels that take longest.
- `single`: one text at a time, ours and Transformers (eager, sdpa) in random order; for constant draft
  lengths also the speed that tau (tokens per target pass), v and c predict for rounds without prefill.
- `batches`: new tokens per second by batch size and context while all rows decode, prefill excluded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from make_pair import damp_until, first_layers, random_target
from transformers import LlamaConfig, LlamaForCausalLM

from secondguess.api import choose_controller
from secondguess.bench.costs import ForwardTimer, synchronise
from secondguess.bench.peers import TransformersSystem
from secondguess.bench.summary import sum_stats
from secondguess.bench.tables import show, table
from secondguess.checkpoint.memory import available_memory
from secondguess.core import Row
from secondguess.decode import Batch, Components
from secondguess.drafters.self import SelfDrafter
from secondguess.drafters.spec import make_drafter
from secondguess.errors import OutOfMemoryError
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.chains import ChainRequest, RowNoise
from secondguess.runtime.cuda.runtime import GraphRuntime
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.modules.support import cached_layers, cached_values_per_token
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.runtime.weight_format import INT4
from secondguess.sampling import SamplingParams
from secondguess.sampling.truncation import kernel_settings
from secondguess.verifiers import make_verifier
from secondguess.workloads.provenance import collect_provenance

Json = dict[str, Any]
LLAMA_8B = {"vocab_size": 128256, "intermediate_size": 14336, "max_position_embeddings": 131072}
TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4}
SHAPES = {"8b": (LLAMA_8B, torch.bfloat16), "tiny": (TINY, torch.float32)}  # other sizes: Llama 7B
BATCHES = {"8b": ((1, 4, 16, 64), (1024, 8192, 32768)), "tiny": ((1, 4), (256, 1024))}
COPIED_BYTES, NUM_COPIES = {"cuda": 2**32, "cpu": 2**26}, 20
WIDTHS, DRAFT_LENGTHS, NUM_SAMPLES = (1, 2, 3, 4, 5, 6, 8, 9, 16), (3, 5, 7), 8
CONTEXT, PROMPT_LENGTH, OWN_LENGTH = 200, 128, 32
"""Tokens before a timed pass, of a prompt, and at the end of each prompt of a batch (those before are the same)."""
CACHE_SHARE = 0.6  # of the free memory may be taken by the caches of a batch
PLAIN, DRAFTER, COPY, SEED, SHARPNESS = "secondguess plain", "model:drafter", "self:int4", 0, 6.0
BATCH_WAY = "fixed:3"
CHAIN = 4  # nodes of the chains by which draft steps of the copy are timed
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
NUM_KERNELS = 12  # listed by a profile
NUMBERS = {"seconds": 420.0, "agreement": 0.8, "tokens": 256, "prompts": 3, "turns": 1, "batch-tokens": 48}


@dataclass(eq=False)
class Report:
    """Results so far, written at every change; after the given seconds, no measurement is begun."""

    path: Path
    seconds: float
    values: Json
    started: float = field(default_factory=time.perf_counter)

    def put(self, name: str, value: object) -> None:
        self.values |= {name: value, "seconds": round(time.perf_counter() - self.started, 1)}
        print(f"{self.values['seconds']} s: {name}", flush=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1) + "\n")
        part.replace(self.path)  # a run that is killed leaves a whole file

    def attempt(self, what: str, measure: Callable[..., Any], *inputs: Any) -> Any:
        """Return a measurement, or None if no time is left or it fails: the others still run."""
        try:
            if time.perf_counter() - self.started > self.seconds:
                raise TimeoutError("no time was left")
            return measure(*inputs)
        except Exception as error:
            traceback.print_exc(limit=-3)
            return self.put("skipped", self.values["skipped"] | {what: repr(error)[:300]})


class Timing(NamedTuple):
    """New tokens of a batch, target passes added over its rows, and seconds with and without prefill."""

    texts: list[list[int]]
    num_tokens: int
    num_passes: int
    seconds: float
    round_seconds: float = 0.0


class Pair(NamedTuple):
    """Our runtimes of target and drafter, and modules on the same weights for Transformers."""

    target: CachedRuntime
    drafter: CachedRuntime
    modules: list[Any]
    about: Json


def make_runtime(module: Any) -> CachedRuntime:
    """Return the runtime that is measured, which may change the module or take its weights."""
    if module.device.type == "cpu":
        return TransformersRuntime(module)
    return GraphRuntime(FusedDecoder(module, packed=False))


@torch.no_grad()
def make_pair(sizes: Json, dtype: torch.dtype, device: str, agreement: float) -> Pair:
    config = LlamaConfig(**sizes, num_key_value_heads=8, bos_token_id=None, eos_token_id=None)
    target = random_target(config, SHARPNESS, device)  # bfloat16, but for the rotary frequencies
    target = target.float() if dtype == torch.float32 else target
    drafter = first_layers(target, 1)
    damping, found = damp_until(target, drafter, 1, agreement)
    models = {"target": target, "drafter": drafter}
    about = {"asked": agreement, "damping": damping, **asdict(found), "config": config.to_dict()}
    about |= {name: weights_of(model) for name, model in models.items()}
    ours, theirs = ([twin(model) for model in models.values()] for _ in range(2))
    return Pair(make_runtime(ours[0]), make_runtime(ours[1]), theirs, about)


def twin(model: Any) -> Any:
    """Return another module on the same weights."""
    with torch.device("meta"):
        other = LlamaForCausalLM(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict(), assign=True)
    other.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    other.set_attn_implementation("sdpa")
    return other.requires_grad_(False).eval()


def weights_of(model: Any) -> Json:
    """Return parameters, bytes that a token reads (all weights but the embeddings), and bytes that it caches."""
    size, total = model.dtype.itemsize, model.num_parameters()
    cached = size * sum(map(cached_values_per_token, cached_layers(model.config)))
    read = size * (total - model.get_input_embeddings().weight.numel())
    return {"parameters": total, "bytes_read": read, "bytes_cached": cached}


class Ours:
    """Our decoding loop with one drafter and one controller (None: the drafter's default)."""

    def __init__(self, pair: Pair, kind: str = DRAFTER, controller: str | None = None) -> None:
        size = pair.target.vocab_size
        drafter = (
            SelfDrafter(pair.target, kind)
            if kind == COPY
            else make_drafter(kind, target_vocab_size=size, load_draft_model=lambda _: pair.drafter)
        )
        parts = (pair.target, drafter, make_verifier("auto"), choose_controller(controller, drafter))
        self._components = Components(*parts)

    @torch.inference_mode()
    def decode(self, prompts: Any, length: int, temperature: float, seed: int, whole: bool = True) -> Timing:
        """Decode prompts as one batch, `length` tokens each; if not `whole`, until this is the mean, with reuse."""
        target, drafter = self._components.target, self._components.drafter
        if whole:
            target.reset_prefix_cache()
            drafter.reset_prefix_cache()
        params = SamplingParams(length if whole else 2 * length, temperature=temperature)
        rows = [Row(list(prompt), params, seed, index) for index, prompt in enumerate(prompts)]
        with closing(Batch(self._components)) as batch:
            times = [now(target.device)]
            batch.add(rows)
            for group in filter(None, (rows[:1], rows[1:])):  # which copy what they share with the first
                batch.prefill(group)
                drafter.prepare(group, [0] * len(group))
            times.append(now(target.device))
            while batch and (whole or sum(row.num_output for row in rows) < length * len(rows)):
                batch.step()
            times.append(now(target.device))
        stats = sum_stats(map(self._components.recorder.of, rows))
        seconds = (times[2] - times[0], times[2] - times[1])
        return Timing([row.output for row in rows], stats.num_tokens, stats.num_rounds, *seconds)


def now(device: torch.device) -> float:
    synchronise(device)
    return time.perf_counter()


class Theirs:
    """`generate` of Transformers, plain or with an assistant."""

    def __init__(self, *modules: Any) -> None:
        models: Any = [SimpleNamespace(module=it, generation_config=it.generation_config) for it in modules]
        self._system = TransformersSystem(models[0], assistant=models[1] if models[1:] else None)
        self._passes: list[int] = []
        modules[0].register_forward_pre_hook(lambda *_: self._passes.append(1))

    def decode(self, prompts: Any, length: int, temperature: float, seed: int) -> Timing:
        self._passes.clear()
        run = self._system.generate(prompts[:1], length, temperature, seed)
        return Timing(run.texts, run.num_tokens, len(self._passes), run.seconds)


def systems_of(pair: Pair) -> dict[str, Any]:
    names = ("transformers plain", "transformers assisted", PLAIN, "secondguess default")
    systems = (Theirs(pair.modules[0]), Theirs(*pair.modules), Ours(pair, "none"), Ours(pair))
    lengths = {f"secondguess fixed:{k}": Ours(pair, controller=f"fixed:{k}") for k in DRAFT_LENGTHS}
    copied = {} if pair.target.why_not_copied else {f"secondguess {COPY}": Ours(pair, COPY)}
    return dict(zip(names, systems, strict=True)) | lengths | copied


def random_tokens(pair: Pair, *size: int, seed: int = 0) -> Any:
    return torch.randint(pair.target.vocab_size, size, generator=torch.manual_seed(seed)).tolist()


def measure_bandwidth(device: torch.device) -> Json:
    size, marks, on_cpu = COPIED_BYTES[device.type], list[Any](), device.type == "cpu"
    source, copied = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    for _ in range(NUM_COPIES + 3):
        copied.copy_(source)
        marks.append(time.perf_counter() if on_cpu else torch.cuda.Event(enable_timing=True))
        if not on_cpu:
            marks[-1].record()
    synchronise(device)
    spans = [last - first if on_cpu else first.elapsed_time(last) / 1000 for first, last in pairwise(marks)]
    return {"bytes_per_second": 2 * size / median(spans[2:]), "range": [min(spans[2:]), max(spans[2:])]}


def measure_costs(pair: Pair) -> Json:
    timer = ForwardTimer(pair.target, {DRAFTER: pair.drafter}, random_tokens(pair, CONTEXT), WIDTHS)
    timer.warm_up()
    for _ in range(NUM_SAMPLES):
        timer.sample()
    costs = timer.costs(DRAFTER)
    passes = {f"secondguess fixed:{k}": k * costs.cost_ratio + costs.curve[k + 1] for k in DRAFT_LENGTHS}
    copied = {} if pair.target.why_not_copied else time_copy(pair)
    found = {"v": costs.curve, "c": costs.cost_ratio, "passes": passes, **copied}
    return {"context": CONTEXT, **asdict(costs), **found}


@torch.inference_mode()
def time_copy(pair: Pair) -> Json:
    """Return seconds and bytes of making a copy in 4 bits, and seconds of its draft step."""
    device, start, before = pair.target.device, now(pair.target.device), torch.cuda.memory_allocated()
    copied = pair.target.quantised_copy(INT4)
    made, taken = now(device) - start, torch.cuda.memory_allocated() - before
    row = Row(random_tokens(pair, CONTEXT), SamplingParams(temperature=0))
    pair.target.begin([row])
    noise, spans = RowNoise(0, CONTEXT, races=False), list[float]()
    request = ChainRequest(CHAIN, pair.target.vocab_size, kernel_settings(row.params), noise)
    for _ in range(NUM_SAMPLES + 2):
        start = now(device)
        copied.draft_chains([row], [request], None)
        spans.append((now(device) - start) / CHAIN)
    pair.target.release(row)
    return {"copy_seconds": made, "copy_bytes": taken, "copy_step": median(spans[2:])}


def measure_profile(pair: Pair, options: argparse.Namespace) -> Json:
    """Return synchronisations per round, and microseconds per round of the longest kernels, by system and temperature."""
    found = {}
    prompts = random_tokens(pair, 1, PROMPT_LENGTH)
    for kind, temperature in product(("none", DRAFTER), (0.0, 1.0)):
        system = Ours(pair, kind)
        system.decode(prompts, options.tokens, temperature, 0)
        with torch.profiler.profile() as profile:
            timing = system.decode(prompts, options.tokens, temperature, 1)
        waits = sum(event.name in WAITS for event in profile.events())
        times = {event.key[:60]: event.self_device_time_total for event in profile.key_averages()}
        longest = sorted(times, key=lambda name: times[name], reverse=True)[:NUM_KERNELS]
        found[f"{kind}, temperature {temperature:g}"] = {
            "synchronisations": waits / timing.num_passes,
            "microseconds": {name: times[name] / timing.num_passes for name in longest},
        }
    return found


def measure_single(report: Report, pair: Pair, options: argparse.Namespace) -> None:
    """Decode each prompt with all systems in turn, greedily and at temperature 1."""
    prompts, rng = random_tokens(pair, options.prompts, PROMPT_LENGTH), random.Random(SEED)
    reserve_caches(pair, 1, PROMPT_LENGTH + 2 * options.tokens)
    for temperature in (0.0, 1.0):
        title = f"temperature {temperature:g}"
        for name, system in systems_of(pair).items():
            length = options.tokens if isinstance(system, Ours) else min(32, options.tokens)
            what = f"single, {title}, {name}, warm-up"
            report.attempt(what, system.decode, prompts[:1], length, temperature, 0)
        systems = systems_of(pair)  # whose controllers have learnt nothing
        runs: dict[str, dict[int, Timing]] = {name: {} for name in systems}
        for turn, prompt in enumerate(options.turns * prompts):
            for name in rng.sample(list(systems), len(systems)):
                inputs = ([prompt], options.tokens, temperature, turn)
                timing = report.attempt(f"single, {title}, {name}", systems[name].decode, *inputs)
                runs[name] |= {turn: timing} if timing else {}
            report.put("single", report.values.get("single", {}) | {title: summarise(runs, report.values)})


def summarise(runs: Mapping[str, Mapping[int, Timing]], values: Json) -> Json:
    """Return the speeds of each system, what the costs predict, and the share of the bandwidth."""
    found, plain = {name: speeds_of(own, runs[PLAIN]) for name, own in runs.items() if own}, runs[PLAIN]
    for own, key in product(found.values() if plain else (), ("seconds", "round_seconds")):
        own[f"{key}_ratio"] = found[PLAIN][key] / own[key] if own[key] else None
    if values.get("bandwidth") and plain:
        least = values["pair"]["target"]["bytes_read"] / values["bandwidth"]["bytes_per_second"]
        found[PLAIN]["share_of_bandwidth"] = least / found[PLAIN]["round_seconds"]
    passes = values["costs"]["passes"] if values.get("costs") else {}  # of time, per round
    for name in passes.keys() & found:
        found[name]["predicted"] = found[name]["tau"] / passes[name]
    return found


def speeds_of(runs: Mapping[int, Timing], plain: Mapping[int, Timing]) -> Json:
    """Return seconds per token (median, range), tokens per pass, and how many texts are those of `plain`."""
    seconds = [run.seconds / run.num_tokens for run in runs.values()]
    found: Json = {"seconds": median(seconds), "low": min(seconds), "high": max(seconds)}
    found["round_seconds"] = median(run.round_seconds / run.num_tokens for run in runs.values())
    found["tau"] = sum(run.num_tokens for run in runs.values()) / sum(run.num_passes for run in runs.values())
    found["same_texts"] = sum(run.texts == plain[turn].texts for turn, run in runs.items() if turn in plain)
    return found


def measure_batches(report: Report, pair: Pair, options: argparse.Namespace) -> None:
    """Decode batches plainly, and with drafts of two controllers, the smallest caches first."""
    pair.modules.clear()
    (batches, contexts), length = BATCHES[options.shape], options.batch_tokens
    for batch, context in sorted(product(batches, contexts), key=lambda size: size[0] * size[1]):
        name, speeds = f"{batch} x {context}", dict[str, float]()
        if not report.attempt(f"batches, {name}", reserve_caches, pair, batch, context):
            continue
        shared = random_tokens(pair, context - 2 * length - 2 * OWN_LENGTH)  # or the cache would double
        prompts = [shared + own for own in random_tokens(pair, batch, OWN_LENGTH, seed=1)]
        ways = {
            "plain": Ours(pair, "none"),
            "default": Ours(pair),
            BATCH_WAY: Ours(pair, controller=BATCH_WAY),
        }
        for way, system in ways.items():
            what, inputs = f"batches, {name}, {way}", (prompts, length, 0.0, 0, False)
            report.attempt(f"{what}, warm-up", system.decode, *inputs)
            if run := report.attempt(what, system.decode, *inputs):
                rate, tau = run.num_tokens / run.round_seconds, run.num_tokens / run.num_passes
                speeds |= {f"{way} tokens/s": rate, f"{way} tau": tau, f"{way} s/round": tau * batch / rate}
        report.put("batches", report.values.get("batches", {}) | {name: speeds})


def reserve_caches(pair: Pair, batch: int, context: int) -> bool:
    """Make room for a batch in empty caches, or raise an `OutOfMemoryError`."""
    pair.target.free()
    pair.drafter.free()
    gc.collect()
    torch.cuda.empty_cache()
    allowed = CACHE_SHARE * (available_memory(pair.target.device) or 0)
    needed = batch * context * sum(pair.about[model]["bytes_cached"] for model in ("target", "drafter"))
    if needed > allowed:
        raise OutOfMemoryError(f"caches need {needed / 1e9:.1f} GB, may take {allowed / 1e9:.1f} GB")
    pair.target.reserve(batch, context)
    pair.drafter.reserve(batch, context)
    return True


def measure(report: Report, options: argparse.Namespace) -> None:
    if "bandwidth" in options.only:
        report.put("bandwidth", report.attempt("bandwidth", measure_bandwidth, torch.device(options.device)))
    torch.manual_seed(SEED)
    pair = make_pair(*SHAPES[options.shape], options.device, options.agreement)
    report.put("pair", pair.about)
    if "costs" in options.only:
        report.put("costs", report.attempt("costs", measure_costs, pair))
    if "profile" in options.only:
        report.put("profile", report.attempt("profile", measure_profile, pair, options))
    for name, section in (("single", measure_single), ("batches", measure_batches)):
        if name in options.only:
            report.attempt(name, section, report, pair, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--only", default="bandwidth,costs,profile,single,batches", metavar="SECTIONS")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    inputs: Json = {"dtype": str(SHAPES[options.shape][1]), "num_threads": torch.get_num_threads()}
    about = collect_provenance(device=options.device, seed=SEED, models={}, runtimes={}, **inputs)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    values: Json = {"provenance": about.as_dict(), "gpu": gpu, "skipped": {}}
    measure(Report(options.output, options.seconds, values), options)
    print(json.dumps({name: values.get(name) for name in ("bandwidth", "costs", "skipped", "seconds")}))
    for title, entries in {**values.get("single", {}), "batches": values.get("batches", {})}.items():
        columns = list(dict.fromkeys(column for line in entries.values() for column in line))
        rows = [[name, *(show(line.get(each), ".4g") for each in columns)] for name, line in entries.items()]
        print(table([title, *columns], rows), end="\n\n")


if __name__ == "__main__":
    main()
