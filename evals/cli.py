"""The `tokred` command."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import tokred
from tokred.errors import ParameterError, TokredError
from tokred.method import ModelShape

from .measure import allocator_note, parse_names, parse_numbers, pin_threads, restart_with_allocator

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Token reduction for multimodal transformers.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed on random-weight models of real proportions.")
app.add_typer(bench_app, name="bench")

DEFAULT_METHODS = "random,uniform,divprune,dart,fastv,visionzip"
DEFAULT_KEEPS = "1,0.5,0.25,0.1"
DEMO_BUDGET_S = 200.0
PLAIN_WIDTH = 190
"""Width of tables that go to a file or a pipe, where no terminal tells it."""


def _console(*, stderr: bool = False) -> Console:
    """Return a console that writes to the current stream and never folds a table outside of a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, soft_wrap=False, highlight=False)


def _clean_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print an error that tokred raises on purpose as one line and exit with status 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except TokredError as error:
            message = " ".join(str(error).split())
            print(f"tokred: {message}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def _progress(total: int, label: str) -> Callable[[], Any]:
    """Return what moves a new progress bar on by one; the bar shows only where standard error is a terminal."""
    bar = tqdm(total=total, desc=label, file=sys.stderr, leave=False, disable=not sys.stderr.isatty())

    def tick() -> None:
        bar.update()
        if bar.n >= total:
            bar.close()

    return tick


def _numbers(text: str, kind: Callable[[str], Any], option: str) -> list[Any]:
    try:
        return parse_numbers(text, kind)
    except ValueError:
        raise ParameterError(f"{option} {text!r} is not a comma-separated list of numbers") from None


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the entries of a YAML file as defaults, so that the command line still wins."""
    import yaml

    if path is None:
        return None
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    if not isinstance(entries, dict):
        raise typer.BadParameter(f"{path} holds no mapping of options to values")
    entries = {str(name).replace("-", "_"): value for name, value in entries.items()}
    known = {parameter.name for parameter in context.command.params} - {"config"}
    unknown = sorted(set(entries) - known)
    if unknown:
        raise typer.BadParameter(f"{path} has unknown options {unknown}; known are {sorted(filter(None, known))}")
    lists = {name: ",".join(map(str, value)) for name, value in entries.items() if isinstance(value, list)}
    # a number where a list is possible, as in `keep: 0.25`, is text to the option
    plain = {name: str(value) if name in ("methods", "keep", "seeds") else value for name, value in entries.items()}
    context.default_map = {**(context.default_map or {}), **plain, **lists}
    return path


@app.command("list")
def list_all() -> None:
    """List the methods with their parameters and stages, and the model families."""
    console = _console()
    table = Table(title="methods")
    for name in ("name", "acts on", "observes", "parameters and defaults", "follows"):
        table.add_column(name)
    for name, method in tokred.methods().items():
        default = method()
        steps = default.plan(ModelShape(num_layers=32, tower_layers=24, rowwise_projector=True))
        stages = [f"{step.stage}" + (f" {step.layer}" if step.layer is not None else "") for step in steps]
        needs = sorted({str(observation) for step in steps for observation in step.observations})
        parameters = [f"{key}={value!r}" for key, value in default.to_dict().items() if key != "method"]
        table.add_row(name, ", ".join(stages), ", ".join(needs) or "-", ", ".join(parameters), method.source)
    console.print(table)
    families = Table(title="model families")
    for name in ("model type", "media", "tokens can leave before the projector"):
        families.add_column(name)
    for model_type, adapter in tokred.adapters().items():
        families.add_row(model_type, ", ".join(adapter.media), "yes" if adapter.projector else "no")
    console.print(families)


def _skeleton(path: str) -> Any:
    """Return a model with its structure and no weights, or only its config if the model cannot be built."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

    from .evaluate import check_checkpoint

    check_checkpoint(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError(f"cannot read a config from {path!r}: {error}") from None
    with torch.device("meta"):
        for auto in (AutoModelForImageTextToText, AutoModel):
            try:
                return auto.from_config(config)
            except ValueError:
                continue
    raise ParameterError(f"transformers has no model class for model type {config.model_type!r}")


@app.command()
@_clean_errors
def check(
    model: Annotated[str, typer.Argument(help="Folder or name of a checkpoint; only its config is read.")],
) -> None:
    """Say whether a model is supported, by which methods, and if not, why."""
    skeleton = _skeleton(model)
    console = _console()
    support = tokred.supported(skeleton)
    if not support:
        print(f"not supported: {support.reason}")
        if support.nearest:
            print(f"nearest: {', '.join(support.nearest)}")
        raise typer.Exit(1)
    print(f"supported: {skeleton.config.model_type}")
    table = Table()
    table.add_column("method")
    table.add_column("on this model")
    for name in tokred.methods():
        try:
            tokred.apply(skeleton, name).remove()
            table.add_row(name, "yes")
        except TokredError as error:
            table.add_row(name, f"no: {error}")
    console.print(table)


@app.command()
@_clean_errors
def show(
    image: Annotated[Path, typer.Argument(help="A picture.")],
    method: Annotated[str, typer.Option(help="Name of the method.")] = "divprune",
    keep: Annotated[float, typer.Option(help="Share of visual tokens that survive, in (0, 1].")] = 0.25,
    model: Annotated[str | None, typer.Option(help="Checkpoint; the shipped scene model by default.")] = None,
    question: Annotated[str, typer.Option(help="What to ask about the picture.")] = "how many objects are there ?",
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("overlay.png"),
) -> None:
    """Write a picture of what a method keeps of an image, and print the answer with and without it."""
    from PIL import Image, UnidentifiedImageError

    from . import evaluate

    try:
        picture = Image.open(image).convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ParameterError(f"cannot read a picture from {str(image)!r}: {error}") from None
    tokred.registry.build_method(method, {"keep": keep})
    loaded, processor = evaluate.load_model(model or evaluate.TASKS["scenes"].model())
    inputs = evaluate.encode(processor, [(picture, question)], loaded)
    [before] = evaluate.answer(loaded, processor, inputs)
    with tokred.apply(loaded, method, keep=keep) as handle:
        [after] = evaluate.answer(loaded, processor, inputs)
        overlay = handle.overlay(picture)
        summary = str(handle.summary())
    out.parent.mkdir(parents=True, exist_ok=True)
    overlay.save(out)
    print(f"question: {question}\nstock:    {before}\n{method + ':':<9} {after}\n{summary}\nwrote {out}")


def _run_eval(plan: Any, out: Path, as_json: bool, threads: int | None) -> None:
    """Run a plan, print its tables and write its files."""
    from . import evaluate, report

    console = _console(stderr=as_json)
    if threads is not None and threads < 1:
        raise ParameterError(f"threads={threads} is not at least 1")
    pin_threads(threads)
    result = evaluate.evaluate(plan, _progress, out)
    files = evaluate.write_results(result, out)
    plot = out / "pareto.png"
    report.pareto_plot(result, plot)
    for table in report.eval_tables(result):
        console.print(table)
    settings = result["settings"]
    if settings["questions"] < settings["questions_asked_for"]:
        console.print(
            f"asked {settings['questions']} of {settings['questions_asked_for']} questions, to stay within "
            f"{plan.budget_s:.0f} s on this machine"
        )
    for method, reason in result["refused"].items():
        console.print(f"{method} left out: {reason}", markup=False)
    console.print(
        f"prefill: tower and decoder, median of {settings['rounds_at_batch']} interleaved rounds at batch "
        f"{settings['batch']} and {settings['rounds_at_1']} at batch 1; {allocator_note()}"
    )
    written = [*files, plot, *result["overlays"].values()]
    console.print(f"{settings['seconds']:.0f} s; wrote {', '.join(map(str, written))}", markup=False)
    if as_json:
        print(json.dumps(result))


@app.command("eval")
@_clean_errors
def evaluate_command(
    model: Annotated[str | None, typer.Option(help="Checkpoint; the one that ships for the task by default.")] = None,
    task: Annotated[str, typer.Option(help="Task with held-out questions.")] = "scenes",
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = DEFAULT_METHODS,
    keep: Annotated[str, typer.Option(help="Keep ratios, separated by commas.")] = DEFAULT_KEEPS,
    questions: Annotated[int, typer.Option(help="Number of held-out questions.")] = 1024,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 16,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seeds: Annotated[str, typer.Option(help="Seeds of the methods that have one.")] = "0",
    budget: Annotated[float | None, typer.Option(help="Seconds; fewer questions are asked if they do not fit.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the latency measurement.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; one per core by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; tables go to stderr.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these options.", is_eager=True, callback=_read_config)
    ] = None,
) -> None:
    """Measure what methods cost in accuracy and save in time on a trained model."""
    from .evaluate import Plan

    plan = Plan(
        model=model,
        task=task,
        methods=tuple(parse_names(methods)),
        keeps=tuple(_numbers(keep, float, "--keep")),
        questions=questions,
        batch=batch,
        device=device,
        dtype=dtype,
        seeds=tuple(_numbers(seeds, int, "--seeds")),
        budget_s=budget,
        speed_rounds=rounds,
    )
    _run_eval(plan, out, as_json, threads)


@app.command()
@_clean_errors
def demo(
    questions: Annotated[int, typer.Option(help="Most questions to ask.")] = 256,
    budget: Annotated[float, typer.Option(help="Seconds that the run may take on this machine.")] = DEMO_BUDGET_S,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
) -> None:
    """Run the evaluation on the shipped model in under five minutes on two cores."""
    from .evaluate import Plan

    _run_eval(Plan(questions=questions, budget_s=budget), out, False, None)


@bench_app.command("prefill")
@_clean_errors
def bench_prefill(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the rows; details go to *.meta.json beside it.")
    ] = None,
    models: Annotated[str, typer.Option(help="Model types, separated by commas.")] = "llava,qwen2_5_vl",
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = DEFAULT_METHODS,
    keep: Annotated[str, typer.Option(help="Keep ratios, separated by commas.")] = "0.25,0.1",
    rounds: Annotated[int | None, typer.Option(help="Rounds; 15 by default, 2 with --smoke.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; one per core by default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and order.")] = 0,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    smoke: Annotated[bool, typer.Option(help="Tiny models: tests the benchmark, not the speed.")] = False,
) -> None:
    """Measure how much of the speed that a shorter sequence permits is reached in decoder prefill."""
    from . import bench, report

    result = bench.bench_prefill(
        parse_names(models),
        parse_names(methods),
        _numbers(keep, float, "--keep"),
        rounds=rounds if rounds is not None else 2 if smoke else bench.MIN_ROUNDS,
        smoke=smoke,
        seed=seed,
        threads=threads,
        device=device,
        dtype=dtype,
        progress=_progress,
    )
    console = _console()
    for table in report.bench_tables(result):
        console.print(table)
    for note in report.bench_notes(result):
        console.print(note, markup=False)
    console.print(f"threads: {result['machine']['threads']}; {allocator_note()}")
    if json_file is not None:
        beside = bench.write_json(result, json_file)
        console.print(f"wrote {json_file} and {beside}", markup=False)


@bench_app.command("kernels")
@_clean_errors
def bench_kernels(
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of visual tokens, separated by commas.")] = "576,2880",
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 15,
    threads: Annotated[int | None, typer.Option(help="Compute threads; one per core by default.")] = None,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Time the operations under the methods, each beside what one would write without it."""
    from . import kernels

    result = kernels.bench_kernels(
        _numbers(tokens, int, "--tokens"),
        rounds=rounds,
        threads=threads,
        device=device,
        dtype=dtype,
        progress=_progress,
    )
    console = _console()
    console.print(kernels.kernels_table(result))
    console.print(f"threads: {result['machine']['threads']}; {allocator_note()}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}", markup=False)


MEASURING = ("eval", "demo", "bench")
"""Commands that publish times."""


def main() -> None:
    """Entry point of the `tokred` command; commands that publish times restart with the allocator settings."""
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in MEASURING and not {"--smoke", "--help"} & set(arguments):
        restart_with_allocator()
    app()


if __name__ == "__main__":
    main()
