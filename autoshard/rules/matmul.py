"""Matrix products: rows, columns and batches are split, a split contraction gives partial sums."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction

EITHER = ((0,), (1,))


def _matmul(op: Operator) -> Rule:
    """matmul by the ranks of its operands, as torch defines it."""
    left, right = (len(operand.shape) for operand in op.operands)
    rows = "b... m k" if left > 1 else "k"
    columns = "b... k n" if right > 1 else "k"
    result = " ".join(["b..."] * (max(left, right) > 1) + ["m"] * (left > 1) + ["n"] * (right > 1))
    if left > 1 and right > 1:
        return Rule(f"{rows}, {columns} -> {result}", linear=EITHER)
    return Rule(f"{rows}, {columns} -> {result}", linear=EITHER)


def _einsum(op: Operator) -> Rule | None:
    """einsum's own equation is a rule: letters as they stand, `...` a shared run of dims."""
    equation = str(op.arguments["equation"]).replace(" ", "")
    if "->" not in equation or not equation.isascii():
        return None
    left, result = equation.split("->")
    sides = [*left.split(","), result]
    if any(len(set(side.replace(".", ""))) != len(side.replace(".", "")) for side in sides):
        return None  # a diagonal: the letter stands twice in one tensor

    def dims(side: str) -> str:
        spelt = side.replace("...", ".")
        return " ".join(
            "rest..." if letter == "." else letter.lower() + ("u" if letter.isupper() else "") for letter in spelt
        )

    count = len(op.operands)
    return Rule(
        f"{', '.join(dims(side) for side in sides[:-1])} -> {dims(result)}", linear=tuple((at,) for at in range(count))
    )


def _addmm(op: Operator) -> Rule:
    """input + a @ b: the input is an addend, broadcast to the result from its last dim."""
    result = ("b", "m", "n")[3 - len(op.results[0].shape) :]
    addend = " ".join(result[len(result) - len(op.operands[0].shape) :])
    batch = "b " if len(result) == 3 else ""
    return Rule(f"+{addend}, {batch}m k, {batch}k n -> {batch}m n", linear=((1,), (2,)))


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {
        "aten.linear.default": Rule("b... k, n k, +n -> b... n", linear=((0,),)),  # weights are never partial
        "aten.matmul.default": _matmul,
        "aten.mm.default": Rule("m k, k n -> m n", linear=EITHER),
        "aten.bmm.default": Rule("b m k, b k n -> b m n", linear=EITHER),
        "aten.mv.default": Rule("m k, k -> m", linear=EITHER),
        "aten.dot.default": Rule("k, k -> ", linear=EITHER),
        "aten.outer.default": Rule("m, n -> m n", linear=EITHER),
        "aten.addmm.default": _addmm,
        "aten.baddbmm.default": _addmm,
        "aten.einsum.default": _einsum,
        "aten.bilinear.default": Rule("b... i, b... j, o i j, +o -> b... o", linear=((0,), (1,)), nonempty=True),
    }
)
