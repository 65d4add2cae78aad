"""Card of a trained drafter: README.md and secondguess.json, with figures read from the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secondguess.files import write_atomically
from secondguess.heads.files import Provenance
from secondguess.train.run_folder import CARD

LABELS = {
    "held_out_acceptance": "acceptance rate on held-out texts at temperature 1, by position in the draft",
    "predicted_acceptance_length": "predicted tokens per target pass (tau) at temperature 1, draft length {predicted_nodes}",
    "cost_ratio": "time of a draft step relative to a target pass (c)",
    "acceptance_length": "measured tokens per target pass (tau), greedy decoding",
    "plain_tokens_per_second": "tokens/s of plain decoding",
    "tokens_per_second": "tokens/s with the drafter",
    "speedup": "speedup",
}
"""Labels of figures on the card and on the terminal."""
NOT_DRAFTED = "none: no draft was made that the target accepted"
"""Text shown instead of a speed-up if nothing was drafted, so both runs were plain decoding."""


def write_card(folder: Path, provenance: Provenance, how_to_use: str) -> None:
    """Write both files into the folder of the weights; `how_to_use` is a command with the drafter."""
    provenance.write(folder)
    with write_atomically(folder / CARD) as stream:
        stream.write(card_text(provenance, how_to_use).encode())


def card_text(provenance: Provenance, how_to_use: str) -> str:
    """Return the card in Markdown."""
    figures = _table(displayed_figures(provenance.figures), "figure")
    training = _table(provenance.training, "setting")
    return (
        f"# Drafter for {provenance.target} ({provenance.kind})\n\n"
        f"Made by `secondguess train {provenance.kind}` for the weights with SHA-256 `{provenance.fingerprint}`. For other "
        "weights the output stays correct, but few drafts are accepted.\n\n"
        f"```\n{how_to_use}\n```\n\n"
        f"## Results\n\n{_conditions(provenance)}\n\n{figures}\n"
        f"## Training\n\n{training}"
    )


def _conditions(provenance: Provenance) -> str:
    """Return the temperatures and texts with which the figures were measured."""
    temperatures = provenance.training.get("answers", {}).get("temperatures", ())
    as_is = provenance.training.get("as_is", True)
    written = (
        ""
        if as_is
        else f" that the target wrote at temperatures {', '.join(f'{temperature:g}' for temperature in temperatures)}"
    )
    expected = (
        "The acceptance rate on held-out texts (of a position if those before are accepted) and the predicted tokens per "
        "target pass are for sampling at temperature 1 without filters: the mean overlap of the target's and the drafter's "
        f"probabilities on held-out text{written}."
    )
    if "tokens_per_second" not in provenance.figures:
        return expected
    return f"{expected} The other figures were measured with greedy decoding (temperature 0) on the machine below."


def displayed_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures to display by their labels: missing ones are dropped, a missing speed-up is explained."""
    told = {name: value for name, value in figures.items() if value is not None and name in LABELS}
    told |= {"speedup": NOT_DRAFTED} if "speedup" in figures and "speedup" not in told else {}
    return {LABELS[name].format_map(figures): value for name, value in told.items()}


def _table(values: Mapping[str, Any], what: str) -> str:
    lines = [
        f"| {name.replace('_', ' ')} | {_format(value)} |"
        for name, value in values.items()
        if value is not None
    ]
    return "\n".join([f"| {what} | |", "|---|---|", *lines]) + "\n"


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_format(item) for item in value)
    if isinstance(value, dict):
        return f"`{json.dumps(value)}`"
    return str(value).replace("|", "\\|")
