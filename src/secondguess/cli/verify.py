"""`secondguess verify`: statistical certificate of the output distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context

from secondguess.cli import options
from secondguess.cli.exit_codes import CHECK_FAILED
from secondguess.cli.option_groups import is_given, option, panel, settings_of
from secondguess.cli.options import model_option
from secondguess.cli.output import print_json
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.proof.certificate import CertifiedSystem
    from secondguess.sampling import SamplingParams

test_option = panel("Test")
DTYPE_OF_MODEL = "float32"
"""In bfloat16 the kernels and the module of the reference round differently."""
OF_MODEL = {"num_samples": 20_000, "limit": 0.04, "batch_size": 64}
"""Defaults with a model, for a run of minutes."""

LOADING = options.LOADING.only(
    "config", "model", "drafter", "verifier", "controller", "dtype", "device"
).replace(
    option(
        "model",
        Annotated[
            str | None,
            model_option(
                options.MODEL_NAMES,
                callback=options.check_model,
                show_default="a random model with three tokens, whose texts can all be enumerated",
            ),
        ],
    ),
    options.drafter_option("a perturbed copy of the random model; with --model as in generate"),
    options.controller_option("fixed:2; with --model cost"),
    option("dtype", options.Dtype, DTYPE_OF_MODEL),
)


def verify(
    context: Context,
    loading: Annotated[options.Loading, LOADING],
    prompt: Annotated[str, test_option("Prompt, for --model.")] = "def quicksort(items):",
    temperature: Annotated[float, test_option("Temperature of the tested distribution.")] = 1.0,
    num_samples: Annotated[
        int | None,
        test_option("Texts to sample.", "--samples", show_default="200,000; 20,000 with --model"),
    ] = None,
    num_tokens: Annotated[int, test_option("Tokens per text.", "--max-tokens")] = 4,
    num_cells: Annotated[
        int,
        test_option(
            "Approximate number of cells: groups of texts, by their first tokens, whose frequencies are compared.",
            "--cells",
        ),
    ] = 81,
    limit: Annotated[
        float | None,
        test_option(
            "Largest total variation distance with which the certificate passes.",
            show_default="0.01; 0.04 with --model",
        ),
    ] = None,
    delta: Annotated[float, test_option("Probability that the bound is wrong.")] = 1e-6,
    batch_size: Annotated[
        int | None, test_option("Texts that decode together.", show_default="1024; 64 with --model")
    ] = None,
    seed: Annotated[int, test_option("The same seed gives the same certificate.")] = 0,
    json: options.Json = False,
) -> int:
    """Certify that speculation preserves the target's output distribution.

    Samples texts by speculative decoding, compares their frequencies with exact
    probabilities computed by Transformers, and prints an upper bound on the total
    variation distance. The exit code is 1 if the certificate fails or nothing was drafted.
    """
    with progress_bar("loading") as progress:
        from secondguess.proof.certificate import CertifyOptions, certify
        from secondguess.sampling import SamplingParams

        settings = loading.settings
        more = {name: value for name, value in OF_MODEL.items() if context.params[name] is None}
        how = settings_of(context, CertifyOptions, **more if "model" in settings else {})
        if "model" not in settings:
            for name in ("dtype", "device", "prompt"):
                if is_given(context, name):
                    got = f"--{name} {context.params[name]}"
                    raise BadInputError(f"expected --model together with --{name}, got {got} alone")
            subject = _random_subject(
                *(context.params[name] for name in ("drafter", "verifier", "controller"))
            )
        else:
            params = SamplingParams(temperature=temperature, max_tokens=num_tokens)
            settings = {"dtype": DTYPE_OF_MODEL} | settings
            settings = {"runtime": _runtime_for(settings)} | settings
            subject = _loaded_subject(settings, prompt, params)
        room = subject.components.target.context_length - len(subject.prompt)
        if num_tokens > room:
            raise BadInputError(
                f"expected --max-tokens of at most {room} (the model's context), got {num_tokens}"
            )
        certificate = certify(subject, how, progress)
    if json:
        print_json(certificate.as_dict())
    else:
        print(certificate)
    return 0 if certificate.passed else CHECK_FAILED


def _random_subject(drafter: str | None, verifier: str, controller: str | None) -> CertifiedSystem:
    from secondguess.api import check_verifier, choose_controller
    from secondguess.proof.certificate import tiny_system

    subject = tiny_system(drafter or "model", verifier, controller or "fixed:2")
    check_verifier(subject.components.verifier, subject.components.drafter)
    if controller is not None:
        choose_controller(controller, subject.components.drafter)
    return subject


def _runtime_for(settings: Mapping[str, Any]) -> str:
    """Return the runtime for settings that name none.

    On a CPU in float32 a copy of the target, as the default drafter may be one, drafts only if the target runs as a
    Transformers module.
    """
    from secondguess.checkpoint.plan import Checkpoint
    from secondguess.drafters.spec import DrafterSpec
    from secondguess.pairing import default_drafter

    if settings["dtype"] not in ("float32", "float64"):
        return "auto"
    drafter, model = settings.get("drafter"), settings["model"]
    load_options = {key: settings[key] for key in ("dtype", "device") if key in settings}
    if drafter is None:
        drafter = default_drafter(model, Checkpoint.resolve(model, runtime="transformers", **load_options))
    if not DrafterSpec.parse(drafter).target_copies:
        return "auto"
    return "auto" if Checkpoint.resolve(model, **load_options).runtimes[0] == "graphs" else "transformers"


def _loaded_subject(settings: dict[str, Any], prompt: str, params: SamplingParams) -> CertifiedSystem:
    from secondguess.api import check_request, encode, load
    from secondguess.proof.certificate import system_of

    llm = load(**settings)
    ids = encode(llm.target, prompt)
    check_request(llm.target, llm.verifier, ids, params)
    return system_of(llm, ids)
