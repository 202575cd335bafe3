"""Which texts count as expressions over sizes, and so need no --trust-model in an archive."""

import importlib

import pytest
import sympy

from twellc.loaders.expressions import is_size_expression

SIZES = [
    "s0", "-s0 + 2*u1", "2*(s77//2) + Mod(s0, 3)", "Max(1, Min(s0, 64)) <= 2**5", "And(Ne(s0, 1), Eq(Mod(s1, 2), 0))",
    "Symbol('s0', positive=True, integer=True)", "Float('1.5', precision=53)", "IntTrueDiv(s0, 2) + 1.5e3",
    "min(16*L['past'][0].size()[2], 8*L['past'][0].size()[2]) == 8*L['past'][0].size()[2]",
    "max(1, L['x']['y-z.0'].stride()[0]) >= 2 and not (L['x'].storage_offset() % 2)",
    "math.floor(1.5*L['x'].size()[0]) != 3 or L['n'] < math.inf", "(s0 if s0 > 1 else 2)",
    "((-1)*L['x'].size()[1]) + ((-1)*L['past'][0].size()[2]) > -32", "s0**-1 * (s1 + 1)**16", "PowByNatural(s0, 2)",
    "Pow(Symbol('s0', positive=True, integer=True), Rational(1, 2))", "Mul(Integer(3), Pow(Symbol('s0'), Integer(-1)))",
    "Float('1.5e-05', precision=53)", "Max(1, 2)**Float('0.5', precision=53)",
]  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_arithmetic_on_sizes(text: str) -> None:
    assert is_size_expression(text)


CODE = [
    "",
    "s0 +",
    "s0; s1",
    "x",
    "L",
    "L['x'].shape[0]",
    "L['x'].size",
    "L['x'].size()",
    "L['x'].size(0)[0]",
    "L['x'].size()[s0]",
    "L['x'].size()[0].__class__",
    "L['x'].__class__",
    "L['__class__'].__init__.__globals__['os']",
    "L[eval]",
    "L['x'][s0]",
    "L['x;y'].size()[0]",
    "L[0:1]",
    "M['x'].size()[0]",
    "eval('s0')",
    "eval(s0)",
    # Letters that Python reads as e, v, a, l and n, a, m, e.
    "\uff45\uff56\uff41\uff4c(s0)",
    "s0.\uff4e\uff41\uff4d\uff45",
    "s0.__class__",
    "s0.subs('x', 1)",
    "[s0]",
    "s0\nimport os",
    "L['x'].size().__class__",
    "L['x'].data()[0]",
    "Symbol('s0;x')",
    "getattr(s0, 's1')",
    "__import__('os')",
    "min.__self__",
    "min",
    "math.system(s0)",
    "os.floor(s0)",
    "math.floor.__self__",
    "min(s0, s1)(s0)",
    "min(*L['x'])",
    "min(s0, key=s1)",
    "Symbol('s0', **s1)",
    "Symbol('os')",
    "Abs('eval')",
    "Abs('s0+s1')",
    "'s0'",
    "(lambda: s0)()",
    "lambda: s0",
    "[s0 for s0 in s1]",
    "(s0 for s1 in s2)",
    "{s0}",
    "(s0, s1)",
    "(s0 := s1)",
    "f's0'",
    "s0 in s1",
    "s0 is s1",
    "s0 @ s1",
    "s0 << s1",
    "1j",
    "...",
    "None",
    "s0 # s1",
    "s0\n+ s1",
    "s0 \\\n+ s1",
    'L["x"].size()[0]',
    's0 == s1, "")',
    "\uff53\uff10",
    "+".join(["s0"] * 6000),
    "+".join(["s0"] * 2000),
    "(" * 300 + "s0" + ")" * 300,
    "-" * 9000 + "s0",
    "min(s0, " * 150 + "s0" + ")" * 150 + ".__class__",
]
# Sizes by their grammar; what computes them would not end, or fill the memory.
ENDLESS = [
    "9**9**9**9 > 0", "2**17", "s0**s1", "2**(8 + 8)", "Pow(9, Pow(9, 9))", "PowByNatural(2, s0)", "2**-17",
    "2**1e300", "Pow(2, Integer('99999999'))", "Pow(2, Float('1e9'))", "Pow(2, Rational(99999, 2))", "Pow(2)",
    "(((9**16)**16)**16)**16",
    "s0*s0" + "*s0" * 100, "(s0+s1+u0+u1+1)**16", "((s0 + 1)**16*(s1 + 1)**16)**4", "Float('1.5', precision=10**9)",
    "Float('1.5', precision=1000000000)", "Float(1.5, 1000000000)", "Float('1e9999999999')", "Integer('1e-9999999999')",
    "round(s0, -1000000000)", "round(s0, s1)", "min('s0', 's1') * 10000000000", "Max('s0', 1)",
    "Mul('s0', 10000000000)",
    "Symbol('s0', positive=9**9)", "Max(" + "s0, " * 200 + "s1)", "min()",
]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS, ids=lambda text: text[:40])
def test_what_is_not_computed_in_moments_is_refused(text: str) -> None:
    assert not is_size_expression(text)


@pytest.mark.parametrize("text", CODE, ids=lambda text: text[:40].encode("unicode_escape").decode())
def test_all_else_is_refused(text: str) -> None:
    assert not is_size_expression(text)


def test_functions_that_torch_writes() -> None:
    """Every name that torch hands to SymPy and that can stand in a graph's expression."""
    s0 = sympy.Symbol("s0", positive=True, integer=True)
    functions = importlib.import_module("torch.utils._sympy.functions")
    for name in ("FloorDiv", "CeilToInt", "FloorToInt", "IntTrueDiv", "Mod", "PythonMod", "ToFloat", "TruncToInt"):
        function = getattr(functions, name)
        arguments = (s0, 3) if name in ("FloorDiv", "IntTrueDiv", "Mod", "PythonMod") else (s0 / 2,)
        assert is_size_expression(str(function(*arguments)))
