"""Compare our engine with Transformers, OpenVINO GenAI and llama.cpp on one target and draft model.

    python benchmarks/peers/compare.py pairs/grown-1b --prompts human-eval --precisions bfloat16 int4 \
        --llama-cpp engines/llama.cpp/bin --openvino engines/openvino/bin/python --name grown-1b

All engines have the same weights and run in turns. The pair comes from `make_pair.py`, prepared
for the engines by `prepare.sh`. The report lists the engines that were left out because they
were not prepared. Every engine speculates at several draft lengths; the report compares the
best of each.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from systems import LlamaCpp, OpenVino

from secondguess.api import encode
from secondguess.bench.measurement import turns
from secondguess.bench.peers import TransformersModel, transformers_systems
from secondguess.bench.systems import Models, Run, SecondguessSystem, System
from secondguess.bench.tables import table
from secondguess.workloads.loading import load_workload
from secondguess.workloads.provenance import collect_provenance, public_name

LOSSLESS_WHEN_SAMPLING = ("secondguess", "transformers", "llama.cpp")
"""Families whose speculation is lossless when sampling.

OpenVINO's is not (local-engines page, section 2), but its plain decoding is.
"""
LLAMA_CPP_FORMATS = {"bfloat16": [""], "int8": ["-q8_0"], "int4": ["-q4_0", "-q4_k_m"]}
"""Suffixes of the GGUF files of the target, by precision."""
OPENVINO_FOLDERS = {"bfloat16": ("fp16", "bf16"), "int8": ("int8", "bf16"), "int4": ("int4", "bf16")}
"""Folder of the target, and precision of the activations."""


def ours(pair: Path, lengths: Sequence[int], precision: str) -> tuple[list[System], Models]:
    """Return our systems: plain, the default drafter, and the draft model at several lengths."""
    quantize = None if precision == "bfloat16" else precision
    models = Models(str(pair / "target"), "bfloat16", "cpu", quantize=quantize)
    drafter = f"model:{pair / 'drafter'}"
    drafters = dict.fromkeys(["none", models.default_drafter, drafter, f"suffix+{drafter}"])
    systems = [SecondguessSystem(models, each) for each in drafters]
    systems += [SecondguessSystem(models, drafter, f"fixed:{length}") for length in lengths]
    for system in systems:
        system.name = system.name.replace("secondguess", f"secondguess {precision}", 1)
        system.family = f"secondguess {precision}"
    return systems, models


def transformers(pair: Path, lengths: Sequence[int]) -> list[System]:
    """Return Transformers' plain and assisted generation; none for the only length -1."""
    if lengths == [-1]:
        return []
    target, drafter = (
        TransformersModel(pair / name, torch.bfloat16, torch.device("cpu")) for name in ("target", "drafter")
    )
    found = transformers_systems(target, {"drafter": drafter}, lengths)
    return [system for system in found if "lookup" not in system.name]


def openvino(options: argparse.Namespace, precision: str) -> Iterator[System]:
    """Yield OpenVINO's plain decoding and its speculation with the drafter in 8 bits."""
    folder, activations = OPENVINO_FOLDERS[precision]
    target, drafter = (options.pair / "openvino" / each for each in (f"{folder}/target", "int8/drafter"))
    if options.openvino and target.is_dir() and drafter.is_dir():
        process = OpenVino.start(options.openvino, target, drafter, options.threads, activations)
        for length in (0, *options.draft_lengths):
            yield OpenVino(process, length, precision)


def llama_cpp(options: argparse.Namespace, precision: str) -> Iterator[System]:
    """Yield llama.cpp's plain decoding and its speculation, in every format of this precision."""
    for suffix in LLAMA_CPP_FORMATS[precision]:
        target = options.pair / f"target{suffix}.gguf"
        drafter = options.pair / ("drafter-q8_0.gguf" if suffix else "drafter.gguf")
        if options.llama_cpp and target.is_file() and drafter.is_file():
            label = f"{precision}{suffix.replace('-', ' ')}"
            for length in (0, *options.draft_lengths):
                yield LlamaCpp(options.llama_cpp, target, drafter, length, options.threads, label)


def make_systems(options: argparse.Namespace) -> tuple[list[System], Models, list[str]]:
    """Return the systems, our models in the first precision, and the engines that were not prepared."""
    systems = transformers(options.pair, options.transformers_lengths)
    left_out, models = [], []
    for precision in options.precisions:
        own, of_precision = ours(options.pair, options.draft_lengths, precision)
        systems += own
        models.append(of_precision)
        for make in (openvino, llama_cpp):
            found = list(make(options, precision))
            systems += found
            if not found:
                left_out.append(f"{make.__name__} {precision}")
    return systems, models[0], left_out


def measure(
    systems: Sequence[System],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    num_tokens: int,
) -> dict[float, dict[str, list[Run]]]:
    runs: dict[float, dict[str, list[Run]]] = {
        each: {system.name: [] for system in systems} for each in temperatures
    }
    for system in systems:
        system.generate(prompts[:1], 16, 0.0, 0)
        system.reset()
    for index, prompt in enumerate(prompts):
        for temperature, system in turns(systems, temperatures, index):
            if temperature and not is_lossless(system):
                continue
            run = system.generate([prompt], num_tokens, temperature, index)
            runs[temperature][system.name].append(run)
            print(
                f"prompt {index} T={temperature:g} {system.name}: {run.tokens_per_second:.1f} tokens/s",
                flush=True,
            )
    return runs


def is_lossless(system: System) -> bool:
    """Return whether the system samples from the target's distribution at temperatures above 0."""
    return not system.speculates or system.family.startswith(LOSSLESS_WHEN_SAMPLING)


def summarise(systems: Sequence[System], runs: dict[str, list[Run]]) -> list[dict[str, object]]:
    """Return per system the median tokens/s with its range, and the number of differing texts."""
    lines = []
    for system in systems:
        found = runs[system.name]
        if not found:
            continue
        speeds = [run.tokens_per_second for run in found]
        reference = runs[next(each.name for each in systems if each.family == system.family)]
        stats = [run.stats for run in found if run.stats is not None]
        lines.append(
            {
                "system": system.name,
                "family": system.family,
                "speculates": system.speculates,
                "tokens_per_second": round(median(speeds), 2),
                "lowest": round(min(speeds), 2),
                "highest": round(max(speeds), 2),
                "tokens_per_round": round(
                    sum(run.num_tokens for run in found) / sum(s.num_rounds for s in stats), 3
                )
                if stats
                else None,
                "texts_unlike_own_plain": sum(
                    run.texts != plain.texts for run, plain in zip(found, reference, strict=True)
                ),
            }
        )
    return lines


def best(lines: Sequence[dict[str, object]], family: str, speculates: bool) -> dict[str, object] | None:
    found = [line for line in lines if line["family"] == family and line["speculates"] == speculates]
    return max(found, key=lambda line: line["tokens_per_second"], default=None)  # type: ignore[arg-type,return-value]


def precision_of(family: str) -> str:
    """Return the precision of a family's weights; Transformers runs in bfloat16."""
    return "bfloat16" if family == "transformers" else family.split()[1]


def comparisons(lines: Sequence[dict[str, object]]) -> list[list[str]]:
    """Return rows of our plain and best speculative speed over each family's, by precision."""
    rows = []
    for family in dict.fromkeys(str(line["family"]) for line in lines):
        precision = precision_of(family)
        own = [best(lines, f"secondguess {precision}", mode) for mode in (False, True)]
        for theirs in (best(lines, family, mode) for mode in (False, True)):
            if family.startswith("secondguess") or theirs is None or None in own:
                continue
            ratios = [
                f"{each['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"  # type: ignore[index,operator]
                for each in own
            ]
            rows.append([precision, str(theirs["system"]), f"{theirs['tokens_per_second']:.1f}", *ratios])
    return rows


def markdown(report: dict[str, object]) -> str:
    about = report["provenance"]
    parts = [f"# {report['name']}: one pair on four engines", str(report["conditions"])]
    for temperature, lines in report["results"].items():  # type: ignore[attr-defined]
        rows = [
            [
                line["system"],
                f"{line['tokens_per_second']:.1f}",
                f"{line['lowest']:.1f} to {line['highest']:.1f}",
                f"{line['tokens_per_round']:.2f}" if line["tokens_per_round"] else "",
                str(line["texts_unlike_own_plain"]) if temperature == "0" else "",
            ]
            for line in lines
        ]
        header = [
            "system",
            "tokens/s",
            "range over prompts",
            "tokens per round",
            "texts unlike own plain",
        ]
        ratio_header = [
            "precision",
            "best of a peer",
            "tokens/s",
            "ours plain over it",
            "ours speculative over it",
        ]
        parts += [
            f"## Temperature {temperature}",
            table(header, rows),
            table(ratio_header, comparisons(lines)),
        ]
    parts.append("## Provenance\n\n```json\n" + json.dumps(about, indent=1) + "\n```")
    return "\n\n".join(parts) + "\n"


def load_prompts(options: argparse.Namespace, models: Models) -> list[list[int]]:
    if options.prompts is None:
        torch.manual_seed(0)
        shape = (options.num_prompts, options.prompt_length)
        return torch.randint(models.target.runtime.vocab_size, shape).tolist()
    texts = load_workload(options.prompts, options.num_prompts).prompts
    return [encode(models.target, text) for text in texts]


def conditions(options: argparse.Namespace, num_prompts: int, left_out: Sequence[str]) -> str:
    """Return the paragraph that says how the engines were compared."""
    described = options.pair / "pair.json"
    agreement = ""
    if described.is_file():
        about = json.loads(described.read_text())
        agreement = (
            f" The drafter's most likely token is the target's with frequency {about['greedy']:.2f}; the "
            f"distributions overlap by {about['overlap']:.2f}."
        )
    missing = f" Not run: {', '.join(left_out)}." if left_out else ""
    prompts = public_name(options.prompts) if options.prompts else f"{options.prompt_length} random tokens"
    return (
        f"{num_prompts} prompts ({prompts}), {options.num_tokens} new "
        f"tokens each, {options.threads} threads; engines in turn within one run, in alternating order, seconds with "
        "prefill. All engines have the same target and draft model. The draft model is in 8 bits, but in bfloat16 beside "
        f"targets in bfloat16 for llama.cpp and Transformers.{agreement}{missing}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--llama-cpp", type=Path, help="directory of llama.cpp's programs")
    parser.add_argument("--openvino", type=Path, help="the Python of OpenVINO's environment")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument(
        "--transformers-lengths", type=int, nargs="+", default=[3, 5], help="-1 leaves Transformers out"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--prompts",
        help="as in `secondguess bench`; by default random tokens, as calibrated pairs have no tokenizer",
    )
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--prompt-length", type=int, default=14, help="of random prompts, in tokens")
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", choices=[*LLAMA_CPP_FORMATS], default=["bfloat16"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    systems, models, left_out = make_systems(options)
    prompts = load_prompts(options, models)
    runs = measure(systems, prompts, options.temperatures, options.num_tokens)
    provenance = collect_provenance(
        num_threads=options.threads,
        device="cpu",
        dtype="bfloat16",
        seed=0,
        models={name: options.pair / name for name in ("target", "drafter")},
        runtimes={"target": models.target.runtime_description},
    )
    report: dict[str, object] = {
        "name": options.name,
        "conditions": conditions(options, len(prompts), left_out),
        "results": {f"{each:g}": summarise(systems, found) for each, found in runs.items()},
        "provenance": provenance.as_dict(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = f"{provenance.date[:10]}-peers-{options.name}"
    (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / f"{stem}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
