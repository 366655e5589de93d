"""Every refusal a user can meet: what, where, why, what to do.

Inner code raises with a sentence that says what is wrong; the pass around it adds the place (module path, file and
line) and the way out. The command line prints the message and exits with `exit_code`; it never shows a traceback.
"""


class AutoshardError(Exception):
    """Base of all refusals.

    what: one sentence saying what is wrong.
    where: the user's place, "blocks.0.attn, models/gpt.py:41: `y = mask.cumsum(-1)`", or a file and field.
    help: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, help: str | None = None) -> None:
        self.what, self.where, self.help = what, where, help
        lines = [what]
        if where:
            lines.append(f"  in {where}")
        if help:
            lines.append(f"  {help}")
        super().__init__("\n".join(lines))


class BadInput(AutoshardError):
    """A workload, flag, file or value that cannot be used as given."""


class BadCluster(BadInput):
    """A cluster description with a missing, unknown or impossible field."""


class BadPlan(BadInput):
    """A plan that does not belong to this model, cluster or version."""


class UntraceableModel(BadInput):
    """Control flow on tensor values, or Python that torch.export cannot follow."""


class UnsupportedOperator(BadInput):
    """An operator that cannot even run redundantly (it mutates, aliases or draws random numbers)."""


class InfeasiblePlan(AutoshardError):
    """No plan fits: memory, pins or the cluster leave nothing to choose."""

    exit_code = 1


class NotEqual(AutoshardError):
    """The emitted program does not compute what the original does."""

    exit_code = 1


class ProgramFailed(AutoshardError):
    """A rank of an emitted program raised or died."""

    exit_code = 1
