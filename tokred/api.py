"""The public calls: apply a method to a model, and ask whether that is possible."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from .adapters.base import ModelAdapter
from .adapters.encoders import Encoder, find_encoders
from .errors import (
    AlreadyCompiledError,
    ParameterError,
    RemovedHandleError,
    StageTakenError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from .hooks import Hook
from .method import Method
from .registry import adapters, build_method, encoders, nearest
from .report import CallReport, Summary, TraceToken, draw_overlay
from .session import EncoderSession, Session

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger("tokred")


class Handle:
    """A method attached to a model; also a context manager that removes it."""

    def __init__(self, session: Session | EncoderSession):
        self._session = session
        self._removed = False

    @property
    def methods(self) -> tuple[Method, ...]:
        """The attached methods."""
        return self._session.plan.methods

    def summary(self) -> Summary:
        """Return what was removed so far, and the time that it took."""
        parameters = [method.to_dict() for method in self.methods]
        return Summary.of(parameters, self._session.adapter.model_type, self._session.statistics)

    def trace(self) -> list[list[TraceToken]]:
        """Return, for each sample of the last prefill, where every surviving visual token comes from.

        Raises:
            UnsupportedInputError: nothing was removed yet.
        """
        return self._last_call().trace()

    def overlay(self, image: Image, sample: int = 0, item: int = 0) -> Image:
        """Return a picture of what the last prefill kept of a media item.

        Args:
            image: the picture that the model was shown.
            sample: row of the batch.
            item: number of the item in its sample.

        Returns:
            The picture with dropped cells dark and merged cells tinted, enlarged if it is small.

        Raises:
            UnsupportedInputError: nothing was removed yet, or the item or its grid is not known.
        """
        return draw_overlay(self._last_call(), image, sample, item)

    def _last_call(self) -> CallReport:
        report = self._session.statistics.last
        if report is None:
            raise UnsupportedInputError("no media went through the model since tokred.apply, or nothing was removed")
        return report

    def pause(self) -> None:
        """Remove no more tokens; conversations whose cache is already shortened go on exactly."""
        self._check_live()
        self._session.plan.paused = True

    def resume(self) -> None:
        """Remove tokens again after `pause`."""
        self._check_live()
        self._session.plan.paused = False

    @contextmanager
    def override(self, **parameters: Any) -> Iterator[None]:
        """Use other parameters inside this context, in this thread or task only.

        Args:
            parameters: parameters of the method, or of each attached method that has them.

        Raises:
            ParameterError: no attached method has the parameter, a value is out of range, or a site would move.
        """
        self._check_live()
        unused = set(parameters)
        changed = []
        for method in self.methods:
            own = {name: value for name, value in parameters.items() if hasattr(method, name)}
            unused -= set(own)
            changed.append(dataclasses.replace(method, **own))
        if unused:
            raise ParameterError(f"no attached method has a parameter {', '.join(map(repr, sorted(unused)))}")
        with self._session.plan.override(tuple(changed)):
            yield

    def remove(self) -> None:
        """Take the method off the model, which is then as it was before; a second call does nothing."""
        self._session.detach()
        if not self._removed and self._session.statistics.idle_calls and not self._session.statistics.calls:
            logger.warning(
                "%s removed no token: none of the %d prefills held media",
                ", ".join(method.name for method in self.methods),
                self._session.statistics.idle_calls,
            )
        self._removed = True

    def _check_live(self) -> None:
        if self._removed:
            raise RemovedHandleError("this handle was removed from its model; call tokred.apply again")

    def __enter__(self) -> Handle:
        self._check_live()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@dataclass(frozen=True)
class Support:
    """Whether a model is supported; true in a condition if it is.

    Args:
        ok: whether `tokred.apply` accepts the model.
        reason: why not; empty if it does.
        nearest: model types that resemble the one that was given.
    """

    ok: bool
    reason: str = ""
    nearest: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


def supported(model: Any) -> Support:
    """Return whether tokred can act on a model or pipeline, and if not, why.

    Args:
        model: what would be given to `tokred.apply`.
    """
    try:
        _resolve(model)
    except UnsupportedModelError as error:
        model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
        return Support(False, str(error), tuple(nearest(model_type, adapters() | encoders())))
    return Support(True)


def apply(
    model: Any, method: str | Method | dict[str, Any] | Sequence[str | Method | dict[str, Any]], **parameters: Any
) -> Handle:
    """Attach one or more methods to a stock model, in place.

    Args:
        model: a transformers model, or a transformers pipeline that holds one; for methods inside image encoders an
            encoder of transformers, timm or open_clip, or a model that holds one.
        method: the name of a method, a `Method`, its dict form, or a list of these that act on different stages; or
            the path of a `.yaml` recipe that holds a dict form or a list of them.
        parameters: parameters of the method; only for a single one.

    Returns:
        The handle that shows what was done and removes it.

    Raises:
        UnsupportedModelError: the model is of no supported family, or wrapped.
        UnsupportedFamilyError: the family does not provide what a method observes.
        UnsupportedAttentionError: a layer's attention would not be exact.
        UnknownMethodError: no method has this name.
        ParameterError: a parameter is unknown or out of range.
        StageTakenError: two methods act on one stage, or the model already has a handle.
        AlreadyCompiledError: the model is compiled, so that hooks added now would never run.
    """
    if isinstance(method, str) and Path(method).suffix in (".yaml", ".yml"):
        method = _read_recipe(Path(method))
    given = [method] if isinstance(method, str | Method | dict) else list(method)
    if not given:
        raise ParameterError("the list of methods is empty")
    if len(given) > 1 and parameters:
        raise ParameterError(
            f"parameters {sorted(parameters)} with a list of {len(given)} methods: give them to each method"
        )
    methods = tuple(build_method(one, parameters) for one in given)
    target, family = _resolve(model)
    _check_not_compiled(target)
    first = family.blocks[0] if isinstance(family, Encoder) else family.base(target)
    for hook in first._forward_pre_hooks.values():
        if isinstance(hook, Hook):
            names = ", ".join(attached.name for attached in hook.owner.methods)
            raise StageTakenError(
                f"the model already has a handle ({names}); remove it first, or give all methods as one list"
            )
    session = EncoderSession(family, methods) if isinstance(family, Encoder) else Session(target, family, methods)
    session.attach()
    return Handle(session)


def _read_recipe(path: Path) -> dict[str, Any] | list[dict[str, Any]]:
    try:
        recipe = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ParameterError(f"recipe {str(path)!r} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ParameterError(f"recipe {str(path)!r} is no YAML: {error}") from error
    parts = recipe if isinstance(recipe, list) else [recipe]
    if not all(isinstance(part, dict) and "method" in part for part in parts):
        raise ParameterError(
            f"recipe {str(path)!r} holds neither a mapping with a 'method' nor a list of such mappings"
        )
    return recipe


def _resolve(model: Any) -> tuple[nn.Module, ModelAdapter | Encoder]:
    """Return the model to hook, and its family or the image encoder in it."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModelError(
            f"{type(model).__name__} copies its module in every call, hooks included; apply to its .module instead"
        )
    target = model
    if not isinstance(target, nn.Module) and isinstance(getattr(target, "model", None), nn.Module):
        target = target.model
    if hasattr(target, "get_base_model"):
        target = target.get_base_model()
    if not isinstance(target, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} is neither a model nor a pipeline that holds one")
    config = getattr(target, "config", None)
    model_type = getattr(config, "model_type", None)
    known = adapters()
    if model_type not in known:
        found = find_encoders(target, list(encoders().values()))
        if len(found) == 1:
            return target, found[0]
        if found:
            paths = ", ".join(repr(encoder.path) for encoder in found)
            raise UnsupportedModelError(
                f"{type(target).__name__} holds {len(found)} image encoders, with blocks at {paths}: give the part "
                "with one of them"
            )
        families = f"Known: {', '.join(known)}; image encoders of {', '.join(encoders())}"
        if not isinstance(model_type, str):
            raise UnsupportedModelError(
                f"{type(target).__name__} has no config with a model type and holds no image encoder. {families}"
            )
        close = nearest(model_type, known | encoders())
        hint = f" Nearest: {', '.join(close)}." if close else ""
        raise UnsupportedModelError(
            f"model type {model_type!r} ({type(target).__name__}) is not supported.{hint} {families}"
        )
    adapter = known[model_type]
    try:
        adapter.base(target).get_submodule(adapter.decoder)
    except AttributeError:
        raise UnsupportedModelError(
            f"{type(target).__name__} of model type {model_type!r} has no {adapter.decoder!r}: only the stock model "
            "with its language model is supported"
        ) from None
    return target, adapter


def _check_not_compiled(model: nn.Module) -> None:
    """Raise if hooks added now would never run."""
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise AlreadyCompiledError(
                f"{name or type(model).__name__} was compiled with module.compile(); call tokred.apply before compiling"
            )
    if _compiled_wrappers(model):
        # A wrapper that nobody holds any more is no obstacle.
        gc.collect()
        if _compiled_wrappers(model):
            raise AlreadyCompiledError(
                f"torch.compile already wraps this {type(model).__name__}; call tokred.apply on the model first and "
                "compile it afterwards"
            )


def _compiled_wrappers(model: nn.Module) -> bool:
    holders = (holder for holder in gc.get_referrers(model) if isinstance(holder, dict))
    return any(holder.get("_orig_mod") is model for holder in holders)
