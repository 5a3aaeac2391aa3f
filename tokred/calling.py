"""When a call of a model with a handle begins and ends: hooks on the model and on its base model."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import cache as caches
from .call import Call, current_call, labels_of_call
from .errors import UnsupportedInputError
from .hooks import Attachments, arguments_of
from .layout import MediaItem
from .observe import capturing


class CallHooks:
    """The hooks that open and close the state of a call.

    Args:
        model: the model given to `tokred.apply`.
        base: the base model in it.
    """

    def __init__(self, model: nn.Module, base: nn.Module):
        self._model = model
        self._base = base

    def attach(self, attachments: Attachments) -> None:
        """Add the hooks."""
        attachments.before(self._base, self._enter_base)
        attachments.after(self._base, self._leave_base, always=True)
        if self._model is not self._base:
            attachments.before(self._model, self._enter_model)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments = arguments_of(module, args, kwargs)
        if arguments.get("labels") is None:
            return None
        # The copy is masked once it is known which tokens are gone.
        labels = arguments["labels"].clone()
        labels_of_call.set(labels)
        return (), arguments | {"labels": labels}

    def _enter_base(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # PyTorch runs no hook when Ctrl-C ends a call, which may have left one behind.
        self.end_call()
        arguments = arguments_of(module, args, kwargs)
        labels = labels_of_call.get()
        labels_of_call.set(None)
        call = Call(self, current_call.get(), arguments.get("input_ids"), arguments.get("mm_token_type_ids"), labels)
        for modality, output in (arguments.get("mm_encoder_outputs") or {}).items():
            if output is not None:
                lengths = [len(feature) for feature in output.pooler_output]
                items = getattr(output, "tokred_items", ())
                # Beam search repeats the features and leaves the items; their grids then are not known.
                if [item.length for item in items] != lengths:
                    items = [MediaItem(modality, length) for length in lengths]
                call.items[modality] = list(items)
        pixels = any(arguments.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
        if call.ids is None and call.type_ids is None and (pixels or call.items):
            raise UnsupportedInputError(
                "media with inputs_embeds need mm_token_type_ids too: without them the media tokens cannot be told "
                "from text"
            )
        current_call.set(call)
        caches.handle_is_active.set(True)

    def _leave_base(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.end_call()

    def end_call(self) -> None:
        """Forget the running call of this model, if there is one."""
        call = current_call.get()
        if call is not None and call.owner is self:
            current_call.set(call.outer)
            caches.handle_is_active.set(call.outer is not None)
            capturing.set(None)
