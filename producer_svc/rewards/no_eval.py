"""Keeps third-party verifiers from evaluating what a model wrote. For worker processes only: it changes libraries.

sympy's parser turns a text into Python code and evaluates it; some verifiers of reasoning-gym call eval() on the answer.
Both are given code that consists of literals, arithmetic and calls of sympy's own functions, and nothing else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from typing import Any

_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_PLAIN = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Load)
_CALLS = (ast.Call, ast.Name, ast.keyword, ast.Compare, ast.BoolOp)
_FUNCTIONS = ("sqrt", "cbrt", "root", "real_root")  # the rest of sympy's are classes


class Refused(ValueError):
    """Code that is more than an expression of the allowed kind."""


def plain_eval(text: str, *_: object) -> Any:
    """eval() for literals and arithmetic on them. Refused, or what eval raises, for everything else."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, (*_PLAIN, *_OPERATORS)):
            raise Refused(f"{type(node).__name__} is not evaluated")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})  # noqa: S307  # no names, calls or attributes


def check_sympy_code(code: str, names: Mapping[str, Any]) -> None:
    """Refused unless `code` has only numbers, strings, operators, and names and calls of sympy's classes in `names`."""
    from sympy import Basic

    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise Refused("a call of something without a name")
        if isinstance(node, ast.Name):
            value = names.get(node.id)
            allowed = isinstance(value, Basic) or (isinstance(value, type) and issubclass(value, Basic))
            if not allowed and node.id not in _FUNCTIONS:
                raise Refused(f"the name {node.id[:40]!r} is not evaluated")
        elif not isinstance(node, (*_PLAIN, *_CALLS, *_OPERATORS)):
            raise Refused(f"{type(node).__name__} is not evaluated")


def guard_sympy() -> None:
    """From now on sympy's parser refuses what `check_sympy_code` refuses (also where sympify() calls it)."""
    from sympy.parsing import sympy_parser

    stringify = sympy_parser.stringify_expr

    def checked(s: str, local_dict: dict[str, Any], global_dict: dict[str, Any], transformations: Any) -> str:
        code: str = stringify(s, local_dict, global_dict, transformations)
        check_sympy_code(code, {**global_dict, **local_dict})
        return code

    sympy_parser.stringify_expr = checked


def guard_module(made: object) -> None:
    """From now on the modules that define the class of `made` get `plain_eval` for eval, and no exec."""
    for kind in type(made).__mro__:
        if kind.__module__.startswith("reasoning_gym."):
            module = sys.modules[kind.__module__]
            vars(module).update(eval=plain_eval, exec=_no_exec)


def _no_exec(*_: object) -> None:
    raise Refused("exec() is not allowed here")
