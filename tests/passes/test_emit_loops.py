"""Repeated statements become loops only where the loop is those statements."""

import re

import pytest

from autoshard.passes.emit_body import Statement
from autoshard.passes.emit_loops import Loop, fold


def statements(text: str) -> list[Statement]:
    """A line each: "y = self.a(x)  # note"; lines that begin with # are the comments of the next."""
    found, comments = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            comments.append(line[2:])
            continue
        code, _, note = line.partition("  # ")
        left, equals, _ = code.partition(" = ")
        targets = tuple(re.findall(r"\w+", left)) if equals else ()
        found.append(Statement(code, tuple(comments), targets, targets, note))
        comments = []
    return found


def written(text: str, **sizes: int) -> str:
    lines = []
    for item in fold(statements(text), {f"self.{name}": size for name, size in sizes.items()}):
        if isinstance(item, Loop):
            lines += [item.header, *(f"    {line}" for statement in item.body for line in statement.lines())]
        else:
            lines += item.lines()
    return "\n".join(lines)


FOLDED = [
    (  # all of a list
        "x = self.layers[0](x)\nx = self.layers[1](x)\nx = self.layers[2](x)\nreturn_ = x",
        "for layer in self.layers:\n    x = layer(x)\nreturn_ = x",
    ),
    (  # several statements a round, with comments and notes
        "# sum\ny = self.layers[0](x)  # b d\nx = x + y\n# sum\ny = self.layers[1](x)  # b d\nx = x + y\n"
        "z = self.layers[2](x)",
        "for layer in self.layers[:2]:\n    # sum\n    y = layer(x)  # b d\n    x = x + y\nz = self.layers[2](x)",
    ),
    (  # the first round reads another name
        "x = self.layers[0](embedded, cos)\nx = self.layers[1](x, cos)\nx = self.layers[2](x, cos)",
        "x = embedded\nfor layer in self.layers:\n    x = layer(x, cos)",
    ),
    (  # not from the start
        "z = self.layers[0](x)\ny = z * 2\ny = self.layers[1](y)\ny = self.layers[2](y)",
        "z = self.layers[0](x)\ny = z * 2\nfor layer in self.layers[1:]:\n    y = layer(y)",
    ),
    (  # several calls of the same item
        "x = self.layers[0].norm(x) + self.layers[0](x)\nx = self.layers[1].norm(x) + self.layers[1](x)",
        "for layer in self.layers[:2]:\n    x = layer.norm(x) + layer(x)",
    ),
    (  # the loop's name may not be taken
        "x = self.layers[0](x, layer)\nx = self.layers[1](x, layer)\nx = self.layers[2](x, layer)",
        "for layer_ in self.layers:\n    x = layer_(x, layer)",
    ),
    (  # the layers of a later stage
        'x = self.layers["2"](x)\nx = self.layers["3"](x)\nx = self.layers["4"](x)',
        "for layer in self.layers.values():\n    x = layer(x)",
    ),
    (  # another argument in the first round, which no round hands on
        "x = self.layers[0](x, a)\nx = self.layers[1](x, b)\nx = self.layers[2](x, b)",
        "x = self.layers[0](x, a)\nfor layer in self.layers[1:]:\n    x = layer(x, b)",
    ),
    (  # a list below
        "x = self.model.blocks[0](x)\nx = self.model.blocks[1](x)",
        "for block in self.model.blocks[:2]:\n    x = block(x)",
    ),
]


@pytest.mark.parametrize(("text", "expected"), FOLDED)
def test_folded(text: str, expected: str) -> None:
    assert written(text, layers=3) == expected


KEPT = {
    "one round": "x = self.layers[0](x)",
    "another module": "x = self.layers[0](x)\nx = self.blocks[1](x)",
    "numbers that do not follow": "x = self.layers[0](x)\nx = self.layers[2](x)",
    "backwards": "x = self.layers[1](x)\nx = self.layers[0](x)",
    "another argument": "x = self.layers[0](x, a)\nx = self.layers[1](x, b)",
    "another result": "x = self.layers[0](x)\ny = self.layers[1](x)",
    "another result, read after": "a = self.layers[0](x)\nb = self.layers[1](a)",
    "another note": "x = self.layers[0](x)  # b d\nx = self.layers[1](x)  # b s",
    "another comment": "# one\nx = self.layers[0](x)\n# two\nx = self.layers[1](x)",
    "another number": "x = self.layers[0](x) * 2\nx = self.layers[1](x) * 3",
    "another operator": "x = x + self.layers[0](x)\nx = x - self.layers[1](x)",
    "two names that change": "x = self.layers[0](a, b)\nx = self.layers[1](x, x)",
    "a name that is read under both": "x = self.layers[0](a, x)\nx = self.layers[1](x, x)",
    "an update before the name is given": (
        "self.layers[0].seen.copy_(x)\nx = self.layers[0](a)\nself.layers[1].seen.copy_(x)\nx = self.layers[1](x)"
    ),
    "a statement between": "x = self.layers[0](x)\ny = x\nx = self.layers[1](x)",
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_kept(text: str) -> None:
    assert written(text, layers=3) == text


def run(text: str) -> object:
    """What the names hold after a text whose layers note their number and arguments."""
    layers = [lambda *given, number=number: (number, *given) for number in range(4)]
    known = {"self": type("Module", (), {"layers": layers}), "a": "a", "b": "b", "x": "x", "y": "y", "z": "z"}
    exec(text, known)
    return {name: known[name] for name in "xyz"}


TARGETS, ARGUMENTS = ("x", "y"), ("x", "y", "a")


def alike_but_for_one_name(seed: int) -> str:
    """Four rounds of two statements; the first one reads, or gives, another name somewhere."""
    state = seed
    rounds = [["{t0} = self.layers[{i}]({a0}, {a1})", "{t1} = self.layers[{i}]({a2}, {t0})"] for _ in range(4)]
    names = []
    for place in ("t0", "t1", "a0", "a1", "a2"):
        choices = TARGETS if place.startswith("t") else ARGUMENTS
        names.append((place, choices[state % len(choices)]))
        state //= len(choices)
    lines = []
    for number, templates in enumerate(rounds):
        given = dict(names)
        if number == 0:  # as after an embedding: the first round reads or gives something else
            place = ("a0", "a1", "a2", "t1")[seed % 4]
            given[place] = "z" if place == "t1" else "b"
        lines += [template.format(i=number, **given) for template in templates]
    return "\n".join(lines)


def test_a_fold_holds_the_same_values() -> None:
    for seed in range(150):
        text = alike_but_for_one_name(seed)
        folded = written(text, layers=4)
        assert run(folded) == run(text), f"{text}\n\n{folded}"
