"""How evaluations and benchmarks measure: the process environment, clocks around modules, intervals."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import itertools
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tokred.errors import ParameterError

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    "MALLOC_TOP_PAD_": "1000000000",
}
"""glibc settings that keep large tensors on the heap: otherwise every operation pays for fresh pages."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESAMPLES = 2000
Z95 = 1.959963984540054


def allocator_is_set() -> bool:
    """Say whether this process was started with the allocator settings of `ALLOCATOR`."""
    return all(os.environ.get(name) == value for name, value in ALLOCATOR.items())


def restart_with_allocator() -> None:
    """Replace this process by one with the allocator settings, unless it has them already; glibc reads them at start.

    Elsewhere than on Linux nothing happens.
    """
    if sys.platform != "linux" or allocator_is_set():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ALLOCATOR)


def allocator_note() -> str:
    """Return one line that says which allocator settings are in force."""
    if allocator_is_set():
        return "allocator: " + " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    return "allocator: as the system sets it, so large tensors cost page faults and times are not comparable"


def pin_threads(threads: int | None = None) -> int:
    """Fix the number of compute threads.

    Args:
        threads: number of threads, at least 1; None for one per core that this process may use.

    Returns:
        The number of threads.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or cores)
    return torch.get_num_threads()


def machine() -> dict[str, Any]:
    """Return what a reader needs to place the times: hardware, load, versions and the command line."""
    versions = {"torch": torch.__version__}
    for package in ("tokred", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "allocator": {name: os.environ.get(name) for name in ALLOCATOR},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def twin(model: nn.Module) -> nn.Module:
    """Return a second model that shares every parameter and buffer with the first.

    Each measured arm gets its own modules, so that the stock arm never carries a hook of another one.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return a device and a dtype by their names.

    Args:
        device: torch device.
        dtype: a key of `DTYPES`.

    Raises:
        ParameterError: there is no such dtype, or the device cannot be used.
    """
    if dtype not in DTYPES:
        raise ParameterError(f"unknown dtype {dtype!r}; there are {', '.join(DTYPES)}")
    try:
        return torch.empty(0, device=device).device, DTYPES[dtype]
    except (RuntimeError, AssertionError) as error:
        raise ParameterError(f"device {device!r} is not usable: {error}") from error


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """Return the seconds on a clock once everything that was sent to the device so far is done."""
    synchronize(device)
    return time.perf_counter()


class Clock:
    """Adds up the seconds spent in watched modules during one call.

    The hooks must be added after those of the code under test, since their place among them decides what is counted.

    Args:
        device: where the modules run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._handles: list[Any] = []

    def watch(self, module: nn.Module, key: str, *, with_hooks: bool) -> None:
        """Time a module under a key.

        Args:
            module: the module.
            key: where its seconds are added up.
            with_hooks: count the other hooks of the module too, or its own forward alone.
        """
        starts: list[float] = []

        def enter(module: nn.Module, args: Any) -> None:
            starts.append(now(self.device))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.seconds[key] += now(self.device) - starts.pop()

        self._handles.append(module.register_forward_pre_hook(enter, prepend=with_hooks))
        self._handles.append(module.register_forward_hook(leave, prepend=not with_hooks))

    def take(self) -> dict[str, float]:
        """Return the seconds by key since the last call, and start again at zero."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def close(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def interleave(arms: dict[Any, Callable[[], Any]], rounds: int, seed: int, tick: Callable[[], Any]) -> dict[Any, list]:
    """Run every arm once a round, in a new random order each round.

    Args:
        arms: what to call, by name.
        rounds: number of rounds, at least 1.
        seed: seed of the orders.
        tick: called after each arm, for a progress bar.

    Returns:
        What each arm returned, one entry a round.
    """
    order = np.random.default_rng(seed)
    names = list(arms)
    results: dict[Any, list] = {name: [] for name in names}
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(rounds):
            for place in order.permutation(len(names)):
                results[names[place]].append(arms[names[place]]())
                # with the rest frozen this is quick, and no collection falls into the next measurement
                gc.collect()
                tick()
    finally:
        gc.enable()
        gc.unfreeze()
    return results


def bootstrap(
    values: Sequence[float], statistic: Callable[..., Any] = np.median, seed: int = 0
) -> tuple[float, float, float]:
    """Return a statistic of a sample with its 95 % percentile bootstrap interval.

    Args:
        values: the sample, at least one value.
        statistic: reduces an array along `axis`.
        seed: seed of the resampling.

    Returns:
        The statistic, and the lower and upper end of the interval.
    """
    sample = np.asarray(values, dtype=float)
    places = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.percentile(statistic(sample[places], axis=1), [2.5, 97.5])
    return float(statistic(sample, axis=0)), float(low), float(high)


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion.

    Args:
        correct: number of successes, 0 to `total`.
        total: number of trials, at least 1.
    """
    share = correct / total
    centre = share + Z95**2 / (2 * total)
    spread = Z95 * math.sqrt(share * (1 - share) / total + Z95**2 / (4 * total**2))
    scale = 1 + Z95**2 / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def parse_names(text: str) -> list[str]:
    """Split a comma-separated list, dropping blanks and repetitions."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_numbers(text: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Split a comma-separated list of numbers.

    Raises:
        ValueError: an entry is no number.
    """
    return [kind(part) for part in parse_names(text)]


def median(values: Iterable[float]) -> float:
    """Return the median as a Python float."""
    return float(np.median(list(values)))
