"""Runs a function on several ranks of this machine: forked processes joined by gloo.

Forking a parent that has imported torch takes a tenth of a second for four ranks where a launcher takes seconds. The
price: what the parent holds at that moment (locks, threads) is copied in mid-air. So the parent's threads are set to
one before the fork, and each rank runs on one thread.
"""

import contextlib
import importlib
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import AutoshardError, BadInput

PRELOAD = ("torch.fx.experimental.symbolic_shapes",)  # autograd imports it at the first backward: a second a rank
_CONSEQUENCES = ("Connection closed", "Connection reset", "Broken pipe", "imed out")  # of another rank's end


class RanksFailed(RuntimeError):
    """A rank raised, died or was too late. `rank` is the first that failed by itself, `detail` its traceback."""

    def __init__(self, rank: int, detail: str) -> None:
        self.rank, self.detail = rank, detail
        super().__init__(f"rank {rank} failed:\n{detail.rstrip()}")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call `function(rank, world_size, *args)` in `world_size` processes; the results in the order of the ranks.

    Each rank runs inside an initialised gloo process group. function and args need not pickle, the results must (by
    torch's own pickling of tensors, their values are copied). preload: modules to import before forking, so that not
    every rank must ("torch._dynamo", which torch.utils.checkpoint imports when first called, takes seconds).
    Raises RanksFailed with the first traceback that is not a mere consequence of another rank's end; refusals
    (AutoshardError) are raised as themselves. After `timeout_s` seconds every rank that is left is killed.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise BadInput("this torch has no gloo backend", help="install a torch built with torch.distributed and gloo")
    for module in (*PRELOAD, *preload):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        results: Any = context.Queue()
        common = (world_size, folder, results, function, args, timeout_s)
        ranks = [context.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(world_size)]
        for process in ranks:
            process.start()
        torch.set_num_threads(threads)
        try:
            answers = _collect(ranks, results, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.is_alive() and process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                process.join()
        failures = {rank: value for rank, (ok, value) in answers.items() if not ok}
        if failures:
            _raise_first(failures)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world_size)]


def _collect(ranks: list[Any], results: Any, deadline: float) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    grace: float | None = None  # once one rank has failed, the others get a moment to say why, no more
    while len(answers) < len(ranks):
        try:
            rank, ok, value = results.get(timeout=0.1)
            answers[rank] = (ok, value)
            if not ok and grace is None:
                grace = time.monotonic() + 2.0
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if rank not in answers and process.exitcode is not None and results.empty():
                    answers[rank] = (False, (time.monotonic(), f"the process ended with code {process.exitcode}", None))
                    grace = grace or time.monotonic() + 2.0
            now = time.monotonic()
            if now > deadline or (grace is not None and now > grace):
                late = "no answer before the deadline" if now > deadline else "timed out after another rank failed"
                for rank in range(len(ranks)):
                    answers.setdefault(rank, (False, (now, late, None)))
    return answers


def _raise_first(failures: dict[int, tuple[float, str, AutoshardError | None]]) -> None:
    def order(item: tuple[int, tuple[float, str, Any]]) -> tuple[bool, float]:
        _, (when, text, _) = item
        return any(mark in text for mark in _CONSEQUENCES), when

    rank, (_, text, refusal) = min(failures.items(), key=order)
    if refusal is not None:
        raise refusal
    raise RanksFailed(rank, text)


def _rank_main(
    rank: int, world_size: int, folder: str, results: Any, function: Callable[..., Any], args: Any, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    code = 0
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        torch.save(function(rank, world_size, *args), Path(folder) / f"result{rank}")
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, None))
    except BaseException as error:  # every way to fail must reach the parent
        code, refusal = 1, error if isinstance(error, AutoshardError) else None
        results.put((rank, False, (time.monotonic(), traceback.format_exc(), refusal)))
    results.close()
    results.join_thread()
    os._exit(code)
