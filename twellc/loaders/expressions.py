"""Tell expressions over sizes, as torch.export writes them into an archive, from code.

Loading an archive, and tracing it again, evaluates them as Python. So each is parsed here, never evaluated, and taken
only if all of it stands in this grammar:

    expression  number | True | False | size | name of a size | function(expression, …) | arithmetic and comparisons
                | expression if expression else expression
    size        L['x'], L['x']['y'], L['x'][0], … followed by nothing, .size()[0], .stride()[0] or .storage_offset()
"""

from __future__ import annotations

import ast
import re

# Much longer and deeper than what torch writes, and far from what exhausts a parser.
_LONGEST = 10_000
_DEEPEST = 500

# re.ASCII: Python reads other letters as their ASCII likes. Neither line breaks, comments nor double quotes: torch
# puts the text of a guard into a function, and into a string there.
_CHARACTERS = re.compile(r"[\w +\-*/%(),.<>=!&|^~\[\]']*", re.ASCII)
_SIZE_NAMES = re.compile(r"[suz]\d+|int_oo|oo|inf", re.ASCII)
_KEYS = re.compile(r"[\w.\-]+", re.ASCII)
_QUOTED = re.compile(r"[suz]\d+|-?\d+(\.\d*)?(e[+-]?\d+)?", re.ASCII)
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
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor),
    *(ast.UAdd, ast.USub, ast.Not, ast.Invert, ast.And, ast.Or),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def is_size_expression(text: str) -> bool:
    """Whether a text is nothing but arithmetic on sizes."""
    if len(text) > _LONGEST or not _CHARACTERS.fullmatch(text):
        return False
    try:
        pending = [(ast.parse(text.strip(), mode="eval").body, 0)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while pending:
        node, depth = pending.pop()
        parts = _operands(node)
        if parts is None or depth > _DEEPEST:
            return False
        pending += [(part, depth + 1) for part in parts]
    return True


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
        case ast.BinOp(left=left, op=op, right=right):
            operands = [left, right] if isinstance(op, _OPERATORS) else None
        case ast.BoolOp(op=op, values=values):
            operands = values if isinstance(op, _OPERATORS) else None
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [left, *comparators] if all(isinstance(op, _OPERATORS) for op in ops) else None
        case ast.IfExp(test=test, body=body, orelse=orelse):
            operands = [test, body, orelse]
        case ast.Call(func=function, args=arguments, keywords=keywords) if _FUNCTIONS.fullmatch(_dotted(function)):
            named = all(keyword.arg in _KEYWORDS for keyword in keywords)
            values = [*arguments, *(keyword.value for keyword in keywords)]
            operands = [value for value in values if not _is_quoted(value)] if named else None
        case _:
            operands = [] if _is_size(node) or _dotted(node) in _CONSTANTS else None
    return operands


def _dotted(node: ast.expr) -> str:
    """Return `f` or `module.f` where that is what stands there, else an empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""


def _is_quoted(node: ast.expr) -> bool:
    """Whether it is a name or a number in quotes, as in Symbol('s0') and Float('1.5')."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_QUOTED.fullmatch(node.value))


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
