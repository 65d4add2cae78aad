"""Compare our engine with Transformers, OpenVINO GenAI and llama.cpp on a calibrated pair.

    python benchmarks/peers/compare.py pairs/88m --llama-cpp BIN --openvino PYTHON --name 88m

All engines have the same weights and run in turns. The pair comes from `make_pair.py`, prepared
for the engines by `prepare.sh`. The report lists the engines that were left out because they
were not prepared. Every engine speculates at several draft lengths; the report compares the
best of each.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from systems import LlamaCpp, OpenVino

from secondguess.bench.measurement import turns
from secondguess.bench.peers import TransformersModel, transformers_systems
from secondguess.bench.systems import Models, Run, SecondguessSystem, System
from secondguess.bench.tables import table
from secondguess.workloads.provenance import collect_provenance

LOSSLESS_WHEN_SAMPLING = ("secondguess", "transformers", "llama.cpp")
"""Families whose speculation is lossless when sampling.

OpenVINO's is not (local-engines page, section 2), but its plain decoding is.
"""


def ours(pair: Path, lengths: Sequence[int], quantize: str | None) -> tuple[list[System], Models]:
    models = Models(str(pair / "target"), "bfloat16", "cpu", quantize=quantize)
    drafter = f"model:{pair / 'drafter'}"
    systems = [SecondguessSystem(models, "none"), SecondguessSystem(models, drafter)]
    systems += [SecondguessSystem(models, drafter, f"fixed:{length}") for length in lengths]
    label = quantize or "bfloat16"
    for system in systems:
        system.name = system.name.replace("secondguess", f"secondguess {label}", 1)
        system.family = f"secondguess {label}"
    return systems, models


def make_systems(options: argparse.Namespace) -> tuple[list[System], Models, list[str]]:
    pair, lengths, threads = options.pair, options.draft_lengths, options.threads
    systems, models = ours(pair, lengths, None)
    left_out = []
    if options.transformers_lengths != [-1]:
        stock = [
            TransformersModel(pair / name, torch.bfloat16, torch.device("cpu"))
            for name in ("target", "drafter")
        ]
        found = transformers_systems(stock[0], {"drafter": stock[1]}, options.transformers_lengths)
        systems += [system for system in found if "lookup" not in system.name]
    labels = [("bfloat16", "fp16", "bf16", "")] + (
        [("int8", "int8", "bf16", "-q8_0")] if options.int8 else []
    )
    if options.int8:
        systems += ours(pair, lengths, "int8")[0]
    for label, folder, precision, suffix in labels:
        if options.openvino and (pair / "openvino" / folder).is_dir():
            folders = [pair / "openvino" / folder / name for name in ("target", "drafter")]
            process = OpenVino.start(options.openvino, *folders, threads, precision)
            systems += [OpenVino(process, length, label) for length in (0, *lengths)]
            rounded = pair / "openvino" / "int8" / "drafter"
            if label == "bfloat16" and rounded.is_dir():  # as ours: 8-bit drafter
                process = OpenVino.start(options.openvino, folders[0], rounded, threads, precision)
                systems += [OpenVino(process, length, label, "8-bit draft") for length in lengths]
        else:
            left_out.append(f"openvino {label}")
        files = [pair / f"{name}{suffix}.gguf" for name in ("target", "drafter")]
        if options.llama_cpp and files[0].is_file():
            systems += [
                LlamaCpp(options.llama_cpp, *files, length, threads, label) for length in (0, *lengths)
            ]
        else:
            left_out.append(f"llama.cpp {label}")
    return systems, models, left_out


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
        system.generate(prompts[0], 16, 0.0, 0)
    for index, prompt in enumerate(prompts):
        for temperature, system in turns(systems, temperatures, index):
            if temperature and not is_lossless(system):
                continue
            run = system.generate(prompt, num_tokens, temperature, index)
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
                "texts_that_part_from_own_plain": sum(
                    run.texts != plain.texts for run, plain in zip(found, reference, strict=True)
                ),
            }
        )
    return lines


def best(lines: Sequence[dict[str, object]], family: str, speculates: bool) -> dict[str, object] | None:
    found = [line for line in lines if line["family"] == family and line["speculates"] == speculates]
    return max(found, key=lambda line: line["tokens_per_second"], default=None)  # type: ignore[arg-type,return-value]


def comparisons(lines: Sequence[dict[str, object]]) -> list[list[str]]:
    """Return rows of our plain and best speculative speed over each family's, by precision."""
    rows = []
    for label in ("bfloat16", "int8"):
        own = {mode: best(lines, f"secondguess {label}", mode) for mode in (False, True)}
        others = dict.fromkeys(
            str(line["family"]) for line in lines if not str(line["family"]).startswith("secondguess")
        )
        for family in others:
            if family != "transformers" and not family.endswith(label):
                continue
            for mode in (False, True):
                theirs = best(lines, family, mode)
                if theirs is None or own[mode] is None:
                    continue
                ratios = [
                    f"{own[each]['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"
                    if own[each]
                    else ""  # type: ignore[index,operator]
                    for each in (False, True)
                ]
                rows.append([label, str(theirs["system"]), f"{theirs['tokens_per_second']:.1f}", *ratios])
    return rows


def markdown(report: dict[str, object]) -> str:
    about = report["provenance"]
    parts = [f"# {report['name']}: the calibrated pair on four engines", str(report["conditions"])]
    for temperature, lines in report["results"].items():  # type: ignore[attr-defined]
        rows = [
            [
                line["system"],
                f"{line['tokens_per_second']:.1f}",
                f"{line['lowest']:.1f} to {line['highest']:.1f}",
                f"{line['tokens_per_round']:.2f}" if line["tokens_per_round"] else "",
                str(line["texts_that_part_from_own_plain"]) if temperature == "0" else "",
            ]
            for line in lines
        ]
        header = [
            "system",
            "tokens/s",
            "range over prompts",
            "tokens per round",
            "texts that part from own plain",
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
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--prompt-length", type=int, default=14)
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--int8", action="store_true", help="8-bit weights too")
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    systems, models, left_out = make_systems(options)
    torch.manual_seed(0)
    vocab_size = models.target.runtime.vocab_size
    prompts = torch.randint(vocab_size, (options.num_prompts, options.prompt_length)).tolist()
    runs = measure(systems, prompts, options.temperatures, options.num_tokens)
    about = json.loads((options.pair / "pair.json").read_text())
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
        "pair": about,
        "drafters": {
            "secondguess": "the pair's drafter, its weights rounded to 8 bits at loading, in every precision",
            "openvino": "in the precision of the target; `8-bit draft`: in 8 bits",
            "others": "in the precision of the target",
        },
        "conditions": (
            f"{options.num_prompts} random prompts of {options.prompt_length} tokens, {options.num_tokens} new tokens each, "
            f"{options.threads} threads; engines in turn within one run, in alternating order, seconds with prefill. The "
            f"drafter names the target's token with frequency {about['greedy']:.2f}; laws overlap by {about['overlap']:.2f}. "
            "Everybody has the same two models; ours rounds the drafter to 8 bits at loading, OpenVINO is shown both with "
            "the drafter in bfloat16 and in 8 bits, llama.cpp and Transformers hold it in the target's precision."
            + (f" Not run: {', '.join(left_out)}." if left_out else "")
        ),
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
