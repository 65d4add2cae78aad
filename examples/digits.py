"""Draw digits with an ImageGPT: the same pictures with every drafter, in fewer passes.

    pip install '.[examples]'
    python examples/digits.py                  # trains two small models in minutes, draws digits.png
    python examples/digits.py --live           # draws in the terminal, pixel by pixel
    python examples/digits.py --measure digits.json --pictures 200

The models learn scikit-learn's 1,797 digits of 8 x 8 pixels in 16 shades. Each picture begins with
the start token; pixels that were drafted are tinted green. A seed gives the same picture with every
drafter; passes of the target and the time differ.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

import secondguess
from secondguess.workloads.provenance import collect_provenance

SIDE, SHADES = 8, 16
START = SHADES
"""Token before the first pixel; the model never generates it."""
NUM_PIXELS = SIDE * SIDE
SIZES = {"target": (64, 6), "drafter": (32, 1)}
"""Width and number of layers of each model."""
NUM_STEPS = {"target": 1200, "drafter": 1200}
BATCH_SIZE, LEARNING_RATE = 64, 3e-3
SCALE, MARGIN = 10, 4


def read_digits() -> tuple[Tensor, Any]:
    """Return the pictures `[picture, pixel]` as tokens, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.long).clamp_(max=SHADES - 1), digits.target


def train(name: str, pictures: Tensor, num_steps: int) -> ImageGPTForCausalImageModeling:
    """Return a trained model."""
    torch.manual_seed(0)
    width, num_layers = SIZES[name]
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1 if name == "target" else 0.0)
    sizes = {"n_embd": width, "n_layer": num_layers, "n_head": 4, "n_positions": NUM_PIXELS}
    model = ImageGPTForCausalImageModeling(ImageGPTConfig(vocab_size=SHADES + 1, **sizes, **dropout)).train()
    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=num_steps)
    for step in range(num_steps):
        batch = pictures[torch.randint(len(pictures), (BATCH_SIZE,))]
        inputs = torch.nn.functional.pad(batch[:, :-1], (1, 0), value=START)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), batch.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{name}: step {step + 1} of {num_steps}, {loss.item():.3f} nats per pixel", flush=True)
    return model.eval()


def train_models(folder: Path, read_pictures: Callable[[], Tensor]) -> None:
    """Train the models that are not in the folder yet."""
    for name in SIZES:
        if not (folder / name / "config.json").is_file():
            train(name, read_pictures(), NUM_STEPS[name]).save_pretrained(folder / name)


def load_systems(folder: Path, controller: str | None = None) -> dict[str, secondguess.LLM]:
    """Return the target with each drafter; `controller` replaces the constant draft lengths."""
    small_model = {"drafter": f"model:{folder / 'drafter'}", "controller": "fixed:8"}
    systems = {
        "plain": {"drafter": "none"},
        "small model": small_model,
        "small model, block": small_model | {"verifier": "block"},
        "2-D look-up": {"drafter": f"grid,width={SIDE}", "controller": "fixed:8"},
        "coupled Jacobi": {"drafter": f"jacobi,width={SIDE}", "controller": "fixed:16"},
    }
    if controller is not None:
        systems = {
            name: each | {"controller": controller} for name, each in systems.items() if name != "plain"
        }
        systems = {"plain": {"drafter": "none"}, **systems}
    return {name: secondguess.load(folder / "target", **each) for name, each in systems.items()}


def draw(llm: secondguess.LLM, seed: int) -> secondguess.Output:
    """Return one picture."""
    return llm.generate([START], max_tokens=NUM_PIXELS, temperature=1.0, seed=seed)


def colour(shade: int, is_drafted: bool) -> tuple[int, int, int]:
    """Return the colour of a pixel, tinted if it was drafted."""
    light = round(255 * shade / (SHADES - 1))
    return (light * 5 // 8, 64 + light * 3 // 4, light * 5 // 8) if is_drafted else (light, light, light)


def render(rows: Sequence[Sequence[secondguess.Output]]) -> Image.Image:
    """Return an image with a row of pictures per system."""
    step = SIDE * SCALE + MARGIN
    image = Image.new("RGB", (step * len(rows[0]) + MARGIN, step * len(rows) + MARGIN), (48, 48, 64))
    for top, outputs in enumerate(rows):
        for left, output in enumerate(outputs):
            picture = Image.new("RGB", (SIDE, SIDE))
            picture.putdata(list(map(colour, output.token_ids, output.drafted)))
            place = (MARGIN + left * step, MARGIN + top * step)
            image.paste(picture.resize((SIDE * SCALE, SIDE * SCALE), Image.Resampling.NEAREST), place)
    return image


def live(llm: secondguess.LLM, seed: int) -> Iterator[str]:
    """Yield a picture for the terminal as its pixels come."""
    num_drawn = 0
    for piece in llm.stream([START], max_tokens=NUM_PIXELS, temperature=1.0, seed=seed):
        for shade, is_drafted in zip(piece.tokens, piece.drafted, strict=True):
            num_drawn += 1
            red, green, blue = colour(shade, is_drafted)
            end = "\n" if num_drawn % SIDE == 0 else ""
            yield f"\033[48;2;{red};{green};{blue}m  \033[0m{end}"


@dataclass
class Measured:
    """Pictures of a system, with the time that they took."""

    outputs: list[secondguess.Output] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passes(self) -> float:
        """Mean number of target passes per picture."""
        return sum(output.stats.num_rounds for output in self.outputs) / len(self.outputs)

    def draw(self, llm: secondguess.LLM, seeds: Sequence[int]) -> None:
        start = time.perf_counter()
        self.outputs += [draw(llm, seed) for seed in seeds]
        self.seconds += time.perf_counter() - start


def measure(systems: dict[str, secondguess.LLM], num_pictures: int) -> dict[str, Measured]:
    """Return pictures of each system with the same seeds; the systems draw in turn, ten pictures each."""
    measured = {name: Measured() for name in systems}
    for llm in systems.values():
        Measured().draw(llm, [10**6])
    for first in range(0, num_pictures, 10):
        for name, llm in systems.items():
            measured[name].draw(llm, range(first, min(first + 10, num_pictures)))
    return measured


def statistics(outputs: Sequence[secondguess.Output], score: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return means over pictures, each with its standard error."""
    pictures = torch.tensor([output.token_ids for output in outputs])
    shades = pictures.double()
    values = {
        "classifier_score": score(pictures),
        "mean_shade": shades.mean(1),
        "share_of_ink": (shades > 0).double().mean(1),
        "contrast": shades.std(1),
    }
    return {
        name: [float(each.mean()), float(each.std() / math.sqrt(len(each)))] for name, each in values.items()
    }


def digit_classifier() -> Callable[[Tensor], Tensor]:
    """Return the largest probability of a classifier of digits, per picture."""
    from sklearn.svm import SVC

    pictures, labels = read_digits()
    # Fitted probabilities are random; the seed fixes them.
    classifier = SVC(gamma=0.001, C=10.0, probability=True, random_state=0).fit(pictures.numpy(), labels)
    return lambda pictures: torch.from_numpy(classifier.predict_proba(pictures.numpy()).max(1))


def report(systems: dict[str, secondguess.LLM], num_pictures: int) -> dict[str, Any]:
    """Measure all systems, print a table, and return the figures."""
    measured = measure(systems, num_pictures)
    score = digit_classifier()
    plain, results = measured["plain"], {}
    for name, each in measured.items():
        results[name] = {
            "controller": systems[name].controller.name,
            "passes_per_picture": each.passes,
            "seconds_per_picture": each.seconds / num_pictures,
            "fewer_passes": plain.passes / each.passes,
            "faster": plain.seconds / each.seconds,
            "same_pictures": sum(
                drawn.token_ids == output.token_ids
                for drawn, output in zip(each.outputs, plain.outputs, strict=True)
            ),
            "statistics": statistics(each.outputs, score),
        }
        shown = ", ".join(f"{key} {value:.4g}" for key, value in list(results[name].items())[1:6])
        print(f"{name}: {shown}")
        for key, (mean, error) in results[name]["statistics"].items():
            print(f"    {key} {mean:.3f} +- {error:.3f}")
    return results


def main(arguments: Sequence[str] | None = None, read_pictures: Callable[[], Tensor] | None = None) -> None:
    """Run the example; `read_pictures` replaces scikit-learn's digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("digits"), help="folder of the trained models")
    parser.add_argument("--pictures", type=int, default=10, help="number of pictures per drafter")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="file of the drawing")
    parser.add_argument("--live", action="store_true", help="draw in the terminal instead")
    parser.add_argument("--controller", help="controller of all drafters, such as cost")
    parser.add_argument("--measure", type=Path, help="compare time and statistics, and write them here")
    options = parser.parse_args(arguments)
    train_models(options.folder, read_pictures or (lambda: read_digits()[0]))
    systems = load_systems(options.folder, options.controller)
    if options.measure:
        results = report(systems, options.pictures)
        provenance = collect_provenance(
            num_threads=torch.get_num_threads(),
            device="cpu",
            dtype="float32",
            seed=0,
            models={name: options.folder / name for name in SIZES},
            runtimes=dict.fromkeys(SIZES, "transformers, row by row"),
        )
        record = {"pictures": options.pictures, "systems": results, "provenance": provenance.as_dict()}
        options.measure.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    rows = []
    for name, llm in systems.items():
        if options.live:
            for seed in range(options.pictures):
                print(f"{name}, seed {seed}")
                for pixels in live(llm, seed):
                    print(pixels, end="", flush=True)
            continue
        rows.append([draw(llm, seed) for seed in range(options.pictures)])
        passes = sum(output.stats.num_rounds for output in rows[-1]) / options.pictures
        print(f"{name}: {passes:.1f} passes per picture")
    if rows:
        render(rows).save(options.output)


if __name__ == "__main__":
    main()
