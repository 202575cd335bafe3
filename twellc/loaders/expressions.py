"""Tell expressions over sizes, as torch.export writes them into an archive, from code.

Loading an archive, and tracing it again, evaluates them as Python. So each is parsed here, never evaluated, and taken
only if this grammar has all of it:

    expression  number | True | False | size | name of a size | function(expression, …) | arithmetic and comparisons
                | expression if expression else expression
    size        L['x'], L['x']['y'], L['x'][0], … followed by nothing, .size()[0], .stride()[0] or .storage_offset()

Its value is bounded, too, before anything computes it: exponents are small constants, and neither the bits of
the result nor the terms of its expansion grow beyond what sizes need.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass

# Much longer and deeper than what torch writes, and far from what exhausts a parser.
_LONGEST = 10_000
_DEEPEST = 500

# re.ASCII: Python reads other letters as their ASCII likes. Neither line breaks, comments nor double quotes: torch
# puts the text of a guard into a function, and into a string there.
_CHARACTERS = re.compile(r"[\w +\-*/%(),.<>=!&|^~\[\]']*", re.ASCII)
_SIZE_NAMES = re.compile(r"[suz]\d+|int_oo|oo|inf", re.ASCII)
_KEYS = re.compile(r"[\w.\-]+", re.ASCII)
_QUOTED = re.compile(r"[suz]\d+|-?\d+(\.\d*)?(e(?P<scale>[+-]?\d+))?", re.ASCII)
# SymPy's and torch's, as graphs write them, and Python's, as guards do.
_FUNCTIONS = re.compile(
    r"Mod|PythonMod|CleanDiv|FloorDiv|CeilDiv|Max|Min|IntTrueDiv|FloatTrueDiv|TruncToInt|FloorToInt|CeilToInt|RoundToInt"
    r"|ToFloat|PowByNatural|Pow|Where|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Abs|Identity|Add|Mul|Integer|Rational|Symbol|Equality"
    r"|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|Float|floor|ceiling"
    r"|min|max|abs|round|math\.(floor|ceil|trunc|sqrt)|torch\.(sym_float|_sym_sqrt)",
    re.ASCII,
)
_CONSTANTS = frozenset({"math.inf"})
_KEYWORDS = frozenset({"positive", "nonnegative", "integer", "real", "evaluate", "precision"})
_POWERS = frozenset({"Pow", "PowByNatural"})
_OF_TEXT = frozenset({"Symbol", "Integer", "Float"})  # they take a name or a number in quotes
_PRODUCTS = frozenset({"Mul", "Rational", "IntTrueDiv", "FloatTrueDiv"})
# Exponents, decimal exponents of a number, digits of a precision.
LARGEST_POWER, _LARGEST_SCALE, _FINEST = 16, 400, 100
_MOST_OPERANDS = 32
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor),
    *(ast.UAdd, ast.USub, ast.Not, ast.Invert, ast.And, ast.Or),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


@dataclass(frozen=True)
class Extent:
    """Upper bounds of what an expression comes to.

    Attributes:
        bits: Those of its value; of a fraction, of numerator and denominator together.
        terms: The terms of the sum that it expands to.
    """

    bits: int = 64
    terms: int = 1

    @property
    def bounded(self) -> bool:
        """Whether computing it takes no more than moments."""
        return self.bits <= 4096 and self.terms <= 1000


def extent_of(operator: str, operands: list[Extent], exponent: float | None = None) -> Extent:
    """Return the extent of an operation, by its name in Python or SymPy; `exponent` is that of a power."""
    bits, terms = [each.bits for each in operands], [each.terms for each in operands]
    if operator in ("pow", "lshift"):
        power = math.ceil(abs(exponent or 0))
        return Extent(bits[0] * max(power, 1), math.comb(terms[0] + power - 1, power))
    if operator in ("mul", "truediv"):
        return Extent(sum(bits), math.prod(terms))
    if operator in ("add", "sub"):
        return Extent(max(bits) + len(bits), sum(terms))
    return Extent(max(bits), max(terms))


def is_size_expression(text: str) -> bool:
    """Whether a text is nothing but arithmetic on sizes, which is computed in moments."""
    if len(text) > _LONGEST or not _CHARACTERS.fullmatch(text):
        return False
    try:
        pending = [(ast.parse(text.strip(), mode="eval").body, 0)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found: list[tuple[ast.expr, list[ast.expr]]] = []
    while pending:
        node, depth = pending.pop()
        parts = _operands(node)
        if parts is None or depth > _DEEPEST:
            return False
        found.append((node, parts))
        pending += [(part, depth + 1) for part in parts]
    extents: dict[int, Extent] = {}
    for node, parts in reversed(found):  # each behind its parts
        extent = extents[id(node)] = _extent(node, [extents[id(part)] for part in parts])
        if not extent.bounded:
            return False
    return True


def _extent(node: ast.expr, operands: list[Extent]) -> Extent:
    match node:
        case ast.Constant(value=int(value)):
            return Extent(value.bit_length())
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return extent_of("pow", operands, _number(exponent))
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return extent_of("mul", operands)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return extent_of("add", operands)
        case ast.Call(func=function, args=arguments) if operands:
            name = _dotted(function)
            if name in _POWERS:
                return extent_of("pow", operands, _number(arguments[1]))
            return extent_of("mul" if name in _PRODUCTS else "add" if name == "Add" else name, operands)
    return extent_of("", operands) if operands else Extent()


def _number(node: ast.expr) -> float | None:
    """Return a number as torch writes constants: 2, -1, 0.5, Integer(2), Rational(1, 2), Float('0.5', precision=53)."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
            value = _number(operand)
            return None if value is None else -value
        case ast.Constant(value=int() | float() as value):
            return float(value) if abs(value) <= LARGEST_POWER else None
        case ast.Constant(value=str(text)) if _QUOTED.fullmatch(text) and not text.startswith(("s", "u", "z")):
            return float(text)
        case ast.Call(func=ast.Name(id="Integer" | "Float"), args=[argument]):
            return _number(argument)
        case ast.Call(func=ast.Name(id="Rational"), args=[above, below]):
            numbers = _number(above), _number(below)
            return numbers[0] / numbers[1] if numbers[0] is not None and numbers[1] else None
    return None


def _is_small_power(exponent: ast.expr) -> bool:
    value = _number(exponent)
    return value is not None and abs(value) <= LARGEST_POWER


def _operands(node: ast.expr) -> list[ast.expr] | None:
    """Return the expressions that an expression is made of, or None if the grammar does not have it."""
    operands: list[ast.expr] | None = None
    match node:
        case ast.Constant(value=value):
            operands = [] if type(value) in (int, float, bool) else None
        case ast.Name(id=name):
            operands = [] if _SIZE_NAMES.fullmatch(name) else None
        case ast.UnaryOp(op=op, operand=operand):
            operands = [operand] if isinstance(op, _OPERATORS) else None
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            operands = [left] if _is_small_power(right) else None
        case ast.BinOp(left=left, op=op, right=right):
            operands = [left, right] if isinstance(op, _OPERATORS) else None
        case ast.BoolOp(op=op, values=values):
            operands = values if isinstance(op, _OPERATORS) else None
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [left, *comparators] if all(isinstance(op, _OPERATORS) for op in ops) else None
        case ast.IfExp(test=test, body=body, orelse=orelse):
            operands = [test, body, orelse]
        case ast.Call(func=function, args=arguments, keywords=keywords) if _FUNCTIONS.fullmatch(_dotted(function)):
            operands = _arguments(_dotted(function), arguments, keywords)
        case _:
            operands = [] if _is_size(node) or _dotted(node) in _CONSTANTS else None
    return operands


def _arguments(function: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> list[ast.expr] | None:
    """Return the expressions that a function is called with, or None if it is not called so in sizes."""
    if len(arguments) > _MOST_OPERANDS or not all(_is_option(keyword) for keyword in keywords):
        return None
    if function in _OF_TEXT:
        # A second argument is the precision of a Float.
        return [each for each in arguments if not _is_quoted(each)] if len(arguments) == 1 else None
    if function in _POWERS:
        return arguments[:1] if len(arguments) == 2 and _is_small_power(arguments[1]) else None
    if function == "round" and len(arguments) != 1:
        return None  # digits to round to may be as many as fit in no memory
    return arguments or None


def _is_option(keyword: ast.keyword) -> bool:
    """Whether it is a truth value such as positive=True, or the precision of a number."""
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
    if keyword.arg == "precision":
        return type(value) is int and 0 < value <= _FINEST
    return keyword.arg in _KEYWORDS and type(value) is bool


def _dotted(node: ast.expr) -> str:
    """Return `f` or `module.f` for a node of that form, else an empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""


def _is_quoted(node: ast.expr) -> bool:
    """Whether it is a name or a number in quotes, as in Symbol('s0') and Float('1.5')."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    found = _QUOTED.fullmatch(node.value)
    return found is not None and len(node.value) <= _LARGEST_SCALE and abs(int(found["scale"] or 0)) <= _LARGEST_SCALE


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=tensor, attr="size" | "stride"), args=[], keywords=[]),
            slice=ast.Constant(value=int()),
        ):
            return _is_input(tensor)
        case ast.Call(func=ast.Attribute(value=tensor, attr="storage_offset"), args=[], keywords=[]):
            return _is_input(tensor)
    return _is_input(node)


def _is_input(node: ast.expr) -> bool:
    """Whether it is L with one subscript at least, all of them plain names or numbers."""
    subscripts = 0
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        if not (type(key) is int or (isinstance(key, str) and _KEYS.fullmatch(key))):
            return False
        node, subscripts = node.value, subscripts + 1
    return subscripts > 0 and isinstance(node, ast.Name) and node.id == "L"
