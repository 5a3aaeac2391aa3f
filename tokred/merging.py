"""What happens inside an image encoder: hooks that merge tokens between the attention and the MLP of a block."""

from __future__ import annotations

import inspect
import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.base import grid_cells
from .adapters.encoders import Encoder
from .call import current_encoding
from .errors import UndeclaredObservationError, UnsupportedAttentionError, UnsupportedFamilyError, UnsupportedInputError
from .hooks import Attachments
from .kernels import gather
from .layout import MediaItem, Span
from .method import Context, Need, Observation, Selection, Stage
from .plan import Plan
from .report import CallReport, StageReport, Statistics

# The kernels of transformers that take a mask of numbers.
_MASKED = ("sdpa", "eager")


class Tokens:
    """The tokens of one call on their way through the blocks.

    Args:
        batch: number of images.
        length: number of tokens of each, those before the patches included.
        device: where they are.

    Attributes:
        length: as given.
        places: for each of the first tokens its place among those that are left, int64 of shape (B, length).
        sizes: how many tokens each of those that are left stands for, float32 of shape (B, T).
        first: for each of those that are left the earliest token in it, int64 of shape (B, T).
    """

    def __init__(self, batch: int, length: int, device: torch.device):
        self.length = length
        self.first = self.places = torch.arange(length, device=device).expand(batch, -1)
        self.sizes = torch.ones((batch, length), device=device)

    def reduce(self, selection: Selection) -> None:
        """Follow a selection among the tokens that are left, each of which is kept or merged."""
        batch, after = selection.keep.shape
        place = torch.zeros_like(self.first)
        place.scatter_(1, selection.keep, torch.arange(after, device=place.device).expand(batch, -1))
        if selection.merged_into is not None:
            absorbed = place.gather(1, selection.merged_into.clamp(min=0))
            place = torch.where(selection.merged_into < 0, place, absorbed)
        self.sizes = self.sizes.new_zeros((batch, after)).scatter_add_(1, place, self.sizes)
        first = torch.full((batch, after), self.length, device=place.device)
        self.first = first.scatter_reduce_(1, place, self.first, "amin")
        self.places = place.gather(1, self.places)

    def restore(self, x: Tensor) -> Tensor:
        """Return x (B, T, D) at the length of the first tokens: each holds what it was merged into."""
        return gather(x, self.places)

    def merged_into(self) -> Tensor:
        """Return for each of the first tokens the earliest one that it was merged with, -1 for none, (B, length)."""
        earliest = self.first.gather(1, self.places)
        own = torch.arange(self.length, device=earliest.device)
        return earliest.masked_fill(earliest == own, -1)


@dataclass
class _Call:
    """State of one call of an encoder.

    Attributes:
        owner: the hooks that opened it.
        tokens: its tokens.
        stages: what the steps did so far.
        restores: whether what comes out has its first length again.
        key_source: what the keys of the block that runs are made from.
        bias: logarithms of the sizes in the form that the attention takes; None while no block needs them.
        rotary: cosines and sines of the patches that are left; None until a block needs them.
    """

    owner: object
    tokens: Tokens
    stages: list[StageReport] = field(default_factory=list)
    restores: bool = True
    key_source: Tensor | None = None
    bias: Tensor | None = None
    rotary: tuple[Tensor, ...] | None = None


_current: ContextVar[_Call | None] = ContextVar("tokred_encoder_call", default=None)


class BlockHooks:
    """The hooks on the blocks of an image encoder.

    Args:
        encoder: the encoder.
        plan: the steps.
        statistics: what is told about every call.

    Raises:
        UnsupportedFamilyError: the attention takes no mask, which a step wants.
    """

    def __init__(self, encoder: Encoder, plan: Plan, statistics: Statistics):
        self._encoder = encoder
        self._adapter = encoder.adapter
        self._plan = plan
        self._statistics = statistics
        self._prefix = encoder.prefix
        steps = {step.layer: step for _, step in plan.steps if step.stage is Stage.ENCODER_BLOCK}
        self._sites = {index: block for index, block in enumerate(encoder.blocks) if index in steps}
        attention = self._attention(encoder.blocks[0])
        self._parameters = list(inspect.signature(attention.forward).parameters)
        if any(step.proportional for step in steps.values()) and self._adapter.mask not in self._parameters:
            raise UnsupportedFamilyError(
                f"{type(attention).__name__} takes no {self._adapter.mask!r} in this version of its library, so merged "
                "tokens cannot be weighted in attention; use a newer version or prop_attn=False"
            )

    def attach(self, attachments: Attachments) -> None:
        """Add the hooks."""
        blocks = self._encoder.blocks
        attachments.before(blocks[0], self._enter)
        for index, block in self._sites.items():
            if self._adapter.keys_from is not None:
                source = self._attention(block).get_submodule(self._adapter.keys_from)
                attachments.after(source, self._leave_keys)
            attachments.before(block.get_submodule(self._adapter.norm), partial(self._enter_norm, index))
        for index, block in enumerate(blocks):
            if index > min(self._sites, default=len(blocks)) or (index in self._sites and not self._adapter.keys_from):
                attachments.before(self._attention(block), self._enter_attention)
        attachments.after(blocks[-1], self._leave)

    def end_call(self) -> None:
        """Forget the running call, if it is one of this encoder."""
        call = _current.get()
        if call is not None and call.owner is self:
            _current.set(None)

    def _attention(self, block: nn.Module) -> Any:
        return block.get_submodule(self._adapter.attention)

    def _running(self) -> _Call | None:
        call = _current.get()
        return call if call is not None and call.owner is self else None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A call that an error ended may have left one behind.
        self.end_call()
        if self._plan.paused:
            return
        hidden = args[0] if args else next(iter(kwargs.values()))
        batch, length = hidden.shape[:2]
        _current.set(_Call(self, Tokens(batch, length, hidden.device)))

    def _leave_keys(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running()
        if call is not None:
            call.key_source = output

    def _enter_attention(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self._running()
        if call is None:
            return None
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        if self._adapter.keys_from is None:
            call.key_source = next(iter(arguments.values()))
        if not call.stages:
            return None
        if arguments.get(self._adapter.mask) is not None:
            raise UnsupportedInputError(
                f"this encoder was called with a mask ({self._adapter.mask}), which would not fit the merged tokens: "
                "pictures that are padded with patches are not supported"
            )
        if call.bias is not None:
            kernel = getattr(getattr(module, "config", None), "_attn_implementation", None) or _MASKED[0]
            if kernel not in _MASKED:
                raise UnsupportedAttentionError(
                    f"attention {kernel!r} takes no numbers as a mask, so merged tokens cannot be weighted; use one of "
                    f"{', '.join(_MASKED)}, or prop_attn=False"
                )
            arguments[self._adapter.mask] = call.bias
        if self._adapter.rotary is not None:
            arguments[self._adapter.rotary] = self._rotary(call, arguments[self._adapter.rotary])
        return (), arguments

    def _rotary(self, call: _Call, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return cosines and sines of the patches that are left: those of the earliest patch in each."""
        if call.rotary is None:
            places = call.tokens.first[:, self._prefix :] - self._prefix
            call.rotary = tuple(part[places].unsqueeze(1) for part in whole)
        return call.rotary

    def _enter_norm(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._running()
        if call is None:
            return
        hidden, tokens = args[0], call.tokens
        for method, step in self._plan.at(Stage.ENCODER_BLOCK, index):
            total, left = (length - self._prefix for length in (tokens.length, hidden.shape[1]))
            count = method.count(left) if step.count is None else step.count(total, left)
            if count == left:
                continue
            if hidden.requires_grad:
                raise UnsupportedInputError(
                    f"{method.name} inside an encoder has no gradient: call the model under torch.no_grad() or "
                    "torch.inference_mode()"
                )
            observe = partial(self._observe, call, self._attention(self._sites[index]))
            context = Context(
                hidden, step.needs, observe, tokens.first, total=total, prefix=self._prefix, sizes=tokens.sizes
            )
            selection = step.select(context)
            # The block adds the MLP's output to this very tensor, so it has to shrink itself.
            hidden.set_(selection.rows_of(hidden).to(hidden.dtype))
            tokens.reduce(selection)
            call.rotary = None
            if step.proportional:
                bias = tokens.sizes.log().to(hidden.dtype)
                call.bias = bias if self._adapter.key_mask else bias[:, None, None]
            call.restores &= getattr(method, "restore", True)
            before, after = ([count] * len(hidden) for count in (left, hidden.shape[1] - self._prefix))
            call.stages.append(StageReport(str(step.stage), method.name, index, before, after))

    def _observe(self, call: _Call, attention: Any, observation: Observation, text: bool) -> Tensor:
        if observation.need is not Need.TOWER_KEYS or call.key_source is None:
            raise UndeclaredObservationError(f"{observation} cannot be observed at stage {Stage.ENCODER_BLOCK}")
        return self._adapter.keys(attention, call.key_source)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self._running()
        if call is None:
            return None
        self.end_call()
        return self._finish(call, output) if call.stages else None

    def _finish(self, call: _Call, output: Any) -> Any:
        """Tell what a call did, and return what comes out of the last block, None for what came out."""
        self._statistics.add(self._report(call))
        if not call.restores:
            return None
        if isinstance(output, tuple):
            return (call.tokens.restore(output[0]), *output[1:])
        return call.tokens.restore(output)

    def _merged(self, call: _Call) -> Tensor:
        """Return for each patch the earliest one that it was merged with, -1 for none, int64 of shape (B, N)."""
        merged = call.tokens.merged_into()[:, self._prefix :]
        return torch.where(merged < 0, -1, merged - self._prefix)

    def _report(self, call: _Call) -> CallReport:
        """Return what a call did, with each picture as a medium of its own."""
        merged = self._merged(call)
        batch, patches = merged.shape
        side = math.isqrt(patches)
        cells = partial(grid_cells, 1, side, side) if side * side == patches else None
        spans = [
            Span(sample, 0, patches, MediaItem("image", patches, cells, merged[sample])) for sample in range(batch)
        ]
        report = CallReport(self._adapter.model_type, batch, patches, spans)
        report.stages = call.stages
        after = {stage.layer: stage.tokens_after[0] for stage in call.stages}
        left = patches
        for index in range(len(self._encoder.blocks)):
            report.saw(left + self._prefix, left * batch)
            left = after.get(index, left)
        return report.finish(_Survivors(call.tokens, merged))


class TowerHooks(BlockHooks):
    """The same in the tower of a model that goes on with what is left: the encoding of media takes it from here."""

    def _finish(self, call: _Call, output: Any) -> Any:
        encoding = current_encoding.get()
        if encoding is not None:
            tokens = call.tokens
            encoding.order = tokens.first[:, self._prefix :].argsort(dim=1)
            keep = tokens.first[:, self._prefix :].gather(1, encoding.order) - self._prefix
            encoding.projected = Selection(keep, merged_into=self._merged(call))
            encoding.length = tokens.length - self._prefix


@dataclass(frozen=True)
class _Survivors:
    """What a call left.

    Args:
        tokens: its tokens.
        merged_into: for each patch the earliest one that it was merged with, -1 for none, int64 of shape (B, N).
    """

    tokens: Tokens
    merged_into: Tensor

    def dropped(self) -> Tensor:
        """Return which patches were merged into earlier ones, bool of shape (B, N)."""
        return self.merged_into >= 0
