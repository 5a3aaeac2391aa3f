"""A handle's attachments on one model, or on one image encoder."""

from __future__ import annotations

from typing import Any

from torch import nn

from .adapters.base import ModelAdapter
from .adapters.encoders import Encoder, find_encoders
from .calling import CallHooks
from .decoding import DecoderHooks
from .encoding import EncoderHooks
from .errors import StageTakenError, UnsupportedAttentionError, UnsupportedFamilyError
from .hooks import Attachments
from .merging import BlockHooks, TowerHooks
from .method import TOWER_NEEDS, Method, ModelShape, Stage, Step
from .plan import Plan
from .registry import encoders
from .report import Statistics


class Session:
    """The hooks of one handle on one model, and what they count.

    Args:
        model: the model given to `tokred.apply`.
        adapter: its family.
        methods: the methods, in the order in which their steps run.

    Raises:
        UnsupportedFamilyError: a method needs what the family does not provide.
        UnsupportedAttentionError: a decoder layer's attention would not be exact on a shortened sequence.
        StageTakenError: two methods act on one stage.
        ParameterError: a method's layer lies outside the model.
    """

    def __init__(self, model: nn.Module, adapter: ModelAdapter, methods: tuple[Method, ...]):
        base = adapter.base(model)
        self.adapter = adapter
        self.statistics = Statistics()
        self.plan = Plan(methods, adapter.shape(base))
        self._config: Any = base.config
        self._check(base.get_submodule(adapter.decoder).config)
        self._attachments = Attachments(self.plan, self.statistics)
        self._encoder = EncoderHooks(base, adapter, self.plan)
        self._tower: TowerHooks | None = None
        if self.plan.acts(Stage.ENCODER_BLOCK):
            self._tower = TowerHooks(_tower(base, adapter), self.plan, self.statistics)
        self._decoder = DecoderHooks(base, adapter, self.plan, self.statistics)
        self._calls = CallHooks(model, base)

    def _check(self, decoder_config: Any) -> None:
        provided = self.adapter.provides(self._config)
        merging = [method.name for method, step in self.plan.steps if step.stage is Stage.ENCODER_BLOCK]
        for method, step in self.plan.steps:
            missing = sorted({observation.need for observation in step.observations} - provided)
            if missing:
                raise UnsupportedFamilyError(
                    f"{method.name} needs {', '.join(missing)}, which {self.adapter.model_type} with this config does "
                    f"not provide (it provides {', '.join(sorted(provided))})"
                )
            if step.stage is Stage.PROJECTOR and self.adapter.projector is None:
                raise UnsupportedFamilyError(
                    f"{method.name} removes tokens before the projector, but the projector of "
                    f"{self.adapter.model_type} mixes tokens"
                )
            if merging and step.stage is not Stage.ENCODER_BLOCK and step.observes(*TOWER_NEEDS):
                raise UnsupportedFamilyError(
                    f"{method.name} observes all tokens of the tower, and {merging[0]} merges them there: the two "
                    "cannot be combined"
                )
        _check_stages(self.plan.steps)
        kinds = set(getattr(decoder_config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if kinds or (getattr(decoder_config, "sliding_window", None) and not hasattr(decoder_config, "layer_types")):
            raise UnsupportedAttentionError(
                f"the decoder has layers of type {', '.join(sorted(kinds)) or 'sliding_attention'}; so far only "
                "full_attention is exact on a shortened sequence"
            )

    def attach(self) -> None:
        """Add all hooks."""
        self._calls.attach(self._attachments)
        self._decoder.attach(self._attachments)
        self._encoder.attach(self._attachments)
        if self._tower is not None:
            self._tower.attach(self._attachments)

    def detach(self) -> None:
        """Remove everything that `attach` added."""
        self._attachments.remove()
        self._calls.end_call()
        if self._tower is not None:
            self._tower.end_call()


class EncoderSession:
    """The hooks of one handle on an image encoder that stands alone, and what they count.

    Args:
        encoder: the encoder.
        methods: the methods, in the order in which their steps run.

    Raises:
        UnsupportedFamilyError: a method acts elsewhere, or needs what the encoder does not provide.
        StageTakenError: two methods act on one block.
        ParameterError: a method's block lies outside the encoder.
    """

    def __init__(self, encoder: Encoder, methods: tuple[Method, ...]):
        self.adapter = encoder.adapter
        self.statistics = Statistics()
        self.plan = Plan(methods, ModelShape(num_layers=0, tower_layers=len(encoder.blocks)))
        for method, step in self.plan.steps:
            if step.stage is not Stage.ENCODER_BLOCK:
                raise UnsupportedFamilyError(
                    f"{method.name} acts on stage {step.stage}, and an image encoder alone has only "
                    f"{Stage.ENCODER_BLOCK}"
                )
        _check_stages(self.plan.steps)
        self._attachments = Attachments(self.plan, self.statistics)
        self._blocks = BlockHooks(encoder, self.plan, self.statistics)

    def attach(self) -> None:
        """Add all hooks."""
        self._blocks.attach(self._attachments)

    def detach(self) -> None:
        """Remove everything that `attach` added."""
        self._attachments.remove()
        self._blocks.end_call()


def _tower(base: nn.Module, adapter: ModelAdapter) -> Encoder:
    """Return the tower of a base model as an image encoder."""
    for encoder in find_encoders(base, list(encoders().values())):
        if encoder.path == adapter.tower_layers:
            return encoder
    raise UnsupportedFamilyError(
        f"the tower of this {adapter.model_type} is no image encoder that tokred knows (it knows those of "
        f"{', '.join(encoders())})"
    )


def _check_stages(steps: list[tuple[Method, Step]]) -> None:
    """Raise `StageTakenError` if two methods act on one site."""
    stages: dict[tuple[Stage, int | None], Method] = {}
    for method, step in steps:
        other = stages.setdefault((step.stage, step.layer), method)
        if other is not method:
            where = step.stage if step.layer is None else f"{step.stage} {step.layer}"
            raise StageTakenError(f"{other.name} and {method.name} both act on stage {where}")
