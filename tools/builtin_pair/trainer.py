"""Training run of one decoder: phases, schedule, optimisers, checkpoints.

A run is a list of phases by progress (the share of its budget that is spent). A phase may have
more layers than the previous one, because a shallow model reaches a given loss with fewer
operations. For a multiple of its depth, the layers of the model are repeated in order (G_stack,
arXiv 2405.15319); for any other depth, layers that start as the identity are inserted between them
(LLaMA Pro, arXiv 2401.02415). The learning rate warms up, stays constant, and decays linearly to
zero over the last part of the budget, so a larger budget continues the constant part of a run
instead of repeating it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn import functional

from builtin_pair.checkpoints import decoder_from, read_checkpoint
from builtin_pair.evaluate import bits_per_byte
from builtin_pair.growth import deepened
from builtin_pair.model import Decoder, ModelShape
from builtin_pair.schedule import RunSettings
from builtin_pair.threads import SpareThreads
from builtin_pair.tokens import TokenStore
from secondguess.errors import CheckpointError
from secondguess.files import write_atomically

Report = Callable[[str], None]
LossFunction = Callable[[Decoder, Tensor], Tensor]
REPORT_SECONDS = 20.0


def next_token_loss(decoder: Decoder, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of each token given those before it."""
    logits = decoder(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


class Trainer:
    """Training run with its state; ``run`` continues it to the end of its budget.

    Args:
        shape: final shape of the decoder.
        settings: phases, budget and learning rates.
        store: source of token rows.
        checkpoint: file of the state; a run found there is continued.
        initial: decoder to start from; random weights by default.
        loss: loss of a decoder on token rows.
        report: callback for progress lines.

    Raises:
        CheckpointError: a checkpoint that is unreadable or of another shape.
    """

    def __init__(
        self,
        shape: ModelShape,
        settings: RunSettings,
        store: TokenStore,
        checkpoint: Path,
        *,
        initial: Decoder | None = None,
        loss: LossFunction = next_token_loss,
        report: Report = print,
    ) -> None:
        self.shape, self.settings, self.store, self.checkpoint = shape, settings, store, checkpoint
        self._in_decay = False
        self.loss_function, self.report = loss, report
        self.step, self.tokens, self.seconds, self._updating = 0, 0, 0.0, False
        if initial is None:
            initial = Decoder(replace(shape, num_layers=settings.phases[0].num_layers))
            initial.initialise(settings.seed)
        self.decoder = initial
        self._make_optimisers()
        self._compiled: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}
        if checkpoint.is_file():
            self._load(checkpoint)

    @property
    def progress(self) -> float:
        return self.settings.budget.progress(self.seconds, self.step)

    def run(self) -> Decoder:
        """Train until the budget is spent.

        An interruption leaves a checkpoint of the last complete step.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            # Between the two optimiser updates the weights are inconsistent and must not be saved.
            if not self._updating and self.step:
                self.save()
            raise
        self.save()
        return self.decoder

    def _run(self) -> None:
        spare = SpareThreads(self.settings.most_threads) if self.settings.most_threads else None
        last_save = last_report = time.monotonic()
        losses: list[float] = []
        reported_tokens = self.tokens
        while self.progress < 1.0:
            begun = time.monotonic()
            if spare is not None:
                spare.adapt()
            losses.append(self._take_step())
            now = time.monotonic()
            self.seconds += now - begun
            if now - last_report > REPORT_SECONDS:
                self._report_progress(losses, (self.tokens - reported_tokens) / (now - last_report))
                last_report, reported_tokens, losses = now, self.tokens, []
            if now - last_save > self.settings.checkpoint_seconds:
                self.save()
                bits = bits_per_byte(self.decoder, self.store, rows=64, length=256)
                self.report(f"step {self.step}  held-out text: {bits:.4f} bits per byte")
                last_save = time.monotonic()
                self.seconds += last_save - now

    def _report_progress(self, losses: list[float], speed: float) -> None:
        self.report(
            f"step {self.step}  {100 * self.progress:.1f} %  loss {sum(losses) / len(losses):.4f}  {speed:.0f} tokens/s  "
            f"{self.tokens / 1e6:.2f} M tokens  layers {self.decoder.shape.num_layers}  threads {torch.get_num_threads()}"
        )

    def _take_step(self) -> float:
        self._keep_before_decay()
        phase = self.settings.phase_at(self.progress)
        if phase.num_layers != self.decoder.shape.num_layers:
            self._deepen(phase.num_layers)
        rows = max(1, phase.tokens_per_step // phase.length)
        batch = self.store.batch(
            self.settings.seed, self.step, rows, phase.length, self.settings.function_share
        )
        # Rows are distributed in turn, so that every micro-batch has both kinds of text.
        num_micro = max(1, rows * phase.length // self.settings.micro_tokens)
        total = 0.0
        for part in range(num_micro):
            micro = batch[part::num_micro].contiguous()
            loss = self._loss(micro) / num_micro
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        rate = self.settings.rate_at(self.progress, self.step)
        self._updating = True
        for optimiser, base in ((self.muon, self.settings.muon_rate), (self.adam, self.settings.adam_rate)):
            for group in optimiser.param_groups:
                group["lr"] = base * rate
            optimiser.step()  # type: ignore[no-untyped-call]
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self._updating = False
        self.tokens += rows * phase.length
        return total

    def _loss(self, micro: Tensor) -> Tensor:
        # The thread count may change from step to step, so it must not be compiled into kernels.
        inductor_config.cpp.dynamic_threads = True
        if not self.settings.compile:
            return self.loss_function(self.decoder, micro)
        key = (*micro.shape, self.decoder.shape.num_layers)
        if key not in self._compiled:
            decoder, loss_function = self.decoder, self.loss_function

            def compute(rows: Tensor) -> Tensor:
                return loss_function(decoder, rows)

            self._compiled[key] = torch.compile(compute, dynamic=False)
        return self._compiled[key](micro)

    def _make_optimisers(self) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.decoder.named_parameters():
            (others if parameter.ndim == 1 or "embed_tokens" in name else matrices).append(parameter)
        settings = self.settings
        self.muon = torch.optim.Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay)
        self.adam = torch.optim.AdamW(others, lr=settings.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def _deepen(self, num_layers: int) -> None:
        """Deepen the model; optimiser state is kept for parameters that are not of new layers."""
        old, old_state = self.decoder, self._named_state()
        self.decoder, source = deepened(old, num_layers)
        self._compiled.clear()
        self._make_optimisers()
        self._set_named_state(
            {name: _copied(old_state[source[name]]) for name in source if source[name] in old_state}
        )
        self.report(f"step {self.step}: grew from {old.shape.num_layers} layers to {num_layers}")

    def _named_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self.decoder.named_parameters():
            for optimiser in (self.muon, self.adam):
                if parameter in optimiser.state:
                    state[name] = optimiser.state[parameter]
        return state

    def _set_named_state(self, state: dict[str, Any]) -> None:
        owned = {id(p): o for o in (self.muon, self.adam) for g in o.param_groups for p in g["params"]}
        for name, parameter in self.decoder.named_parameters():
            if name in state:
                owned[id(parameter)].state[parameter] = state[name]

    @property
    def _flat_checkpoint(self) -> Path:
        return self.checkpoint.with_suffix(".flat.pt")

    def _keep_before_decay(self) -> None:
        """Save the state before the learning rate decays, from which a larger budget continues."""
        if self.progress > 1.0 - self.settings.decay_share and not self._in_decay:
            if self.step > self.settings.warmup_steps:
                self._save_to(self._flat_checkpoint)
            self._in_decay = True

    def save(self) -> None:
        """Write the whole state; the previous checkpoint is kept until the new one is complete."""
        self._save_to(self.checkpoint)

    def _save_to(self, path: Path) -> None:
        content = {
            "shape": asdict(self.decoder.shape),
            "weights": self.decoder.state_dict(),
            "optimisers": self._named_state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "in_decay": self._in_decay,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            torch.save(content, stream)

    def _load(self, path: Path) -> None:
        content = read_checkpoint(path)
        if replace(self.shape, num_layers=1) != ModelShape(**content["shape"] | {"num_layers": 1}):
            raise CheckpointError(
                f"{path} holds a model of another shape ({content['shape']}); train in a new directory, or give the "
                "shape that this run began with"
            )
        self.decoder = decoder_from(content)
        self._make_optimisers()
        self._set_named_state(content["optimisers"])
        self.step, self.tokens, self.seconds = content["step"], content["tokens"], content["seconds"]
        self._in_decay = bool(content.get("in_decay", False))
        if (
            self._in_decay
            and self.progress < 1.0 - self.settings.decay_share
            and self._flat_checkpoint.is_file()
        ):
            # The budget is larger now. Weights from before the decay are a better start than
            # weights from after it.
            self._load(self._flat_checkpoint)
            return
        self.report(f"resuming at step {self.step}, {100 * self.progress:.1f} % of the budget spent")


def _copied(state: Any) -> Any:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
