"""Train the scene model: seeded, resumable, in two stages, in forty minutes on two CPU cores.

1. The tower learns dense labels of every patch, and its CLS token what stands in each cell. Half of the pictures are
   crowded: something stands in all nine cells, so that digits and words are seen often enough.
2. The tower is frozen; projector and decoder learn to answer, with scenes of one, two, three, then up to five objects.

Training all parameters together afterwards gained nothing more.

Run `python -m tokred_evals.scenes.train --help`. Checkpoints with the optimiser's state go to a cache folder outside
the repository; `--export DIR` writes the newest one in the standard format.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from torch.nn import functional as F

from ..measure import restart_with_allocator
from .generator import (
    COLOURS,
    KINDS,
    PATCH,
    SHAPES,
    SIZE,
    TRAINING_SEEDS,
    VALIDATION_SEEDS,
    WORDS,
    Scene,
    held_out,
    make_scene,
    place,
)
from .model import ANSWER, BOS, EOS, IDS, PAD, build_model, build_processor

GRID = SIZE // PATCH
PATCHES = GRID * GRID
PAIRS, PAIR_LENGTH = 10, 12
CLASSES = ("", *SHAPES, *map(str, range(10)), *WORDS)
COLOUR_CLASSES = ("", *COLOURS)
STAGES = ("dense", "decoder")
PEAK_RATE = 2e-3
BATCH = 32


def pixel_tensor(pixels: np.ndarray) -> torch.Tensor:
    """Return pictures as the processor would: uint8 (B, 112, 112, 3) to float32 (B, 3, 112, 112)."""
    return (torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25


def crowded_scene(seed: int) -> Scene:
    """Return a scene with a shape, a digit or a word in every cell: for dense labels only, no question fits it."""
    rng = random.Random(seed)
    things = []
    for cell in range(9):
        kind = rng.randrange(3)
        if kind == 0:
            side = rng.randint(22, 30)
            things.append(place(rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), cell, side, side))
        elif kind == 1:
            things.append(place(rng, str(rng.randint(0, 9)), None, cell, 20, 28))
        else:
            things.append(place(rng, rng.choice(WORDS), None, cell, 34, 14))
    return Scene(seed, tuple(things), None, None)


def dense_labels(scene: Scene) -> np.ndarray:
    """Return class, colour, cell and centre flag of every patch, int64 of shape (4, 196)."""
    labels = np.zeros((4, GRID, GRID), dtype=np.int64)
    for thing in (*scene.objects, scene.digit, scene.word):
        if thing is None:
            continue
        left, top, width = thing.box
        height = width if thing.colour else 28 if thing.name.isdigit() else 14
        # A patch belongs to a thing whose box covers its middle.
        rows = slice(round(top / PATCH), max(round(top / PATCH) + 1, round((top + height) / PATCH)))
        columns = slice(round(left / PATCH), max(round(left / PATCH) + 1, round((left + width) / PATCH)))
        labels[0, rows, columns] = CLASSES.index(thing.name)
        labels[1, rows, columns] = COLOUR_CLASSES.index(thing.colour or "")
        labels[2, rows, columns] = thing.cell + 1
        labels[3, (top + height // 2) // PATCH, (left + width // 2) // PATCH] = 1
    return labels.reshape(4, PATCHES)


def question_pairs(scene: Scene, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Return ten packed question-answer pairs and where their answers are, both of shape (10, 12)."""
    ids = np.full((PAIRS, PAIR_LENGTH), IDS[PAD], dtype=np.int64)
    targets = np.zeros((PAIRS, PAIR_LENGTH), dtype=bool)
    asked: list[Any] = []
    while len(asked) < PAIRS:
        made = list(scene.questions(rng).values())
        # Place and existence need two attributes at once and are asked more often.
        made += [question for question in made if question.kind in ("where", "exists", "where")]
        rng.shuffle(made)
        asked += made
    for index, question in enumerate(asked[:PAIRS]):
        prompt = [*question.text.split(), ANSWER]
        answer = [*question.answer.split(), EOS]
        ids[index, : len(prompt) + len(answer)] = [IDS[word] for word in prompt + answer]
        targets[index, len(prompt) : len(prompt) + len(answer)] = True
    return ids, targets


def _weighted(scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=scores.dtype) @ value


def plain_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attend from all to all. At 197 tokens two matrix products train faster on a CPU than the fused operation."""
    return _weighted(query * scaling @ key.mT, value).transpose(1, 2), None


def packed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attend as if each of the ten pairs behind the picture came alone: to the picture and, causally, to itself.

    Query, key and value are (B, heads, 1 + 196 + 120, D); picture and BOS attend causally among themselves.
    """
    image = 1 + PATCHES
    # Rotary positions made float32 of queries and keys.
    query, key = (query * scaling).to(value.dtype), key.to(value.dtype)
    future = torch.full((image, image), float("-inf"), dtype=query.dtype).triu(1)
    of_image = _weighted(query[:, :, :image] @ key[:, :, :image].mT + future, value[:, :, :image])
    asked, own_key, own_value = (part[:, :, image:].unflatten(2, (PAIRS, PAIR_LENGTH)) for part in (query, key, value))
    to_image = query[:, :, image:] @ key[:, :, :image].mT
    to_self = asked @ own_key.mT + future[:PAIR_LENGTH, :PAIR_LENGTH]
    scores = torch.cat([to_image, to_self.flatten(2, 3)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
    of_pairs = weights[..., :image] @ value[:, :, :image]
    of_pairs = of_pairs + (weights[..., image:].unflatten(2, (PAIRS, PAIR_LENGTH)) @ own_value).flatten(2, 3)
    return torch.cat([of_image, of_pairs], dim=2).transpose(1, 2), None


@contextlib.contextmanager
def attention(config: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let the layers of a configuration attend with a function inside the block."""
    from transformers import AttentionInterface

    AttentionInterface.register(function.__name__, function)
    before = config._attn_implementation
    config._attn_implementation = function.__name__
    try:
        yield
    finally:
        config._attn_implementation = before


def packed_positions() -> torch.Tensor:
    """Return the positions (1, L) of a picture and ten pairs, each pair's going on where the picture ended."""
    image = 1 + PATCHES
    return torch.cat([torch.arange(image), image + torch.arange(PAIR_LENGTH).repeat(PAIRS)])[None]


class DenseHeads(nn.Module):
    """Linear heads for the labels of patches and, on the CLS token, of cells."""

    def __init__(self, width: int):
        super().__init__()
        self.patch = nn.Linear(width, len(CLASSES) + len(COLOUR_CLASSES) + 10 + 2)
        self.cells = nn.Linear(width, 9 * len(CLASSES))
        self.sizes = (len(CLASSES), len(COLOUR_CLASSES), 10, 2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of features (B, 1 + 196, D), CLS first, against labels (B, 4, 196)."""
        loss = features.new_zeros(())
        for index, logits in enumerate(self.patch(features[:, 1:]).split(self.sizes, dim=-1)):
            loss = loss + F.cross_entropy(logits.flatten(0, 1).float(), labels[:, index].flatten())
        content = torch.zeros(len(labels), 10, dtype=torch.long)
        content.scatter_(1, labels[:, 2], labels[:, 0])
        cells = self.cells(features[:, 0]).view(len(labels) * 9, -1)
        return loss + 0.3 * F.cross_entropy(cells.float(), content[:, 1:].flatten())

    @torch.no_grad()
    def scores(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Return which share of the patches of shapes, digits and words is named right, and of colours and cells."""
        classes, colours, cells, _ = (part.argmax(-1) for part in self.patch(features[:, 1:]).split(self.sizes, dim=-1))
        digits = 1 + len(SHAPES)
        words = digits + 10
        truth = labels[:, 0]
        named = classes == truth
        return {
            "shape": named[(truth > 0) & (truth < digits)].float().mean().item(),
            "digit": named[(truth >= digits) & (truth < words)].float().mean().item(),
            "word": named[truth >= words].float().mean().item(),
            "nothing": named[truth == 0].float().mean().item(),
            "colour": (colours == labels[:, 1])[labels[:, 1] > 0].float().mean().item(),
            "cell": (cells == labels[:, 2])[truth > 0].float().mean().item(),
        }


def tower_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that become the feature, CLS first, (B, 197, D), without the layers above."""
    tower = model.model.vision_tower
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    with attention(tower.config, plain_attention):
        for layer in tower.encoder.layers[: model.config.vision_feature_layer + 1]:
            hidden = layer(hidden, attention_mask=None)
    return hidden


def answer_loss(model: Any, features: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of the answers: features (B, 197, D), ids and targets (B, 10, 12)."""
    batch = len(ids)
    words = torch.cat([torch.full((batch, 1), IDS[BOS]), ids.flatten(1)], dim=1)
    embeds = model.get_input_embeddings()(words)
    image = model.model.multi_modal_projector(features[:, 1:])
    embeds = torch.cat([embeds[:, :1], image.to(embeds.dtype), embeds[:, 1:]], dim=1)
    language_model = model.model.language_model
    with attention(language_model.config, packed_attention):
        hidden = language_model(
            inputs_embeds=embeds,
            attention_mask={"full_attention": None},
            position_ids=packed_positions().expand(batch, -1),
            use_cache=False,
        ).last_hidden_state[:, 1 + PATCHES :]
    hidden = hidden.unflatten(1, (PAIRS, PAIR_LENGTH))[:, :, :-1][targets[:, :, 1:]]
    return F.cross_entropy(model.lm_head(hidden).float(), ids[:, :, 1:][targets[:, :, 1:]])


@torch.no_grad()
def exact_match(model: Any, questions: list[tuple[Any, Any]], batch: int = 64) -> dict[str, float]:
    """Return the share of questions answered exactly, overall and per kind, by greedy decoding of two words."""
    model.eval()
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for start in range(0, len(questions), batch):
        part = questions[start : start + batch]
        pixels = pixel_tensor(np.stack([np.asarray(image) for image, _ in part]))
        with torch.autocast("cpu", torch.bfloat16):
            image = model.model.multi_modal_projector(tower_features(model, pixels)[:, 1:]).float()
        prompts = [[IDS[word] for word in (*question.text.split(), ANSWER)] for _, question in part]
        answers = [[IDS[word] for word in (*question.answer.split(), EOS)] for _, question in part]
        # All answers are at most two words: score the right one by whether greedy decoding would produce it.
        length = max(len(p) + len(a) for p, a in zip(prompts, answers))
        ids = torch.tensor([p + a + [IDS[PAD]] * (length - len(p) - len(a)) for p, a in zip(prompts, answers)])
        embeds = model.get_input_embeddings()(torch.cat([torch.full((len(part), 1), IDS[BOS]), ids], 1))
        embeds = torch.cat([embeds[:, :1], image, embeds[:, 1:]], dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            best = model.lm_head(hidden[:, 1 + PATCHES :]).argmax(-1)
        for row, (prompt, answer, (_, question)) in enumerate(zip(prompts, answers, part)):
            said = best[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist()
            right[question.kind].append(said == answer)
    model.train()
    scores = {kind: float(np.mean(values)) for kind, values in right.items() if values}
    everything = [value for values in right.values() for value in values]
    return {"all": float(np.mean(everything))} | scores


class Trainer:
    """The state of a run.

    Args:
        cache: folder of checkpoint and log.
        minutes: length of each stage.
        seed: seed of weights and data.
    """

    def __init__(self, cache: Path, minutes: dict[str, float], seed: int):
        torch.manual_seed(seed)
        self.cache, self.minutes, self.seed = cache, minutes, seed
        self.model = build_model()
        self.heads = DenseHeads(self.model.config.vision_config.hidden_size)
        self.spent = dict.fromkeys(STAGES, 0.0)
        self.steps = dict.fromkeys(STAGES, 0)
        self._make_optimizer(STAGES[0])
        self.validation = list(held_out(256, VALIDATION_SEEDS))
        cache.mkdir(parents=True, exist_ok=True)
        self.curve.touch()
        if self.checkpoint.exists():
            self._load()

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.cache / "checkpoint.pt"

    @property
    def curve(self) -> Path:
        """The learning curve, one JSON object a line."""
        return self.cache / "log.jsonl"

    def _is_done(self, entry: dict[str, Any]) -> bool:
        return entry["step"] <= self.steps[entry["stage"]]

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.spent, self.steps = state["spent"], state["steps"]
        self._make_optimizer(state["stage"])
        # What was logged after the checkpoint will be done again.
        lines = [line for line in self.curve.read_text().splitlines() if self._is_done(json.loads(line))]
        self.curve.write_text("".join(f"{line}\n" for line in lines))
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)

    def save(self, stage: str) -> None:
        """Write a checkpoint in one move."""
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "spent": self.spent,
            "steps": self.steps,
            "stage": stage,
        }
        torch.save(state, self.cache / "checkpoint.tmp")
        os.replace(self.cache / "checkpoint.tmp", self.checkpoint)

    def log(self, **entry: Any) -> None:
        """Append a line to the learning curve."""
        with self.curve.open("a") as file:
            file.write(json.dumps(entry | {"time": time.time()}) + "\n")

    def _make_optimizer(self, stage: str) -> None:
        tower = list(self.model.model.vision_tower.parameters())
        if stage == "dense":
            parameters = tower + list(self.heads.parameters())
        else:
            frozen = set(map(id, tower))
            parameters = [p for p in self.model.parameters() if id(p) not in frozen]
        # Weights of hidden layers go to Muon, whose rates are scaled to those of AdamW; the rest to AdamW.
        outside = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        outside |= set(map(id, self.heads.parameters()))
        hidden = [p for p in parameters if p.ndim == 2 and id(p) not in outside]
        others = [p for p in parameters if p.ndim != 2 or id(p) in outside]
        self.optimizers = [
            torch.optim.Muon(hidden, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01),
        ]
        self.optimizer_stage = stage

    def _batch(self, stage: str, most: int) -> list[Any]:
        # Seeds count on over the stages, so that a resumed run sees no scene twice.
        first = TRAINING_SEEDS.start + self.seed * 50_000_000 + sum(self.steps.values()) * BATCH
        seeds = range(first, first + BATCH)
        if stage == "dense":
            return [crowded_scene(seed) if seed % 2 else make_scene(seed) for seed in seeds]
        return [make_scene(seed, most) for seed in seeds]

    def step(self, stage: str) -> float:
        """Do one optimiser step and return its loss."""
        progress = min(1.0, self.spent[stage] / self.minutes[stage])
        most = 5
        if stage == "decoder":
            most = 1 if progress < 0.1 else 2 if progress < 0.22 else 3 if progress < 0.36 else 5
        scenes = self._batch(stage, most)
        pixels = pixel_tensor(np.stack([scene.pixels() for scene in scenes]))
        warmup = min(1.0, (self.steps[stage] + 1) / 100)
        rate = PEAK_RATE * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            if stage == "dense":
                labels = torch.from_numpy(np.stack([dense_labels(scene) for scene in scenes]))
                loss = self.heads(tower_features(self.model, pixels), labels)
            else:
                with torch.no_grad():
                    features = tower_features(self.model, pixels)
                rng = random.Random(scenes[0].seed)
                pairs = [question_pairs(scene, rng) for scene in scenes]
                ids, targets = (torch.from_numpy(np.stack(part)) for part in zip(*pairs))
                loss = answer_loss(self.model, features, ids, targets)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    def scores(self, stage: str) -> dict[str, dict[str, float]]:
        """Return what a stage has reached on validation scenes: the dense heads, or the answers."""
        if stage == "dense":
            return {"dense": self._dense_scores()}
        return {"validation": exact_match(self.model, self.validation)}

    def _dense_scores(self) -> dict[str, float]:
        scenes = [make_scene(seed) for seed in VALIDATION_SEEDS[:256]]
        pixels = pixel_tensor(np.stack([scene.pixels() for scene in scenes]))
        labels = torch.from_numpy(np.stack([dense_labels(scene) for scene in scenes]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return self.heads.scores(tower_features(self.model, pixels), labels)

    def run(self) -> None:
        """Run all stages from where the checkpoint left off."""
        self.model.train()
        for stage in STAGES:
            if self.spent[stage] >= self.minutes[stage]:
                continue
            if self.optimizer_stage != stage:
                self._make_optimizer(stage)
            saved = evaluated = time.monotonic()
            last, losses = time.monotonic(), []
            while self.spent[stage] < self.minutes[stage]:
                losses.append(self.step(stage))
                now = time.monotonic()
                # A step that was stopped from outside does not count as long as it took.
                self.spent[stage] += min(now - last, 10.0) / 60
                self.steps[stage] += 1
                last = now
                if self.steps[stage] % 50 == 0:
                    self.log(stage=stage, step=self.steps[stage], minutes=self.spent[stage], loss=np.mean(losses[-50:]))
                if now - evaluated > 240:
                    self.log(stage=stage, step=self.steps[stage], minutes=self.spent[stage], **self.scores(stage))
                    evaluated = last = time.monotonic()
                if now - saved > 120:
                    self.save(stage)
                    saved = last = time.monotonic()
            self.save(stage)
            self.log(stage=stage, step=self.steps[stage], minutes=self.spent[stage], **self.scores(stage))


def export(cache: Path, folder: Path) -> None:
    """Write the newest checkpoint of a cache folder as bfloat16 in the standard format.

    Args:
        cache: folder of the checkpoint.
        folder: where to write; existing files are replaced one by one.
    """
    model = build_model()
    model.load_state_dict(torch.load(cache / "checkpoint.pt", weights_only=True)["model"])
    model.generation_config.max_new_tokens = 4
    model.generation_config.eos_token_id = IDS[EOS]
    model.generation_config.pad_token_id = IDS[PAD]
    model.to(torch.bfloat16).save_pretrained(folder)
    build_processor().save_pretrained(folder)


def main(
    minutes: Annotated[str, typer.Option(help="minutes of the two stages")] = "7,30",
    seed: Annotated[int, typer.Option(help="seed of weights and data")] = 0,
    cache: Annotated[Path, typer.Option(help="folder of checkpoint and log")] = Path("~/.cache/tokred/scenes"),
    export_to: Annotated[
        Path | None, typer.Option("--export", help="write the newest checkpoint here, and stop")
    ] = None,
) -> None:
    """Train the scene model, going on from the newest checkpoint, or export it."""
    cache = cache.expanduser()
    if export_to is not None:
        export(cache, export_to)
        return
    parts = [float(part) for part in minutes.split(",")]
    if len(parts) != len(STAGES) or min(parts) <= 0:
        raise typer.BadParameter(f"--minutes {minutes!r} is not two positive numbers, such as 7,30")
    restart_with_allocator()
    Trainer(cache, dict(zip(STAGES, parts)), seed).run()


if __name__ == "__main__":
    typer.run(main)
