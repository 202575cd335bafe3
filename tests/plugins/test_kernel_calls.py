"""What calls have in common is worked out once, for the calls that are alike, and holds no tensor."""

import gc
import weakref

import pytest
import torch

from twellc.plugins.kernel_calls import Given, Prepared, Reading


def test_calls_that_are_alike_are_worked_out_once() -> None:
    seen: list[Given] = []

    def prepare(given: Given) -> int:
        seen.append(given)
        if given["activation"] == "silu":
            raise ValueError("silu")
        return len(seen)

    prepared, x = Prepared(prepare, free=("list",)), torch.ones(4, 8)
    call = {"x": x, "bias": None, "splits": [4, 4], "list": torch.ones(3), "activation": "relu"}
    assert [prepared.of({**call, "x": torch.ones(4, 8), "list": torch.ones(each)}) for each in (3, 5)] == [1, 1]
    others: list[Given] = [
        {**call, "x": torch.ones(8, 4).t()},
        {**call, "x": torch.ones(2, 2, 8)},
        {**call, "x": x.double()},
        {**call, "x": x.to("meta")},
        {**call, "bias": x},
        {**call, "splits": [8]},
        {**call, "list": torch.ones(3).double()},
        {**call, "activation": "relu2"},
    ]
    assert [prepared.of(each) for each in others] == list(range(2, 10)) == [prepared.of(each) for each in others]
    for _ in range(2):
        with pytest.raises(ValueError, match="silu"):
            prepared.of({**call, "activation": "silu"})
    assert len(seen) == 11


def test_nothing_holds_a_tensor() -> None:
    prepared = Prepared(lambda given: Reading.of(given, {"x": "x", "bias": "b_up"}))
    x = torch.ones(8, 4).t()
    call = {"x": x, "bias": None}
    addresses, copies = prepared.of(call).addresses(call)
    (copy,) = copies
    assert addresses == {"x": copy.data_ptr()} and copy.is_contiguous() and torch.equal(copy, x)
    watched = [weakref.ref(each) for each in (x, copy)]
    del x, copy, copies, call
    gc.collect()
    assert [each() for each in watched] == [None, None]
