"""Adding hooks to one model, and taking them off again."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .errors import LiveHandleError
from .plan import Plan
from .report import Statistics


class Hook:
    """A function of ours on a model: its host time is counted, compilers stay out of it, and it cannot be copied.

    Args:
        function: called with what the hook is called with.
        owner: the plan that the hook serves.
        statistics: takes the host time.
    """

    def __init__(self, function: Callable[..., Any], owner: Plan, statistics: Statistics):
        self.owner = owner
        self._function = function
        self._statistics = statistics

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._statistics.add_time(time.perf_counter() - start)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise LiveHandleError("this model has a tokred handle and cannot be copied; call handle.remove() first")

    def __reduce__(self) -> NoReturn:
        raise LiveHandleError("this model has a tokred handle and cannot be pickled; call handle.remove() first")


class Attachments:
    """Everything that was added to a model, with the functions that undo it.

    Args:
        plan: the plan that the hooks serve.
        statistics: takes the host time of the hooks.
    """

    def __init__(self, plan: Plan, statistics: Statistics):
        self._plan = plan
        self._statistics = statistics
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Note how to undo something that was added."""
        self._undo.append(undo)

    def hook(self, function: Callable[..., Any]) -> Hook:
        """Return a function as a hook."""
        return Hook(function, self._plan, self._statistics)

    def before(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Call `function(module, args, kwargs)` before the forward of a module."""
        self.add(module.register_forward_pre_hook(self.hook(function), with_kwargs=True).remove)

    def after(self, module: nn.Module, function: Callable[..., Any], always: bool = False) -> None:
        """Call `function(module, args, kwargs, output)` after a module's forward, if `always` also after an error."""
        self.add(module.register_forward_hook(self.hook(function), with_kwargs=True, always_call=always).remove)

    def remove(self) -> None:
        """Undo everything, last first."""
        while self._undo:
            self._undo.pop()()


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positional and keyword arguments of a forward by name."""
    if not args:
        return kwargs
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
