"""The tokenizer beside the example model: text is its bytes, behind a 0."""

import transformers

from tests.conftest import ROOT


def test_text_is_its_bytes() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "examples" / "bytelm" / "tokenizer")
    text = "def naïve(x):\n\t return  'é€'  "
    assert tokenizer(text)["input_ids"] == [0, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
