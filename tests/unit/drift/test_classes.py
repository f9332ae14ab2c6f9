"""Constructors and methods of the provider's classes, and of the consumer's classes that inherit from them."""

from __future__ import annotations

import pytest
from unit.drift.test_drift import calls, drift

OPS = "lib/core/ops.py"


WRONG = ["unexpected-keyword"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("A(1)", []),
        ("A(1, x=1)", WRONG),
        ("A()", ["missing-argument"]),
        ("A(1, 2)", ["too-many-arguments"]),
        ("B(1, x=1)", WRONG),
        ("C(1, x=1)", WRONG),
        ("D(x=1)", WRONG),
        ("D()", []),
        ("class Mine(D): ...\nMine(x=1)", WRONG),
        ("class Own: ...\nOwn(x=1)", []),
        ("Loose(1, 2)", []),
        ("Ordered(a=1)", WRONG),
    ],
)
def test_constructors(call: str, expected: list[str]):
    module = """
        from .base import A
        from .base import A as Other
        class B(A): ...
        class C(B, Other): ...
        class D: ...
        class Loose:
            def __init__(*args): ...
        import functools
        @functools.total_ordering
        class Ordered:
            a: int
    """
    assert calls(call, module, base="class A:\n    def __init__(self, a): ...") == expected


@pytest.mark.parametrize(
    "module",
    [
        "from elsewhere import Base\nclass A(Base): ...",
        "class A(make()): ...",
        "import torch\nclass A(torch.nn.Module): ...",
        "from elsewhere import Base\nclass M(Base): ...\nclass A(M): ...",
        "class A(metaclass=Strange):\n    def __init__(self): ...",
        "class A:\n    def __new__(cls, x): ...\n    def __init__(self): ...",
        "class A:\n    def __init__(self): ...\n    __init__ = wrap(__init__)",
        "class A:\n    @wrap\n    def __init__(self): ...",
        "@wrap\nclass A:\n    def __init__(self): ...",
        "class A:\n    if a:\n        def __init__(self): ...\n    else:\n        def __init__(self, x): ...",
        "import enum\nclass A(enum.Enum):\n    def __init__(self): ...",
        "from typing import NamedTuple\nclass A(NamedTuple):\n    y: int",
        "class X: ...\nclass A(X, object, X): ...",
        "if a:\n    class B: ...\nelse:\n    class B:\n        def __init__(self, x): ...\nclass A(B): ...",
    ],
)
def test_constructors_that_cannot_be_known(module: str):
    assert calls("A(x=1)", module) == []


@pytest.mark.parametrize(
    "head",
    [
        "class A(abc.ABC, option=1):",
        "class A(abc.ABC):",
        "class A(metaclass=abc.ABCMeta):",
        "class A(Generic[T]):",
        "class A(elsewhere.Base):",
    ],
)
def test_constructors_that_are_known_all_the_same(head: str):
    module = f"import abc, elsewhere\nfrom typing import Generic\n{head}\n    def __init__(self): ..."
    assert calls("A(x=1)", module) == WRONG


@pytest.mark.parametrize(
    "base", ["object", "abc.ABC", "Generic[T]", "typing.Protocol", "typing_extensions.Protocol", "Plain[T]"]
)
def test_bases_without_a_constructor(base: str):
    module = "import abc, typing, typing_extensions\nfrom typing import Generic\nclass Plain(Generic[T]): ...\n"
    assert calls("A(x=1)", f"{module}class A({base}): ...") == WRONG


def test_constructors_that_all_refuse_are_reported_once():
    module = "class A:\n    if a:\n        def __init__(self): ...\n    else:\n        def __init__(self, y=1): ..."
    assert calls("A(x=1)", module) == WRONG


def test_super_belongs_to_the_class_around_it():
    module = "class A:\n    def go(self): ...\nclass B:\n    def go(self, x): ..."
    method = "        def go(self):\n            super().go(x=1)\n"
    code = f"if a:\n    class Mine(A):\n{method}else:\n    class Mine(B):\n{method}Mine().go()"
    assert calls(code, module) == WRONG
    assert calls("def go():\n    super().go(x=1)\ngo()", module) == []


def test_the_order_of_bases_is_pythons():
    module = """
        class Top:
            def __init__(self): ...
        class Left(Top): ...
        class Right(Top):
            def __init__(self, x): ...
        class A(Left, Right): ...
    """
    assert calls("A(x=1)", module) == []


DATACLASSES = """
    import dataclasses
    from dataclasses import KW_ONLY, InitVar, dataclass, field
    from typing import ClassVar
    from .base import Base

    @dataclass
    class Config(Base):
        b: int
        c: int = 1
        made: int = field(init=False)
        listed: list = field(default_factory=list)
        shared: ClassVar[int] = 2
        text: "ClassVar[int]" = 2
        start: InitVar[int] = 3
        plain = 4
        computed: int = make(init=False)
        given: int = field(default=1)
        spread: int = field(**options)
        Base.__doc__

    @dataclasses.dataclass(kw_only=True)
    class Keywords:
        a: int
        b: int = field(kw_only=False)

    @dataclass
    class Marked:
        a: int
        _: KW_ONLY
        b: int

    @dataclass(init=False)
    class Empty:
        a: int

    @dataclass
    class Own:
        a: int
        def __init__(self, z): ...

    class Below(Config): ...

    class Hand(Config):
        def __init__(self, y): ...
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Config(1, 2)", []),
        ("Config(a=1, b=2, c=3, listed=[], start=4)", []),
        ("Config(1, 2, 3, [], 4)", []),
        ("Config(1, 2, 3, [], 4, 5, 6, 7)", []),
        ("Config(1, 2, 3, [], 4, 5, 6, 7, 8)", ["too-many-arguments"]),
        ("Config(1, 2, made=1)", WRONG),
        ("Config(1, 2, shared=1)", WRONG),
        ("Config(1, 2, text=1)", WRONG),
        ("Config(1, 2, plain=1)", WRONG),
        ("Config(b=1)", ["missing-argument"]),
        ("Config(1, 2, gone=1)", WRONG),
        ("Keywords(1, a=1)", []),
        ("Keywords(1, 2)", ["missing-argument", "too-many-arguments"]),
        ("Marked(1, b=1)", []),
        ("Marked(1, 1)", ["missing-argument", "too-many-arguments"]),
        ("Empty()", []),
        ("Empty(a=1)", WRONG),
        ("Own(z=1)", []),
        ("Own(a=1)", ["missing-argument", "unexpected-keyword"]),
        ("Below(1, 2, gone=1)", WRONG),
        ("Below(1, 2, c=1)", []),
        ("Hand(1)", []),
        ("Hand(1, c=1)", WRONG),
    ],
)
def test_dataclasses(call: str, expected: list[str]):
    base = "from dataclasses import dataclass\n@dataclass\nclass Base:\n    a: int"
    assert sorted(calls(call, DATACLASSES, base=base)) == sorted(expected)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("import abc\nfrom dataclasses import dataclass\n@dataclass\nclass A(abc.ABC):\n    a: int", WRONG),
        ("from dataclasses import dataclass\n@dataclass\nclass A(object):\n    a: int", WRONG),
        ("from dataclasses import dataclass\nfrom elsewhere import B\n@dataclass\nclass A(B):\n    a: int", []),
        # Pydantic's ignore what they do not know.
        ("from pydantic.dataclasses import dataclass\n@dataclass\nclass A:\n    a: int", []),
        ("from elsewhere import dataclass\n@dataclass\nclass A:\n    a: int", []),
    ],
)
def test_dataclasses_by_their_base_and_decorator(module: str, expected: list[str]):
    assert calls("A(a=1, x=1)", module) == expected


CONSUMER_CONFIG = """
from dataclasses import dataclass
from lib.core.ops import Config

@dataclass
class Mine(Config):
    own: int
    depth: int = 12

Mine({})
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("width=1, own=1", []),
        ("width=1, own=1, gone=1", WRONG),
        ("own=1", ["missing-argument"]),
        # A field of its own that is left out is the consumer's mistake, whatever the provider's version.
        ("width=1", []),
    ],
)
def test_dataclasses_of_the_consumer_that_inherit_fields(arguments: str, expected: list[str]):
    config = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int\n    depth: int = 1"
    findings = drift(CONSUMER_CONFIG.format(arguments), {OPS: config})
    assert [finding.kind.value for finding in findings] == expected


METHODS = """
    class Base:
        def inherited(self, a): ...
    class A(Base):
        def plain(self, a): ...
        @staticmethod
        def static(a): ...
        @classmethod
        def made(cls, a): ...
        @property
        def value(self): ...
        @wrap
        def wrapped(self): ...
        attribute = 1
    import abc
    class B(abc.ABC, Base): ...
    from elsewhere import Mixin
    class C(Mixin, Base): ...
"""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("A.plain(self, 1)", []),
        ("A.plain(self, 1, 2)", ["too-many-arguments"]),
        ("A.static(1)", []),
        ("A.static(1, 2)", ["too-many-arguments"]),
        ("A.made(1)", []),
        ("A.made(1, x=1)", WRONG),
        ("A.inherited(self, 1, x=1)", WRONG),
        ("A.value(x=1)", []),
        ("A.wrapped(x=1)", []),
        ("A.attribute(x=1)", []),
        ("A.gone(x=1)", []),
        ("B.inherited(self, 1, x=1)", WRONG),
        ("C.inherited(self, 1, x=1)", []),
        ("A().plain(x=1)", []),
        ("a = A()\na.plain(x=1)", []),
    ],
)
def test_methods_of_a_class_by_name(call: str, expected: list[str]):
    assert calls(call, METHODS) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("super().__init__(1)", []),
        ("super().__init__(1, x=1)", WRONG),
        ("super(Mine, self).__init__(1, x=1)", WRONG),
        ("super(Other, self).__init__(1, x=1)", []),
        ("A.__init__(self, 1)", []),
        ("A.__init__(self, 1, x=1)", WRONG),
        ("super().go(1, x=1)", WRONG),
        ("super().go(1)", []),
        ("super().made(1, 2)", ["too-many-arguments"]),
        ("super().gone(x=1)", []),
        ("super().static(1)", []),
        ("super().static(1, 2)", ["too-many-arguments"]),
        ("self.go(x=1)", []),
    ],
)
def test_super(call: str, expected: list[str]):
    module = """
        class A:
            def __init__(self, a): ...
            def go(self, a): ...
            @classmethod
            def made(cls, a): ...
            @staticmethod
            def static(a): ...
    """
    code = f"class Mine(A):\n    def __init__(self, x, go):\n        {call}\nMine(1, 2)"
    assert calls(code, module) == expected


@pytest.mark.parametrize("bases", ["elsewhere.Base, A", "make(), A"])
def test_super_with_an_unknown_base_in_front(bases: str):
    code = f"import elsewhere\nclass Mine({bases}):\n    def __init__(self):\n        super().__init__(x=1)"
    assert calls(code, "class A:\n    def __init__(self): ...") == []


def test_super_of_a_dataclass_that_writes_its_constructor():
    module = "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int"
    code = "class Mine(A):\n    def __init__(self):\n        super().__init__(a=1, x=1)\nMine()"
    assert calls(code, module) == WRONG
    assert calls("A.__init__(self, a=1)", module) == []


@pytest.mark.parametrize(
    ("patch", "call"),
    [
        ("A.__init__ = other", "A(x=1)"),
        ("A.__init__ = other", "B(x=1)"),
        ("A.__init__ = other", "A.__init__(x=1)"),
        ("A.__new__ = other", "A(x=1)"),
        ("A.go = other", "A.go(x=1)"),
        ("A.go = other", "B.go(x=1)"),
        ("setattr(A, name, other)", "A.go(x=1)"),
        ("setattr(A, name, other)", "A(x=1)"),
    ],
)
def test_classes_that_the_consumer_patches_are_unknown(patch: str, call: str):
    module = "class A:\n    def __init__(self): ...\n    def go(): ...\nclass B(A): ..."
    assert calls(call, module) != []
    assert calls(f"{patch}\n{call}", module) == []


def test_a_class_that_is_its_own_base_ends():
    assert calls("A(x=1)", "from .base import A", base="from .ops import A as B\nclass A(B): ...") == []
