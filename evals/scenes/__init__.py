"""Rendered scenes, questions about them, and the small vision-language model that answers these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .generator import (
    HELD_OUT_SEEDS,
    KINDS,
    TRAINING_SEEDS,
    VALIDATION_SEEDS,
    Question,
    Scene,
    Thing,
    held_out,
    make_scene,
)

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped model, in the standard format."""

__all__ = [
    "HELD_OUT_SEEDS",
    "KINDS",
    "MODEL_DIR",
    "TRAINING_SEEDS",
    "VALIDATION_SEEDS",
    "Question",
    "Scene",
    "Thing",
    "held_out",
    "load",
    "make_scene",
]


def load(folder: Path | str = MODEL_DIR) -> tuple[Any, Any]:
    """Return model and processor of a folder, the model in float32 and evaluation mode."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)
