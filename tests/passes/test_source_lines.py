"""What a line of the user's source says."""

from pathlib import Path

import pytest

from autoshard.passes.source_lines import SourceLine, line_at, source_line
from autoshard.program import Frame

TEXT = """\
class Model:
    def forward(self, x, *, mask=None):
        a = self.up(
            x,
            mask,
        )
        a += self.bias
        q, (k, v), self.last = self.qkv(a), 1, 2
        out: Tensor = q
        self.cache = out
        q[0] = a
        if mask is None:
            b = q
        elif len(
            a
        ):
            b = k
        else:
            b = v
        for layer in self.layers:
            b = layer(b)
        with torch.no_grad():
            c = b

        def inner(y):
            return y @ b

        first = second = c
        try:
            c = inner(first)
        finally:
            d = second
        return (
            d
            + c
        )

    @classmethod
    def make(cls, width, /, depth): return cls(width)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(TEXT)
    return str(path)


def number(text: str) -> int:
    return next(at for at, line in enumerate(TEXT.splitlines(), 1) if line.strip().startswith(text))


PARAMETERS = ("x", "mask")


@pytest.mark.parametrize(
    ("text", "targets", "loads"),
    [
        ("a = self.up(", ("a",), ("self", "x", "mask")),
        ("a += ", ("a",), ("a", "self")),  # what is added to is read
        ("q, (k, v)", ("q", "", ""), ("self", "self", "a")),  # only plain names count
        ("out: ", ("out",), ("Tensor", "q")),
        ("self.cache", (), ("self", "out")),
        ("q[0]", (), ("q", "a")),
        ("b = q", ("b",), ("q",)),
        ("b = k", ("b",), ("k",)),
        ("b = v", ("b",), ("v",)),
        ("b = layer(b)", ("b",), ("layer", "b")),
        ("c = b", ("c",), ("b",)),
        ("first = second", ("first",), ("c",)),
        ("c = inner", ("c",), ("inner", "first")),
        ("d = second", ("d",), ("second",)),
    ],
)
def test_statements(file: str, text: str, targets: tuple[str, ...], loads: tuple[str, ...]) -> None:
    found = line_at(file, number(text))
    assert (found.targets, found.loads, found.parameters) == (targets, loads, PARAMETERS)
    assert found.first_line == number(text) and not found.returns


def test_every_line_of_a_statement_is_the_statement(file: str) -> None:
    first = number("a = self.up(")
    assert {line_at(file, line) for line in range(first, first + 4)} == {line_at(file, first)}
    start = number("return (")
    assert line_at(file, start + 2) == line_at(file, start) == SourceLine((), ("d", "c"), PARAMETERS, True, start)


def test_a_function_inside_is_read_with_its_own_parameters(file: str) -> None:
    found = line_at(file, number("return y @ b"))
    assert (found.parameters, found.returns, found.loads) == (("y",), True, ("y", "b"))
    assert line_at(file, number("def make(")).parameters == ("width", "depth")


def test_headers_of_blocks_say_only_what_they_read_and_assign_nothing(file: str) -> None:
    for text in ("if mask", "for layer in", "with torch"):
        assert line_at(file, number(text)).targets == ()


def test_what_cannot_be_read_says_nothing(file: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n    x = 1\n")
    for name, line in ((str(broken), 2), (f"{tmp_path}/none.py", 1), ("<string>", 1), ("", 3), (file, 9999), (file, 1)):
        assert line_at(name, line) == SourceLine()
    assert source_line(Frame("", 0, "Model", file, 0)) == SourceLine()
    assert source_line(Frame("", 0, "Model", file, number("a += "))).targets == ("a",)
