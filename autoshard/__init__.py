"""autoshard: an auto-parallelizing compiler for PyTorch."""

from autoshard.api import compile
from autoshard.compiled import Compiled
from autoshard.errors import AutoshardError
from autoshard.parallelize import clip_grad_norm_, full_state_dict, load_full_state_dict, parallelize
from autoshard.verify_program import VerifyResult, verify
from autoshard.version import VERSION as __version__
from autoshard.workload import Workload

__all__ = [
    "AutoshardError",
    "Compiled",
    "VerifyResult",
    "Workload",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize",
    "verify",
]
