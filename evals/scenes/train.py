"""Train the scene model: seeded, resumable, in three stages, on two CPU cores.

1. The tower learns dense labels of every patch, and its CLS token what stands in each cell.
2. The tower is frozen; projector and decoder learn to answer, with scenes of one, two, three, then up to five objects.
3. All parameters learn together.

Run `python -m tokred_evals.scenes.train --help`. Checkpoints with the optimiser's state go to a cache folder outside
the repository; `--export DIR` writes the newest one in the standard format.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
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
    held_out,
    make_scene,
)
from .model import ANSWER, BOS, EOS, IDS, PAD, build_model, build_processor

GRID = SIZE // PATCH
PATCHES = GRID * GRID
PAIRS, PAIR_LENGTH = 10, 12
CLASSES = ("", *SHAPES, *map(str, range(10)), *WORDS)
COLOUR_CLASSES = ("", *COLOURS)
STAGES = ("dense", "decoder", "joint")
PEAK_RATES = {"dense": 1e-3, "decoder": 2e-3, "joint": 7e-4}
BATCH = 32


def pixel_tensor(pixels: np.ndarray) -> torch.Tensor:
    """Return pictures as the processor would: uint8 (B, 112, 112, 3) to float32 (B, 3, 112, 112)."""
    return (torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25


def dense_labels(scene: Any) -> np.ndarray:
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


def question_pairs(scene: Any, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
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


def packing() -> tuple[torch.Tensor, torch.Tensor]:
    """Return mask (1, 1, L, L) and positions (1, L): every pair sees the image and itself, as if it came alone."""
    image = 1 + PATCHES
    length = image + PAIRS * PAIR_LENGTH
    group = torch.cat([torch.full((image,), -1), torch.arange(PAIRS).repeat_interleave(PAIR_LENGTH)])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = causal & ((group[None] == -1) | (group[None] == group[:, None]))
    positions = torch.cat([torch.arange(image), image + torch.arange(PAIR_LENGTH).repeat(PAIRS)])
    return mask[None, None], positions[None]


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


def tower_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that become the feature, CLS first, (B, 197, D), without the layers above."""
    tower = model.model.vision_tower
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    for layer in tower.encoder.layers[: model.config.vision_feature_layer + 1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


def answer_loss(model: Any, features: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of the answers: features (B, 197, D), ids and targets (B, 10, 12)."""
    batch = len(ids)
    mask, positions = packing()
    words = torch.cat([torch.full((batch, 1), IDS[BOS]), ids.flatten(1)], dim=1)
    embeds = model.get_input_embeddings()(words)
    image = model.model.multi_modal_projector(features[:, 1:])
    embeds = torch.cat([embeds[:, :1], image.to(embeds.dtype), embeds[:, 1:]], dim=1)
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=mask.expand(batch, -1, -1, -1),
        position_ids=positions.expand(batch, -1),
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
        if self.checkpoint.exists():
            self._load()

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.cache / "checkpoint.pt"

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.spent, self.steps = state["spent"], state["steps"]
        self._make_optimizer(state["stage"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, stage: str) -> None:
        """Write a checkpoint in one move."""
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "spent": self.spent,
            "steps": self.steps,
            "stage": stage,
        }
        torch.save(state, self.cache / "checkpoint.tmp")
        os.replace(self.cache / "checkpoint.tmp", self.checkpoint)

    def log(self, **entry: Any) -> None:
        """Append a line to the learning curve."""
        with (self.cache / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry | {"time": time.time()}) + "\n")

    def _make_optimizer(self, stage: str) -> None:
        tower = list(self.model.model.vision_tower.parameters())
        if stage == "dense":
            parameters = tower + list(self.heads.parameters())
        elif stage == "decoder":
            frozen = set(map(id, tower))
            parameters = [p for p in self.model.parameters() if id(p) not in frozen]
        else:
            parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.optimizer_stage = stage

    def _batch(self, stage: str, most: int) -> list[Any]:
        # Seeds count on over the stages, so that a resumed run sees no scene twice.
        first = TRAINING_SEEDS.start + self.seed * 50_000_000 + sum(self.steps.values()) * BATCH
        return [make_scene(first + index, most) for index in range(BATCH)]

    def step(self, stage: str) -> float:
        """Do one optimiser step and return its loss."""
        progress = min(1.0, self.spent[stage] / self.minutes[stage])
        most = 5
        if stage == "decoder":
            most = 1 if progress < 0.1 else 2 if progress < 0.22 else 3 if progress < 0.36 else 5
        scenes = self._batch(stage, most)
        pixels = pixel_tensor(np.stack([scene.pixels() for scene in scenes]))
        warmup = min(1.0, (self.steps[stage] + 1) / 100)
        rate = PEAK_RATES[stage] * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        labels = None
        if stage != "decoder":
            labels = torch.from_numpy(np.stack([dense_labels(scene) for scene in scenes]))
        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(stage != "decoder"):
                features = tower_features(self.model, pixels)
            loss = features.new_zeros((), dtype=torch.float32)
            if stage != "decoder":
                loss = loss + self.heads(features, labels) * (1.0 if stage == "dense" else 0.1)
            if stage != "dense":
                rng = random.Random(scenes[0].seed)
                pairs = [question_pairs(scene, rng) for scene in scenes]
                ids, targets = (torch.from_numpy(np.stack(part)) for part in zip(*pairs))
                loss = loss + answer_loss(self.model, features, ids, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        return loss.item()

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
                if stage != "dense" and now - evaluated > 240:
                    scores = exact_match(self.model, self.validation)
                    self.log(stage=stage, step=self.steps[stage], minutes=self.spent[stage], validation=scores)
                    evaluated = last = time.monotonic()
                if now - saved > 120:
                    self.save(stage)
                    saved = last = time.monotonic()
            self.save(stage)
        self.log(stage="done", validation=exact_match(self.model, self.validation))


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
    minutes: Annotated[str, typer.Option(help="minutes of the three stages")] = "10,50,60",
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
        raise typer.BadParameter(f"--minutes {minutes!r} is not three positive numbers, such as 10,50,60")
    restart_with_allocator()
    Trainer(cache, dict(zip(STAGES, parts)), seed).run()


if __name__ == "__main__":
    typer.run(main)
