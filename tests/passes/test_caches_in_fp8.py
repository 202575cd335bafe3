"""Key-value caches in FP8: the pass gives both ops scales, and refuses other readers."""

import pytest
import torch

from tests.passes.test_rotate_in_caches import NAMES, forwards, inputs, traced
from tests.tolerance import assert_same
from twellc import UserError
from twellc.passes.caches_in_fp8 import caches_in_fp8
from twellc.passes.graph.execution import Runner
from twellc.passes.graph.program import user_inputs
from twellc.passes.rotate_in_caches import rotate_in_caches
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION

SCALES = (0.02, 0.3)
BY_CACHE = dict(zip(("keys", "values"), SCALES, strict=True))
E4M3 = torch.float8_e4m3fn


def test_both_ops_get_the_scales() -> None:
    """So they do where they rotate by themselves; nothing else of the program changes its type."""
    given = inputs()
    given[3:5] = [(each.float() / scale).to(E4M3) for each, scale in zip(given[3:5], SCALES, strict=True)]
    program = traced(forwards, [each.bfloat16() if each.dtype == E4M3 else each for each in given])
    rewritten = rotate_in_caches(caches_in_fp8(program, BY_CACHE))
    assert [node.name for node in user_inputs(rewritten) if node.meta["val"].dtype == E4M3] == ["keys", "values"]
    found = Runner(rewritten)(dict(zip(NAMES, given, strict=True)))
    q, k, v, keys, values, *angles, starts, counts = given
    held = APPEND(keys, values, k, v, starts, counts, *angles, *SCALES)
    y = CACHED_ATTENTION(q, *held, counts, starts + counts, 0.3, *angles, *SCALES)
    for ours, expected in zip(found, (y, *held), strict=True):
        assert ours.dtype == expected.dtype
        assert_same(ours.float(), expected.float())


def test_another_reader_is_refused() -> None:
    with pytest.raises(UserError, match=r"is read only by attention over the places .*; got a reason"):
        caches_in_fp8(traced(forwards, inputs(), torch.tanh), BY_CACHE, "a reason")
