"""Tokens to text, piece by piece: letters of several bytes, spaces at the seams, stop texts."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import VOCABULARY
from twellc.base.errors import UserError
from twellc.generation.sampling import SamplingParams
from twellc.generation.text import Answer, _PretrainedStream, load_codec


class Spelled:
    """A stream of letters, a token each, that keeps the last one back until it ends."""

    def __init__(self) -> None:
        self.last = ""

    def put(self, token: int) -> str:
        before, self.last = self.last, chr(token)
        return before

    def end(self) -> str:
        before, self.last = self.last, ""
        return before


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@settings(deadline=None)
def test_stop_texts(text: str, stops: list[str]) -> None:
    answer, pieces = Answer(Spelled(), SamplingParams(stop=stops)), []
    for letter in text:
        pieces.append(answer.put(ord(letter)))
        if answer.stopped:
            break
    pieces.append(answer.end())
    places = [text.find(stop) for stop in stops if stop in text]
    # Texts are looked for as they come: the one that is complete first ends the answer.
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if first is None:
        assert "".join(pieces) == text and not answer.stopped
    else:
        whole = [stop for stop in stops if text[:first].endswith(stop)]
        assert answer.stopped in whole
        assert "".join(pieces) == text[: first - max(map(len, whole))]
        assert min(places) <= first


@given(st.lists(st.integers(1, VOCABULARY - 1), max_size=20), st.lists(st.integers(1, VOCABULARY - 1), max_size=9))
@settings(deadline=None, max_examples=50)
def test_pieces_are_the_text(talker: Path, tokens: list[int], prompt: list[int]) -> None:
    """Any tokens, most of which are parts of letters."""
    codec = codecs(talker)
    stream = codec.stream(prompt, True)
    pieces = [stream.put(token) for token in tokens]
    whole = "".join([*pieces, stream.end()])
    decode: Any = codec.tokenizer.decode
    before, both = decode(prompt), decode(prompt + tokens)
    # The first tokens may end a letter that the prompt begins.
    shared = next((place for place, letter in enumerate(before) if both[place : place + 1] != letter), len(before))
    assert whole == both[shared:]


@cache
def codecs(path: Path) -> Any:
    return load_codec(path, VOCABULARY)


def test_a_letter_comes_when_it_is_whole(talker: Path) -> None:
    codec = load_codec(talker, VOCABULARY)
    tokens = codec.tokenizer.encode("ж", add_special_tokens=False)
    assert len(tokens) == 2
    stream = codec.stream([], True)
    assert [stream.put(tokens[0]), stream.put(tokens[1]), stream.end()] == ["", "ж", ""]
    cut = codec.stream([], True)
    assert [cut.put(tokens[0]), cut.end()] == ["", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(("skipped", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens(talker: Path, skipped: bool, text: str) -> None:
    codec = load_codec(talker, VOCABULARY)
    (a,), (b,) = codec.encode("a"), codec.encode("b")
    stream = codec.stream([], skipped)
    assert "".join([*(stream.put(token) for token in (a, 0, b)), stream.end()]) == text


def test_a_space_at_the_seam(tmp_path: Path) -> None:
    """A tokenizer that drops the space before the first token of a text: the answer is not the first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    codec = load_codec(tmp_path, 3)
    assert codec.encode("the fox") == [0, 1]
    assert codec.stream([0], True).put(1) == " fox"
    assert codec.stream([], True).put(1) == "fox"


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


@given(st.lists(st.sampled_from([260, 261, *(3 + byte for byte in "é€1".encode())]), max_size=9))
@settings(deadline=None)
def test_bytes_of_a_tokenizer_with_letters(falling_back: Path, tokens: list[int]) -> None:
    """A run of bytes is text if it is UTF-8 as a whole: its first ones are known when it has ended."""
    codec = codecs(falling_back)
    stream = codec.stream([1, 260], True)
    pieces = [stream.put(token) for token in tokens]
    assert "a" + "".join([*pieces, stream.end()]) == codec.tokenizer.decode([1, 260, *tokens], skip_special_tokens=True)


def test_a_prompt_of_bytes(falling_back: Path) -> None:
    """What stands before a prompt's last tokens says where a letter begins."""
    codec = load_codec(falling_back, 262)
    prompt = codec.encode("b😀😀😀\n")
    assert prompt[-13:] == [*(3 + byte for byte in "😀😀😀\n".encode())]
    stream = codec.stream(prompt, True)
    assert [stream.put(3 + ord("\n")), stream.put(261), stream.end()] == ["", "\nb", ""]


class Slow:
    """A tokenizer without an incremental decoder: tokens are bytes."""

    is_fast = False
    added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012, nobody changes it

    def __len__(self) -> int:
        return 256

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


@given(st.text("aé€😀", max_size=8), st.integers(0, 3))
@settings(deadline=None)
def test_a_tokenizer_without_an_incremental_decoder(text: str, cut: int) -> None:
    """Letters come when they are whole; one that is cut off comes at the end."""
    stream, tokens = _PretrainedStream(Slow(), list(b"so: "), True), list(text.encode())
    tokens = tokens[: len(tokens) - cut]
    pieces = [stream.put(token) for token in tokens]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join([*pieces, stream.end()]) == bytes(tokens).decode(errors="replace")


def test_tokens_that_only_the_model_has(tmp_path: Path, talker: Path) -> None:
    """Models have more token ids than their tokenizers: these give no text."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    letters = [3 + byte for byte in "é".encode()]
    for codec, unknown in ((load_codec(tmp_path, 400), 399), (load_codec(talker, 400), 399)):
        assert codec.stream([unknown, unknown], True).end() == ""
    stream = load_codec(tmp_path, 400).stream([399, *letters], True)
    assert [*map(stream.put, (letters[0], 399, letters[1])), stream.end()] == ["", "", "é", ""]


def test_bytes(bytelm: Path) -> None:
    codec = load_codec(bytelm, 256)
    assert codec.encode("é") == [0, 0xC3, 0xA9]
    stream = codec.stream([0], True)
    assert [stream.put(each) for each in (0xC3, 0xA9, 0, 0x41, 0xE2)] == ["", "é", "", "A", ""]
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert codec.stream([0], False).put(0) == "\0"


def test_damage_that_shows_when_a_text_is_read(talker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talker, tmp_path / "m")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**written, "model_max_length": [None]}))
    with pytest.raises(UserError, match="/m: transformers cannot load the tokenizer"):
        load_codec(folder, VOCABULARY).encode("a")
