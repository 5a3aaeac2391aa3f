"""`tokred eval`: what a method costs in answers and saves in time, on a model that can answer.

Every method runs through the user's own path: chat template, processor, left-padded batches, `generate`.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import tokred
from tokred.errors import ParameterError, TokredError
from tokred.registry import build_method

from .measure import DTYPES, bootstrap, interleave, machine, median, now, place, twin, wilson

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[int, str], Callable[[], Any]]
"""Takes a number of runs and what they are, returns what to call after each."""

MAX_NEW_TOKENS = 8
MIN_QUESTIONS = 64
SPEED_SHARE = 0.3
"""Share of a time budget that goes into latency instead of answers."""
MIN_SPEED_ROUNDS, MAX_SPEED_ROUNDS = 5, 15


@dataclass(frozen=True)
class Question:
    """One question about one picture.

    Args:
        image: the picture.
        text: the question.
        answer: the right answer.
        kind: what is asked for.
    """

    image: Image
    text: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Plan:
    """What `evaluate` runs.

    Args:
        model: folder of a checkpoint with its processor; None for the one that ships with the task.
        task: a key of `TASKS`.
        methods: names of registered methods.
        keeps: keep ratios, each in (0, 1].
        questions: number of held-out questions.
        batch: batch size of answers and of the first latency column.
        device: torch device.
        dtype: a key of `measure.DTYPES`.
        seeds: seeds of the methods that have one.
        budget_s: seconds that the run may take on this machine; fewer questions are asked if they would not fit.
            None asks all of them.
        speed_rounds: rounds of the latency measurement; None chooses by the time they take.
    """

    model: str | None = None
    task: str = "scenes"
    methods: tuple[str, ...] = ("random", "uniform", "divprune", "dart", "fastv", "visionzip")
    keeps: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1)
    questions: int = 256
    batch: int = 16
    device: str = "cpu"
    dtype: str = "float32"
    seeds: tuple[int, ...] = (0,)
    budget_s: float | None = None
    speed_rounds: int | None = None

    def check(self) -> None:
        """Raise `ParameterError` for a value that is not allowed."""
        if self.task not in TASKS:
            raise ParameterError(f"unknown task {self.task!r}; there are {', '.join(TASKS)}")
        place(self.device, self.dtype)
        for name in ("questions", "batch"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name}={getattr(self, name)} is not at least 1")
        for name in ("methods", "keeps", "seeds"):
            if not getattr(self, name):
                raise ParameterError(f"the list of {name} is empty")
        for method in self.methods:
            for keep in self.keeps:
                build_method(method, {"keep": keep})


def _scene_questions(count: int) -> list[Question]:
    from . import scenes

    return [Question(image, asked.text, asked.answer, asked.kind) for image, asked in scenes.held_out(count)]


def _scene_model() -> str:
    from . import scenes

    return str(scenes.MODEL_DIR)


@dataclass(frozen=True)
class Task:
    """A set of held-out questions.

    Args:
        questions: returns the first n of them, always the same.
        model: returns the folder of the checkpoint that ships for the task.
    """

    questions: Callable[[int], list[Question]]
    model: Callable[[], str]


TASKS = {"scenes": Task(_scene_questions, _scene_model)}
"""The tasks by name."""


def check_checkpoint(path: str) -> None:
    """Raise `ParameterError` unless a checkpoint can be there: a folder, or the `owner/name` of a hub.

    Anything else would be looked up on the network first, which takes minutes where there is none.
    """
    if not Path(path).is_dir() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise ParameterError(f"there is no checkpoint folder {path!r}, and it is no owner/name of a hub either")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Let transformers draw no progress bar where nobody watches."""
    from transformers.utils import logging

    quiet = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def load_model(path: str, device: str = "cpu", dtype: str = "float32") -> tuple[nn.Module, Any]:
    """Load a checkpoint and its processor as any user would.

    Args:
        path: a folder, or a name that transformers resolves.
        device: torch device.
        dtype: a key of `measure.DTYPES`.

    Returns:
        The model in evaluation mode and the processor, which pads on the left.

    Raises:
        ParameterError: there is no such checkpoint, or it has no processor.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    check_checkpoint(path)
    try:
        with _quiet_loading():
            processor = AutoProcessor.from_pretrained(path)
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError(
            f"cannot load a vision-language model with its processor from {path!r}: {error}"
        ) from error
    processor.tokenizer.padding_side = "left"
    return model.to(device).eval(), processor


def encode(processor: Any, pairs: Sequence[tuple[Any, str]], model: nn.Module) -> dict[str, torch.Tensor]:
    """Turn pictures and questions into the inputs of one left-padded batch.

    Args:
        processor: the model's processor.
        pairs: picture and question of each sample.
        model: gives the device and the dtype.
    """
    prompts = []
    for _, question in pairs:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompts.append(
            processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        )
    inputs = processor(images=[[image] for image, _ in pairs], text=prompts, padding=True, return_tensors="pt")
    return dict(inputs.to(model.device, model.dtype))


@torch.no_grad()
def answer(model: nn.Module, processor: Any, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Return the greedy answer to each question of a batch, in lower case and without spaces around it."""
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = output[:, inputs["input_ids"].shape[1] :]
    return [text.strip().lower() for text in processor.batch_decode(new, skip_special_tokens=True)]


@dataclass
class Setting:
    """One method at one keep ratio, with what it answered.

    Args:
        method: its name, or `"stock"`.
        keep: its keep ratio.
        model: its own modules around the shared weights.
        handles: the attached method, one for each seed; empty for stock.
        answers: the answers to all questions, by seed.
        visual_tokens: mean number of visual tokens per picture that pass the last step.
        token_layers: mean share of the visual tokens over the decoder layers.
    """

    method: str
    keep: float
    model: nn.Module
    handles: list[tokred.Handle]
    answers: list[list[str]]
    visual_tokens: float
    token_layers: float


@dataclass
class Material:
    """What all settings share: the questions, the encoded batches and the stock model."""

    model: nn.Module
    processor: Any
    questions: list[Question]
    batches: list[dict[str, torch.Tensor]]

    @property
    def placeholders(self) -> float:
        """Mean number of visual tokens per picture in the prompts."""
        token = self.model.config.image_token_id
        return sum(int((batch["input_ids"] == token).sum()) for batch in self.batches) / len(self.questions)

    def answers(self, model: nn.Module, tick: Callable[[], Any]) -> list[str]:
        """Return a model's answers to all questions."""
        found: list[str] = []
        for batch in self.batches:
            found += answer(model, self.processor, batch)
            tick()
        return found


def _has_seed(method: str) -> bool:
    return "seed" in getattr(tokred.methods()[method], "__dataclass_fields__", {})


def _encode_all(model: nn.Module, processor: Any, questions: list[Question], batch: int) -> list[dict[str, Any]]:
    return [
        encode(processor, [(question.image, question.text) for question in questions[start : start + batch]], model)
        for start in range(0, len(questions), batch)
    ]


def _fitting_questions(plan: Plan, model: nn.Module, processor: Any, questions: list[Question]) -> int:
    """Return how many questions fit the budget, by the time that the stock model needs for two batches."""
    if plan.budget_s is None:
        return plan.questions
    trial = _encode_all(model, processor, questions[: 2 * plan.batch], plan.batch)
    answer(model, processor, trial[0])
    start = time.perf_counter()
    for batch in trial:
        answer(model, processor, batch)
    seconds = (time.perf_counter() - start) / min(2 * plan.batch, len(questions))
    # nothing is assumed about how much a method saves: each setting may cost as much as stock
    passes = 1 + len(plan.keeps) * sum(len(plan.seeds) if _has_seed(method) else 1 for method in plan.methods)
    fitting = int((1 - SPEED_SHARE) * plan.budget_s / (passes * seconds)) // plan.batch * plan.batch
    return max(min(MIN_QUESTIONS, plan.questions), min(fitting, plan.questions))


def _run_setting(plan: Plan, material: Material, method: str, keep: float, tick: Callable[[], Any]) -> Setting:
    """Attach a method to a twin of the model and let it answer all questions, once for each seed."""
    answers, handles = [], []
    seeds = plan.seeds if _has_seed(method) else plan.seeds[:1]
    for seed in seeds:
        model = twin(material.model)
        parameters = {"keep": keep} | ({"seed": seed} if _has_seed(method) else {})
        handles.append(tokred.apply(model, method, **parameters))
        answers.append(material.answers(model, tick))
        if len(handles) == 1:
            first = model
    summary = handles[0].summary().to_dict()
    visual_tokens, token_layers = material.placeholders, 1.0
    if summary["calls"]:
        visual_tokens = summary["visual_tokens_after"] / len(material.questions)
        token_layers = summary["token_layers"]
    return Setting(method, keep, first, handles, answers, visual_tokens, token_layers)


@torch.no_grad()
def _prefill_ms(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the milliseconds of one prefill, tower included."""
    start = now(model.device)
    model(**inputs, logits_to_keep=1, use_cache=True)
    return (now(model.device) - start) * 1e3


def _latency(
    plan: Plan,
    settings: list[Setting],
    inputs: dict[str, torch.Tensor],
    label: str,
    budget_s: float,
    progress: Progress,
) -> tuple[list[dict[str, float]], int]:
    """Measure the prefill of all settings on one batch, interleaved.

    Returns:
        For each setting `ms`, `speedup` over stock and `own_ms` of tokred's hooks; and the number of rounds.
    """
    arms = {index: functools.partial(_prefill_ms, setting.model, inputs) for index, setting in enumerate(settings)}
    warm = [arm() for arm in arms.values()]
    rounds = plan.speed_rounds
    if rounds is None:
        rounds = int(min(max(budget_s * 1e3 / sum(warm), MIN_SPEED_ROUNDS), MAX_SPEED_ROUNDS))
    own = [sum(handle.summary().own_ms for handle in setting.handles) for setting in settings]
    seen = interleave(arms, rounds, 0, progress(rounds * len(arms), label))
    figures = []
    for index, setting in enumerate(settings):
        spent = sum(handle.summary().own_ms for handle in setting.handles) - own[index]
        figures.append(
            {
                "ms": median(seen[index]),
                "speedup": median(stock / reached for stock, reached in zip(seen[0], seen[index], strict=True)),
                "own_ms": spent / rounds,
            }
        )
    return figures, rounds


def evaluate(plan: Plan, progress: Progress, out: Path | None = None) -> dict[str, Any]:
    """Run a plan.

    Args:
        plan: what to run.
        progress: makes progress bars.
        out: folder for one overlay picture per method; None writes none.

    Returns:
        `rows` (stock first), `refused` methods with the reason, `settings`, `overlays` and `machine`.

    Raises:
        TokredError: the plan is not allowed, the checkpoint does not load, or no method can act on the model.
    """
    plan.check()
    start = time.perf_counter()
    task = TASKS[plan.task]
    path = plan.model or task.model()
    model, processor = load_model(path, plan.device, plan.dtype)
    questions = task.questions(plan.questions)
    questions = questions[: _fitting_questions(plan, model, processor, questions)]
    material = Material(model, processor, questions, _encode_all(model, processor, questions, plan.batch))

    refused: dict[str, str] = {}
    for method in plan.methods:
        try:
            tokred.apply(twin(model), method, keep=min(plan.keeps)).remove()
        except TokredError as error:
            refused[method] = str(error)
            last = error
    runnable = [method for method in plan.methods if method not in refused]
    if not runnable:
        raise last
    passes = 1 + len(plan.keeps) * sum(len(plan.seeds) if _has_seed(method) else 1 for method in runnable)
    tick = progress(passes * len(material.batches), "answers")
    stock = twin(model)
    settings = [Setting("stock", 1.0, stock, [], [material.answers(stock, tick)], material.placeholders, 1.0)]
    for method in runnable:
        for keep in plan.keeps:
            settings.append(_run_setting(plan, material, method, keep, tick))

    budget = SPEED_SHARE * (plan.budget_s if plan.budget_s is not None else 200.0)
    batch, batch_rounds = _latency(
        plan, settings, material.batches[0], f"prefill x{plan.batch}", 0.8 * budget, progress
    )
    single_inputs = _encode_all(model, processor, questions[:1], 1)[0]
    single, single_rounds = _latency(plan, settings, single_inputs, "prefill x1", 0.2 * budget, progress)

    rows = [
        _row(setting, settings[0], questions, *speeds) for setting, *speeds in zip(settings, batch, single, strict=True)
    ]
    overlays = {} if out is None else _overlays(settings, single_inputs, questions[0], out)
    for setting in settings:
        for handle in setting.handles:
            handle.remove()
    return {
        "rows": rows,
        "refused": refused,
        "overlays": overlays,
        "settings": {
            "model": plan.model or f"the one that ships for task {plan.task}",
            "task": plan.task,
            "questions": len(questions),
            "questions_asked_for": plan.questions,
            "batch": min(plan.batch, len(questions)),
            "device": plan.device,
            "dtype": plan.dtype,
            "seeds": list(plan.seeds),
            "rounds_at_batch": batch_rounds,
            "rounds_at_1": single_rounds,
            "seconds": time.perf_counter() - start,
        },
        "machine": machine(),
    }


def _proportion(right: np.ndarray) -> dict[str, float]:
    """Return accuracy with its 95 % interval.

    Args:
        right: whether each answer is right, bool of shape (seeds, questions).
    """
    seeds, questions = right.shape
    if seeds == 1:
        low, high = wilson(int(right.sum()), questions)
        return {"accuracy": float(right.mean()), "lo": low, "hi": high}
    # seeds ask the same questions, so they are no independent trials: resample questions
    accuracy, low, high = bootstrap(right.mean(axis=0), np.mean)
    return {"accuracy": accuracy, "lo": low, "hi": high}


def _row(
    setting: Setting,
    stock: Setting,
    questions: list[Question],
    batch: dict[str, float],
    single: dict[str, float],
) -> dict[str, Any]:
    """Return the row of one setting in the JSON file."""
    truth = [question.answer.strip().lower() for question in questions]
    kinds = np.array([question.kind for question in questions])
    right = np.array([[found == true for found, true in zip(seed, truth, strict=True)] for seed in setting.answers])
    stock_right = np.array([found == true for found, true in zip(stock.answers[0], truth, strict=True)])
    same = np.mean([np.mean([a == b for a, b in zip(seed, stock.answers[0], strict=True)]) for seed in setting.answers])
    delta, delta_low, delta_high = bootstrap(right.mean(axis=0) - stock_right, np.mean)
    return {
        "method": setting.method,
        "keep": setting.keep,
        "parameters": setting.handles[0].methods[0].to_dict() if setting.handles else {},
        "seeds": len(setting.answers),
        "questions": len(questions),
        **_proportion(right),
        "delta": delta,
        "delta_lo": delta_low,
        "delta_hi": delta_high,
        "same_answers": float(same),
        "kinds": {
            str(kind): {"questions": int((kinds == kind).sum()), **_proportion(right[:, kinds == kind])}
            for kind in dict.fromkeys(kinds)
        },
        "visual_tokens": setting.visual_tokens,
        "token_layers": setting.token_layers,
        "prefill_ms": batch["ms"],
        "speedup": batch["speedup"],
        "own_ms": batch["own_ms"],
        "prefill_ms_1": single["ms"],
        "speedup_1": single["speedup"],
        "own_ms_1": single["own_ms"],
    }


@torch.no_grad()
def _overlays(settings: list[Setting], inputs: dict[str, Any], question: Question, out: Path) -> dict[str, str]:
    """Write a picture of what each method keeps of the first question's image, at the keep ratio nearest to 0.25."""
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for method in dict.fromkeys(setting.method for setting in settings if setting.handles):
        own = [setting for setting in settings if setting.method == method and setting.keep < 1]
        if own:
            setting = min(own, key=lambda setting: abs(setting.keep - 0.25))
            setting.model(**inputs, logits_to_keep=1)
            path = out / f"overlay_{method}.png"
            setting.handles[0].overlay(question.image).save(path)
            written[method] = str(path)
    return written


def at_equal_token_layers(rows: list[dict[str, Any]], shares: Sequence[float]) -> dict[str, list[float | None]]:
    """Interpolate each method's accuracy to common shares of token-layers.

    Args:
        rows: rows of `evaluate`.
        shares: shares of token-layers.

    Returns:
        For each method the accuracy at every share, None outside of what was measured.
    """
    stock = next(row for row in rows if row["method"] == "stock")
    table = {}
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "stock"):
        points = {row["token_layers"]: row["accuracy"] for row in [stock, *rows] if row["method"] in (method, "stock")}
        xs = sorted(points)
        table[method] = [
            float(np.interp(share, xs, [points[x] for x in xs])) if xs[0] <= share <= xs[-1] else None
            for share in shares
        ]
    return table


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `evaluate` without nesting, as a line of the CSV file."""
    line = {key: value for key, value in row.items() if key not in ("kinds", "parameters")}
    for kind, figures in row["kinds"].items():
        line |= {f"{kind}_{key}": value for key, value in figures.items()}
    return line


def write_results(result: dict[str, Any], out: Path) -> list[Path]:
    """Write `eval.json` and `eval.csv`.

    Args:
        result: what `evaluate` returned.
        out: the folder, made if it is missing.

    Returns:
        The files.
    """
    out.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = out / "eval.json", out / "eval.csv"
    as_json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [flat(row) for row in result["rows"]]
    with as_csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return [as_json, as_csv]
