"""`torch.export` of a workload: example inputs, dynamic dims, reading the loss, and errors a user can act on."""

import contextlib
import dataclasses
import inspect
import io
import linecache
import logging
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError, BadInput, UntraceableModel
from autoshard.passes.trace_frames import short_path
from autoshard.workload import Workload

PREFIX = "model"
"""Path of the user's model inside the harness."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Signature:
    """The leaves of (args, kwargs): `tensors` are example inputs, `leaves` says where each leaf comes from."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]


def read_signature(workload: Workload) -> Signature:
    """Flatten a workload's arguments; name each tensor after forward's argument.

    `leaves` holds the tensor's name, or ("value", v). Tensors are put where the parameters are (a model on the meta
    device gets meta inputs), and no two share storage, so that export keeps them apart.
    """
    given = (tuple(workload.args), dict(workload.kwargs))
    paths, spec = pytree.tree_flatten_with_path(given)
    parameter = next(workload.model.parameters(), None)
    leaves: list[Any] = []
    names: list[str] = []
    tensors: list[Tensor] = []
    storages: set[int] = set()
    for path, leaf in paths:
        if not isinstance(leaf, Tensor):
            leaves.append(("value", leaf))
            continue
        name = _unique(_argument_name(workload.model, path), names)
        tensor = leaf.detach()
        if parameter is not None and parameter.device != tensor.device:
            tensor = torch.zeros_like(tensor, device=parameter.device)
        storage = tensor.untyped_storage()._cdata
        if storage in storages:
            tensor = torch.zeros_like(tensor)
        storages.add(tensor.untyped_storage()._cdata)
        names.append(name)
        leaves.append(name)
        tensors.append(tensor)
    return Signature(spec, tuple(leaves), tuple(names), tuple(tensors))


def _argument_name(model: nn.Module, path: Sequence[Any]) -> str:
    keys = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", None))) for key in path]
    head: Any = keys[1]
    rest = keys[2:]
    if keys[0] == 0:
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        fixed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        extra = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        head = fixed[head] if head < len(fixed) else f"{extra}_{head - len(fixed)}"
    return re.sub(r"\W", "_", "_".join(str(key) for key in (head, *rest)))


def _unique(name: str, taken: Sequence[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        candidate, count = f"{name}_{count}", count + 1
    return candidate


def check_workload(workload: Workload) -> None:
    """Refuse what is not a workload of a module and a batch, or does not fit forward's signature."""
    if not isinstance(workload, Workload) or not isinstance(workload.model, nn.Module):
        kind = type(getattr(workload, "model", workload)).__name__
        raise BadInput(
            f"the workload's model is a {kind}", help="return autoshard.Workload(model, args, kwargs) with an nn.Module"
        )
    try:
        inspect.signature(workload.model.forward).bind(*workload.args, **workload.kwargs)
    except TypeError as error:
        raise BadInput(
            f"the workload's arguments do not fit {type(workload.model).__name__}.forward: {error}",
            where=workload.name or None,
            help="Workload(model, args, kwargs) holds the arguments of one forward",
        ) from error
    except ValueError:  # a forward without a readable signature
        pass
    leaves = pytree.tree_leaves((workload.args, dict(workload.kwargs)))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise BadInput("the workload passes no tensor to forward", where=workload.name or None)


@dataclass
class Results:
    """What forward's result was made of: one item of `outputs` a leaf of `spec`.

    An item is a position in the harness's returned list, None, or ("value", v). dropped: what was no tensor or value.
    """

    outputs: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None
    dropped: tuple[str, ...] = ()


class Harness(nn.Module):
    """Calls the model on a flat list of tensors and returns [loss, *tensors of forward's result]; fills `results`.

    (Export puts back attributes that a forward assigns, so the results are an object of their own.)
    """

    def __init__(self, workload: Workload, signature: Signature) -> None:
        super().__init__()
        self.model = workload.model
        self.workload = workload
        self.signature = signature
        self.results = Results()

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        _one_batch(tensors, self.signature.tensors)
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, str) else leaf[1] for leaf in self.signature.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.spec)
        result = self.model(*args, **kwargs)
        if self.workload.loss is not None:
            loss = self.workload.loss(result)
            result = loss
        else:
            result = plain(result)
            loss = find_loss(result)
        check_loss(loss, self.workload)
        return [loss.reshape(()) if loss.dim() else loss, *self._record(result)]

    def _record(self, result: Any) -> list[Tensor]:
        paths, self.results.spec = pytree.tree_flatten_with_path(result)
        tensors: list[Tensor] = []
        outputs: list[Any] = []
        dropped: list[str] = []
        for path, leaf in paths:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                outputs.append(len(tensors))
            elif isinstance(leaf, torch.SymInt):
                outputs.append(("value", leaf.node.hint))
            elif leaf is None:
                outputs.append(None)
            elif isinstance(leaf, (bool, int, float, complex, str, bytes)):
                outputs.append(("value", leaf))
            else:
                dropped.append(f"{pytree.keystr(path)} ({type(leaf).__name__})")
                outputs.append(None)
        self.results.outputs, self.results.dropped = tuple(outputs), tuple(dropped)
        return tensors


def batch_of(tensors: Sequence[Tensor]) -> int:
    """How many samples a batch has: the size that most inputs have as dim 0; 0 without inputs."""
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.dim())
    return sizes.most_common(1)[0][0] if sizes else 0


def _one_batch(tensors: Sequence[Tensor], examples: Sequence[Tensor]) -> None:
    """Every dim that counts samples is of one size, one symbol: left to itself, export learns it only where it must.

    A mask that is looked up by the numbers of the samples of another input, say, would have a batch of its own.
    """
    batch = batch_of(examples)
    first: Any = None
    for tensor, example in zip(tensors, examples, strict=True):
        if example.dim() and example.shape[0] == batch:
            first = tensor.shape[0] if first is None else first
            torch._check(tensor.shape[0] == first)


def plain(value: Any) -> Any:
    """Forward's result with dataclasses and mappings (a public library's ModelOutput too) as plain dicts."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(plain(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(plain(item) for item in value)
    return value


def find_loss(result: Any) -> Any:
    """The loss in forward's result: itself, its "loss", or its first element."""
    if isinstance(result, Mapping):
        return result.get("loss")
    if isinstance(result, (tuple, list)):
        return getattr(result, "loss", result[0] if result else None)
    return result


def check_loss(loss: Any, workload: Workload) -> None:
    """Refuse anything but one floating-point number with a gradient."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.dtype.is_floating_point:
        return
    source = "Workload.loss" if workload.loss is not None else f"{type(workload.model).__name__}.forward"
    if isinstance(loss, Tensor):
        shape, dtype = [_hint(size) for size in loss.shape], str(loss.dtype).removeprefix("torch.")
        found = f"a tensor of shape {shape} and type {dtype}"
    else:
        found = "nothing that is a loss" if loss is None else f"a {type(loss).__name__}"
    raise BadInput(
        f"{source} returns {found}; a scalar loss is needed",
        where=workload.name or None,
        help="return the loss, a mapping or dataclass with 'loss', or a tuple with the loss first; "
        "or give Workload(loss=...)",
    )


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


DynamicDims = tuple[dict[int, Any], ...]


def dynamic_choices(tensors: Sequence[Tensor]) -> Iterator[tuple[str, DynamicDims]]:
    """What to let vary, most first: (what is fixed, dims per tensor). Sizes of 0 and 1 are always fixed by export."""

    def dims(tensor: Tensor, most: int) -> dict[int, Any]:
        return {dim: Dim.AUTO for dim in range(min(most, tensor.dim())) if tensor.shape[dim] > 1}

    yield "", tuple(dims(tensor, 1 if tensor.dtype.is_floating_point else 2) for tensor in tensors)
    yield "sequence", tuple(dims(tensor, 1) for tensor in tensors)
    yield "batch and sequence", tuple({} for _ in tensors)


@dataclass(frozen=True)
class Exported:
    """A decomposed exported program, with what had to be fixed."""

    program: ExportedProgram
    results: Results
    dynamic: bool
    notes: tuple[str, ...]


def export(workload: Workload, signature: Signature, *, dynamic: bool) -> Exported:
    """Export and decompose. Falls back from dynamic sizes to fixed ones; raises UntraceableModel when nothing works."""
    choices = list(dynamic_choices(signature.tensors))
    if not dynamic:
        choices = choices[-1:]
    failure: Exception | None = None
    for fixed, dims in choices:
        if failure is not None and _is_data_dependent(failure) and fixed != choices[-1][0]:
            continue
        harness = Harness(workload, signature)
        try:
            with quiet():
                program = torch.export.export(
                    harness, (list(signature.tensors),), dynamic_shapes=(list(dims),), strict=False
                )
                _keep_no_grad(program)
                program = program.run_decompositions({})
        except AutoshardError:
            raise
        except Exception as error:  # anything can come out of tracing the user's Python
            failure = error
            continue
        notes = [f"{fixed} sizes are fixed: the model does not trace with varying ones"] if fixed and dynamic else []
        notes += [f"forward's result {name} is no tensor and was left out" for name in harness.results.dropped]
        return Exported(program, harness.results, dynamic, tuple(notes))
    assert failure is not None
    raise explain(failure, workload) from failure


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what torch prints and logs while tracing; failures are told by the exception."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _keep_no_grad(program: ExportedProgram) -> None:
    """Detach what leaves a `torch.no_grad()` region: decomposing inlines the region and would forget it."""
    graph = program.graph
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not wrap or node.args[0]:
            continue
        for result in list(node.users):
            value = result.meta.get("val")
            if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
                continue
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(
                detached, delete_user_cb=lambda user, new=detached: user is not new and user.op != "output"
            )
    program.graph_module.recompile()


def _is_data_dependent(error: BaseException) -> bool:
    text = str(error)
    return "data-dependent" in text or "DataDependent" in type(error).__name__


def explain(error: Exception, workload: Workload) -> UntraceableModel:
    """What went wrong in the user's words: their line, and what to write instead."""
    where = user_place(error, workload.model)
    if _is_data_dependent(error):
        return UntraceableModel(
            "the forward decides by the values of a tensor, which differ from batch to batch, so it cannot be traced",
            where=where,
            help="choose with torch.where, or keep the number a tensor (no .item(), int(), bool() or `if` on it); "
            "a part that must stay Python can be one operator, by torch.library.custom_op, and then runs unsharded",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return UntraceableModel(
        f"torch.export cannot trace the model: {type(error).__name__}: {text}",
        where=where,
        help="write that line with tensor operations whose shapes follow from the inputs' shapes (torch.where instead "
        "of branches on values); torch.export.draft_export(model, args, kwargs) shows what it would have to assume",
    )


def user_place(error: BaseException, model: nn.Module) -> str | None:
    """The innermost line outside torch and this package where `error` arose: "blocks.0, models/gpt.py:41: `code`"."""
    paths = {id(module): path for path, module in model.named_modules()}
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith((_TORCH, _OURS, "<")):
            continue
        path = paths.get(id(frame.f_locals.get("self")))
        owner = "" if path is None else f"{path or 'the model'}, "
        place = f"{owner}{short_path(file)}:{line}: `{linecache.getline(file, line).strip()}`"
    return place
