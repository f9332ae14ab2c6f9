"""Stubs of extension modules that are not compiled: every name is there, and no code.

Runs in the environment under test (Python 3.10 and later), so it imports nothing that is not Python's own.
"""

import importlib.machinery
import sys
import types

# What the users of an extension module do with its names where nothing of it is called.
NUMBER_METHODS = ("__lt__", "__le__", "__gt__", "__ge__", "__int__", "__index__", "__iter__", "__len__")


class NotCompiledError(RuntimeError):
    """An import asked a stub for what only compiled code has."""


class Stub(type):
    """A name of a stub: a class to derive from and to annotate with, an enumeration like pybind11's, a function."""

    @property
    def __members__(cls):
        # Transformer Engine 2.17 compares them with those that it named before.
        return dict(cls.stub_members)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        member = object.__new__(cls)
        member.name, member.value = name, len(cls.stub_members)
        cls.stub_members[name] = member
        setattr(cls, name, member)
        return member

    def __call__(cls, *arguments, **named):  # noqa: ARG002 - as any function
        raise NotCompiledError(f"{cls.__module__}.{cls.__qualname__} is called")


def refuse_number(cls, *other):  # noqa: ARG001 - as Python calls it
    raise NotCompiledError(f"{cls.__module__}.{cls.__qualname__} is used as a number, or a list")


for method in NUMBER_METHODS:
    setattr(Stub, method, refuse_number)


class StubModule(types.ModuleType):
    """A module in which every name is a stub."""

    def __getattr__(self, name):
        if name == "__all__":
            # `from ext import *`, of which others import names again: the importing module asks here (PEP 562).
            sys._getframe(1).f_globals.setdefault("__getattr__", lambda name: getattr(self, name))
            return [name for name in self.__dict__ if not name.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        content = {"__module__": self.__name__, "stub_members": {}, "__int__": value_of, "__index__": value_of}
        setattr(self, name, Stub(name, (), content))
        return self.__dict__[name]


def value_of(member):
    return member.value


def install(names):
    """From now on these extension modules are stubs; their files are only looked for."""
    loader = importlib.machinery.ExtensionFileLoader
    create, execute = loader.create_module, loader.exec_module

    def create_module(self, spec):
        return StubModule(spec.name) if spec.name in names else create(self, spec)

    def exec_module(self, module):
        if not isinstance(module, StubModule):
            execute(self, module)

    loader.create_module, loader.exec_module = create_module, exec_module


def needs_code(error):
    """What an error shows to be needed of a stub's compiled code; empty for other errors."""
    while error is not None:
        if isinstance(error, NotCompiledError):
            return str(error)
        asked = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
        if isinstance(asked, (Stub, StubModule)) or isinstance(type(asked), Stub):
            return str(error)
        error = error.__cause__
    return ""
