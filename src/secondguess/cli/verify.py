"""`secondguess verify`: statistical certificate of the output distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from secondguess.cli import options
from secondguess.cli.exit_codes import CHECK_FAILED
from secondguess.cli.output import print_json
from secondguess.cli.progress import progress_bar
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.proof.certificate import CertifiedSystem
    from secondguess.sampling import SamplingParams

TEST = "How hard to look"


def verify(
    context: Context,
    config: options.Config = None,
    model: Annotated[
        str | None,
        Option(
            help=options.MODEL_NAMES,
            callback=options.check_model,
            show_default="a random model of three tokens, whose every text is enumerated",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        Option(
            help=f"{options.DRAFTER_NAMES}; each with ,key=value options; several joined by + are combined.",
            callback=options.check_drafter,
            show_default="a perturbed copy of the random model; as in generate for another",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    verifier: options.Verifier = "auto",
    controller: options.Controller = None,
    dtype: Annotated[
        str | None,
        Option(
            help="As in generate, for --model.",
            callback=options.check_dtype,
            show_default="auto",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    device: Annotated[
        str | None,
        Option(
            help="As in generate, for --model.",
            callback=options.check_device,
            show_default="auto",
            rich_help_panel=options.MODEL_OPTIONS,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        Option(
            help="Prompt, for --model.",
            show_default="def quicksort(items):",
            rich_help_panel=TEST,
        ),
    ] = None,
    temperature: Annotated[
        float, Option(help="Temperature of the tested distribution.", rich_help_panel=TEST)
    ] = 1.0,
    samples: Annotated[int, Option(help="Texts to draw.", rich_help_panel=TEST)] = 200_000,
    max_tokens: Annotated[int, Option(help="Tokens per text.", rich_help_panel=TEST)] = 4,
    cells: Annotated[
        int, Option(help="About how many kinds of text to tell apart.", rich_help_panel=TEST)
    ] = 81,
    limit: Annotated[float, Option(help="Largest total variation to certify.", rich_help_panel=TEST)] = 0.01,
    delta: Annotated[float, Option(help="Chance that the bound is wrong.", rich_help_panel=TEST)] = 1e-6,
    batch_size: Annotated[int, Option(help="Rows that decode together.", rich_help_panel=TEST)] = 1024,
    seed: Annotated[int, Option(help="The same seed gives the same certificate.", rich_help_panel=TEST)] = 0,
    json: options.Json = False,
) -> int:
    """Certify that speculation preserves the target's output distribution.

    Samples texts with the decoding loop, compares them with exact probabilities from
    the model's own forward pass, and prints an upper bound on the total variation
    distance. The exit code is 1 if the certificate fails.
    """
    if not 0 <= seed < 2**64:
        raise BadInputError(f"expected --seed from 0 to {2**64 - 1}, got {seed}")

    with progress_bar("loading") as progress:
        from secondguess.proof.certificate import CertifyOptions, certify
        from secondguess.sampling import SamplingParams

        how = CertifyOptions(
            num_samples=samples,
            num_tokens=max_tokens,
            num_cells=cells,
            temperature=temperature,
            limit=limit,
            delta=delta,
            batch_size=batch_size,
            seed=seed,
        )
        settings = options.load_settings(context, config)
        if "model" not in settings:
            for name, value in (("--dtype", dtype), ("--device", device), ("--prompt", prompt)):
                if value is not None:
                    raise BadInputError(f"expected --model together with {name}, got {name} {value} alone")
            subject = _random_subject(drafter, verifier, controller)
        else:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            subject = _loaded_subject(settings, prompt, params)
        room = subject.components.target.context_length - len(subject.prompt)
        if max_tokens > room:
            raise BadInputError(
                f"expected --max-tokens of at most {room} (the model's context), got {max_tokens}"
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

    subject = tiny_system(
        "model" if drafter is None else drafter, verifier, "fixed:2" if controller is None else controller
    )
    check_verifier(subject.components.verifier, subject.components.drafter)
    if controller is not None:
        choose_controller(controller, subject.components.drafter)
    return subject


def _loaded_subject(settings: dict[str, Any], prompt: str | None, params: SamplingParams) -> CertifiedSystem:
    from secondguess.api import check_request, encode, load
    from secondguess.proof.certificate import system_of

    llm = load(**settings)
    ids = encode(llm.target, "def quicksort(items):" if prompt is None else prompt)
    check_request(llm.target, llm.verifier, ids, params)
    return system_of(llm, ids)
