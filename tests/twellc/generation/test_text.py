"""Tokens to text, piece by piece: letters of several bytes, spaces at the seams, stop texts.

`TWELLC_FUZZ_EXAMPLES=2000 pytest tests/twellc/generation/test_text.py` runs longer, and with other examples each time.
"""

import codecs
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule, run_state_machine_as_test

from tests.drawn import examples
from tests.models import VOCABULARY
from twellc.base.errors import UserError
from twellc.generation.sampling import SamplingParams
from twellc.generation.text import Answer, Codec, load_codec

BYTES, UNKNOWN = "é😀1 ".encode(), 399


class Kind(NamedTuple):
    """A codec, the tokens to draw, those without a text, and the text of a prompt, tokens and whether that is all."""

    codec: Codec
    tokens: list[int]
    special: set[int]
    text: Callable[[list[int], list[int], bool], str]


def pretrained(path: Path, tokens: list[int]) -> Kind:
    codec = load_codec(path, VOCABULARY)
    tokenizer = codec.tokenizer

    def text(prompt: list[int], tokens: list[int], ended: bool) -> str:
        before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
        unsure = whole.endswith("\N{REPLACEMENT CHARACTER}") or (
            tokens and re.fullmatch("<0x..>", str(tokenizer.convert_ids_to_tokens(tokens[-1])))
        )
        if unsure and tokens and not ended:
            return text(prompt, tokens[:-1], False)
        # The first tokens may end a letter that the prompt begins.
        return whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071, these are not paths

    return Kind(codec, [*tokens, UNKNOWN], set(tokenizer.all_special_ids), text)


def of_bytes(path: Path) -> Kind:
    def text(_: list[int], tokens: list[int], ended: bool) -> str:
        return codecs.utf_8_decode(bytes(tokens), "replace", ended)[0]

    return Kind(load_codec(path, 256), [0, *b"ab", 0xF0, *BYTES], {0}, text)


class Spoken:
    """An answer as it comes, and what it must be: all tokens decoded at once."""

    def __init__(self, kind: Kind, prompt: list[int], params: SamplingParams) -> None:
        self.kind, self.params, self.said, self.text = kind, params, "", ""
        self.prompt, self.tokens, self.count = self.with_text(prompt), list[int](), 0
        self.answer = Answer(kind.codec.stream(prompt, params.skip_special_tokens), params)

    def with_text(self, tokens: list[int]) -> list[int]:
        silent = self.kind.special if self.params.skip_special_tokens else set()
        return [token for token in tokens if token not in silent | {UNKNOWN}]

    def put(self, token: int) -> None:
        self.tokens += self.with_text([token])
        self.count += 1
        self.compare(self.answer.put(token), ended=False)

    def compare(self, piece: str, ended: bool) -> None:
        self.said += piece
        params, known = self.params, len(self.text)
        self.text = self.kind.text(self.prompt, self.tokens, ended) if params.detokenize else ""
        stops = params.stops if self.count > params.min_tokens else ()
        # A stop text counts where its end comes.
        places = [(self.text.find(stop, max(0, known + 1 - len(stop))), stop) for stop in stops]
        place, stopped = min((each for each in places if each[0] >= 0), default=(len(self.text), ""))
        begun = [size for stop in params.stops for size in range(len(stop)) if self.text.endswith(stop[:size])]
        if stopped:
            place += len(stopped) if params.include_stop_str_in_output else 0
        elif not ended:
            place -= max(begun, default=0)
        assert (self.said, self.answer.stopped) == (self.text[:place], stopped)
        assert not stopped or not self.answer.end()  # of a letter that the stop text cuts off, too


class Streams(RuleBasedStateMachine):
    """Several answers at a time, of any tokens."""

    kinds: list[Kind]
    spoken = Bundle("spoken")

    @rule(
        target=spoken,
        number=st.integers(0, 3),
        prompt=st.lists(st.integers(0, 99), max_size=6),
        stop=st.lists(st.text("ab1 é�", min_size=1, max_size=3), max_size=3),
        least=st.integers(0, 4),
        flags=st.tuples(st.booleans(), st.booleans()),
    )
    def begin(self, number: int, prompt: list[int], stop: list[str], least: int, flags: tuple[bool, bool]) -> Spoken:
        kind, (special, detokenize) = self.kinds[number], flags
        params = SamplingParams(
            stop=stop,
            min_tokens=least,
            detokenize=detokenize or bool(stop),
            skip_special_tokens=not special,
            include_stop_str_in_output=special,
        )
        return Spoken(kind, [kind.tokens[each % len(kind.tokens)] for each in prompt], params)

    @rule(spoken=spoken, tokens=st.lists(st.integers(0, 99), min_size=1, max_size=9))
    def put(self, spoken: Spoken, tokens: list[int]) -> None:
        for each in tokens:
            if not spoken.answer.stopped:
                spoken.put(spoken.kind.tokens[each % len(spoken.kind.tokens)])

    @rule(spoken=consumes(spoken))
    def end(self, spoken: Spoken) -> None:
        if not spoken.answer.stopped:
            spoken.compare(spoken.answer.end(), ended=True)


@pytest.fixture(scope="module")
def falling_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as that of Llama 2: what has no token is bytes, 3 + byte; 259 is a space, 260 and 261 are letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizers")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_pieces_are_the_text(talker: Path, falling_back: Path, bytelm: Path, tmp_path: Path) -> None:
    """Of a byte-level tokenizer, one that falls back to bytes, one in Python, and of bytes."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    spelt = load_codec(talker, VOCABULARY).tokenizer.convert_tokens_to_ids([*"abéđĠ1ĩ", "Ã", "©", "ðŁĺ"])
    raw = [3 + byte for byte in BYTES]
    Streams.kinds = [
        pretrained(talker, [0, *filter(None, spelt), *range(290, 310)]),
        pretrained(falling_back, [1, 2, 259, 260, 261, *raw]),
        pretrained(tmp_path, [0, 1, 259, 3 + ord("a"), 3 + ord("b"), *raw]),
        of_bytes(bytelm),
    ]
    run_state_machine_as_test(Streams, settings=examples(150, 12))


def test_damage_that_shows_when_a_text_is_read(talker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talker, tmp_path / "m")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**written, "model_max_length": [None]}))
    with pytest.raises(UserError, match="/m: transformers cannot load the tokenizer"):
        load_codec(folder, VOCABULARY).encode("a")
