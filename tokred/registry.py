"""Names of methods and model types, open to other packages through entry points."""

from __future__ import annotations

import dataclasses
import difflib
from importlib.metadata import entry_points
from typing import Any

from . import vision
from .adapters import BUILT_IN, ENCODERS, EncoderAdapter, ModelAdapter
from .errors import ParameterError, RegistrationError, UnknownMethodError
from .method import Method

_methods: dict[str, type[Method]] = {}
_adapters: dict[str, ModelAdapter] = {}
_encoders: dict[str, EncoderAdapter] = {}
_plugins_loaded = False


def register_method(method: type[Method]) -> type[Method]:
    """Make a method known under its `name`; also usable as a class decorator.

    Raises:
        RegistrationError: it is not a frozen dataclass derived from `Method`, or the name is taken.
    """
    if not (isinstance(method, type) and issubclass(method, Method) and dataclasses.is_dataclass(method)):
        raise RegistrationError(f"{method!r} is not a dataclass derived from tokred.Method")
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise RegistrationError(f"{method.__name__}.name={name!r} is not an identifier")
    if _methods.setdefault(name, method) is not method:
        raise RegistrationError(f"a method named {name!r} is registered already: {_methods[name].__qualname__}")
    return method


def register_adapter(adapter: ModelAdapter | EncoderAdapter) -> ModelAdapter | EncoderAdapter:
    """Make a model family known under its model type, or a family of image encoders under its name.

    Raises:
        RegistrationError: it is neither a `ModelAdapter` nor an `EncoderAdapter`, or the name is taken.
    """
    if isinstance(adapter, EncoderAdapter):
        if _encoders.setdefault(adapter.name, adapter) is not adapter:
            raise RegistrationError(f"image encoder {adapter.name!r} is registered already")
        return adapter
    if not isinstance(adapter, ModelAdapter):
        raise RegistrationError(f"{adapter!r} is neither a tokred.adapters.ModelAdapter nor an EncoderAdapter")
    if _adapters.setdefault(adapter.model_type, adapter) is not adapter:
        raise RegistrationError(f"model type {adapter.model_type!r} is registered already")
    return adapter


def _load_plugins() -> None:
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in entry_points(group="tokred.methods"):
        register_method(point.load())
    for point in entry_points(group="tokred.adapters"):
        register_adapter(point.load())


def methods() -> dict[str, type[Method]]:
    """Return all known methods by name."""
    _load_plugins()
    return dict(sorted(_methods.items()))


def adapters() -> dict[str, ModelAdapter]:
    """Return all known model families by model type."""
    _load_plugins()
    return dict(sorted(_adapters.items()))


def encoders() -> dict[str, EncoderAdapter]:
    """Return all known families of image encoders by name."""
    _load_plugins()
    return dict(sorted(_encoders.items()))


def nearest(word: str, known: dict[str, Any]) -> list[str]:
    """Return up to three known names that resemble `word`, best first."""
    return difflib.get_close_matches(word, known, n=3, cutoff=0.4)


def build_method(method: str | Method | dict[str, Any], parameters: dict[str, Any]) -> Method:
    """Return a method from its name, its dict form or itself.

    Raises:
        UnknownMethodError: no method has this name.
        ParameterError: a parameter is unknown or out of range, or given beside a finished method.
    """
    if isinstance(method, Method):
        return method.from_dict(method.to_dict() | parameters) if parameters else method
    if isinstance(method, dict):
        parameters = {key: value for key, value in method.items() if key != "method"} | parameters
        method = method.get("method", "")
    if not isinstance(method, str):
        raise ParameterError(f"{method!r} is neither the name of a method nor a tokred.Method")
    known = methods()
    if method not in known:
        close = nearest(method, known)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise UnknownMethodError(f"no method is named {method!r}{hint} Known: {', '.join(known)}")
    return known[method].from_parameters(parameters)


for _method in (getattr(vision, name) for name in vision.__all__):
    register_method(_method)
for _adapter in (*BUILT_IN, *ENCODERS):
    register_adapter(_adapter)
