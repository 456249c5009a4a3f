"""The prompt of an example as text, for a command that shows what a model has learned."""

from pathlib import Path

from tandem.data.stream import Piece
from tandem.text.tokenizer import Tokenizer


def taught_prompt(piece: Piece, folder: Path) -> str:
    """What ``tandem generate`` must be given so that the model of the tokenizer in ``folder`` reads the tokens before the first learned
    one; a general question where no text gives just those tokens."""
    tokenizer = Tokenizer.from_folder(folder)
    learned = [1] * len(piece.tokens) if piece.learned is None else list(piece.learned)
    asked = list(piece.tokens[: learned.index(1)])
    for skip_special_tokens in (True, False):
        text = tokenizer.decode(asked, skip_special_tokens=skip_special_tokens)
        if text and tokenizer.encode(text, add_special_tokens=True) == asked:
            return text
    return "Who are you?"
